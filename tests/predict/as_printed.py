"""Table II of DS-Sync (Wang et al., 2022), term by term as it is printed there.

Beside it stands what `closed_forms` derives; `docs/what-does-a-synchronisation-cost.md` says where
and why they differ. beta2 is the time of a byte from one rack to another, log is to base 2. The
paper doesn't define L, P and k; they are read as in `symbols`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import log2

from thalweg.schedules.closed_form import Symbols


@dataclass(frozen=True, slots=True)
class Printed:
    latency: float  # seconds
    transfer: float

    @property
    def seconds(self) -> float:
        return self.latency + self.transfer


def ps(x: Symbols, servers: int) -> Printed:
    """2(N-1) L alpha;  2 [(C-1) G S beta2 + (G-1) S beta1] / P"""
    transfer = 2 * ((x.C - 1) * x.G * x.S * _between(x) + (x.G - 1) * x.S * x.beta1) / servers
    return Printed(2 * (x.N - 1) * x.L * x.alpha, transfer)


def ring(x: Symbols) -> Printed:
    """2(N-1) L alpha;  2(N-1) S beta2 / N"""
    return Printed(2 * (x.N - 1) * x.L * x.alpha, 2 * (x.N - 1) * x.S * _between(x) / x.N)


def double_tree(x: Symbols) -> Printed:
    """2(log N + k) L alpha;  2(log N + k) S beta2 / k"""
    stages = 2 * (log2(x.N) + x.k)
    return Printed(stages * x.L * x.alpha, stages * x.S * _between(x) / x.k)


def hierarchical(x: Symbols) -> Printed:
    """2(G+C-2) L alpha;  2(G-1) S beta1 / G + 2(C-1) S beta2 / C"""
    inside = 2 * (x.G - 1) * x.S * x.beta1 / x.G
    across = 2 * (x.C - 1) * x.S * _between(x) / x.C
    return Printed(2 * (x.G + x.C - 2) * x.L * x.alpha, inside + across)


def gossip(x: Symbols) -> Printed:
    """2 L alpha;  at least 4 S beta2"""
    return Printed(2 * x.L * x.alpha, 4 * x.S * _between(x))


def ds_sync(x: Symbols) -> Printed:
    """2 L alpha, or 2 L (G-1) alpha;  2 S beta2, or 2(G-2) S beta1 / (G-1)

    The first is a pair of representatives, the second the rest of a rack; they meet at the same
    time, so the longer counts."""
    pair = Printed(2 * x.L * x.alpha, 2 * x.S * _between(x))
    if x.G < 3:
        return pair
    rest = Printed(2 * x.L * (x.G - 1) * x.alpha, 2 * (x.G - 2) * x.S * x.beta1 / (x.G - 1))
    return max(pair, rest, key=lambda term: term.seconds)


TABLE: Mapping[str, Callable[[Symbols], Printed]] = {
    "PS": ps,
    "Ring": ring,
    "Double tree": double_tree,
    "Hierarchical": hierarchical,
    "Gossip": gossip,
    "DS-Sync": ds_sync,
}


def _between(x: Symbols) -> float:
    """Seconds for a byte from one rack to another, if it is alone."""
    return max(x.beta1, x.beta2) if x.C > 1 else x.beta1
