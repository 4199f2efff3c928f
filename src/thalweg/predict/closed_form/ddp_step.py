"""The closed form of a data-parallel step (Agarwal et al., "On the Utility of Gradient Compression
in Distributed Training Systems", MLSys 2022), and of one that compresses.

Buckets are sent while backward goes on, which slows it down by lambda (observed: 1.04 to 1.1). Of k
buckets, k-1 can hide behind it; the last is made of the gradients that backward finishes last:

    T_obs = max(lambda T_comp, (k-1) T_comm(b)) + T_comm(b^)

b^ stands outside the maximum because nothing is left to hide it. `as_printed` is the variant with
it inside, for comparison: it lets the last bucket overlap with a backward that is over. Nor is b^
what remains after k-1 full buckets: tensors aren't cut, so BERT's last one holds its embedding, 91
MiB with a limit of 25. Take buckets from real shapes (`Workload.buckets`).

Compression is serial: it competes with backward for the same processor, and overlapping them was
slower than not. So nothing hides its payloads:

    T = T_comp + T_ed + sum of T_comm of the payloads

T_comm is alpha-beta: alpha for a message, and bytes at the *effective* rate of the slowest link,
which TCP keeps below the nominal one. Assumed are workers that are alike and never late, links that
carry nothing else, and one link at a time that counts. Left out are model parallelism and
asynchrony: there is one barrier a step. T_comp is backward; forward and optimizer come on top.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

OVERLAP_SLOWDOWN_FACTOR = 1.07  # how much longer backward takes while gradients are sent
MAX_SECONDS_PER_BYTE = 1e12  # seconds of a byte, which nothing but bytes matters beside


@dataclass(frozen=True, slots=True)
class AlphaBetaNetwork:
    alpha: float  # seconds of a message
    bytes_per_second: float  # effective

    @classmethod
    def of_gbps(cls, gbps: float, alpha: float) -> AlphaBetaNetwork:
        return cls(alpha, gbps * 1e9 / 8)

    def transfer(self, nbytes: float) -> float:
        return nbytes / self.bytes_per_second


Collective = Callable[[AlphaBetaNetwork, float, int], float]
"""Seconds for so many bytes of each of p workers."""


def ring(network: AlphaBetaNetwork, nbytes: float, workers: int) -> float:
    """2(p-1) alpha + 2(p-1)/p b/BW"""
    hops = 2 * (workers - 1)
    return hops * network.alpha + network.transfer(hops / workers * nbytes)


def all_gather(network: AlphaBetaNetwork, nbytes: float, workers: int) -> float:
    """(p-1)(alpha + b/BW)"""
    return (workers - 1) * (network.alpha + network.transfer(nbytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class UncompressedStep:
    """A step without compression."""

    compute: float  # seconds of backward
    buckets: Sequence[float]  # bytes, in the order in which they are sent
    workers: int
    slowed: float = OVERLAP_SLOWDOWN_FACTOR
    collective: Collective = ring

    def seconds(self, network: AlphaBetaNetwork) -> float:
        *hidden, last = self._sent(network)
        return max(self._backward, sum(hidden)) + last

    def corner(self, alpha: float) -> float:
        """The seconds for a byte at which what backward hides takes as long as backward."""
        at_once, slowly = (
            sum(self._sent(AlphaBetaNetwork(alpha, rate))[:-1]) for rate in (inf, 1.0)
        )
        rises = slowly > at_once
        return max(0.0, (self._backward - at_once) / (slowly - at_once)) if rises else 0.0

    def as_printed(self, network: AlphaBetaNetwork) -> float:
        """max(lambda T_comp, (k-1) T_comm(b) + T_comm(b^))"""
        return max(self._backward, sum(self._sent(network)))

    @property
    def _backward(self) -> float:
        """Alone, a worker sends nothing that would slow it down."""
        return self.compute * (self.slowed if self.workers > 1 else 1.0)

    def _sent(self, network: AlphaBetaNetwork) -> list[float]:
        return [self.collective(network, nbytes, self.workers) for nbytes in self.buckets]


@dataclass(frozen=True, slots=True)
class SentPayload:
    """A payload of each worker, and how it travels."""

    nbytes: float
    collective: Collective


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecTimes:
    """Seconds of T_ed in a step. Where payloads are gathered, every worker decodes those of all, so
    T_ed grows with p."""

    own: float  # encoding, and decoding one result
    gathered: float = 0.0  # for the payload of each worker, if all of them are decoded

    def seconds(self, workers: int) -> float:
        return self.own + self.gathered * workers


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedStep:
    """A step that compresses when backward is over, and sends then."""

    compute: float
    codec: CodecTimes
    payloads: Sequence[SentPayload]
    workers: int

    def seconds(self, network: AlphaBetaNetwork) -> float:
        sent = sum(p.collective(network, p.nbytes, self.workers) for p in self.payloads)
        return self.compute + self.codec.seconds(self.workers) + sent


def pays_below(dense: UncompressedStep, compressed: CompressedStep, alpha: float) -> float:
    """Bytes per second below which the compressed step is always shorter; 0 where it isn't on the
    slowest links either, inf where it is on all.

    In x = 1 / rate both are straight but for one corner of the dense step's, which bends upwards.
    So their difference is convex: least at the corner or at x = 0, and beyond that it changes sign
    once at most."""

    def gain(x: float) -> float:
        network = AlphaBetaNetwork(alpha, 1 / x if x else inf)
        return dense.seconds(network) - compressed.seconds(network)

    fast, slow = min((0.0, dense.corner(alpha)), key=gain), MAX_SECONDS_PER_BYTE
    if gain(slow) <= 0:
        return 0.0
    if gain(fast) >= 0:
        return inf
    while slow - fast > 1e-9 * slow:
        middle = (fast + slow) / 2
        if gain(middle) < 0:
            fast = middle
        else:
            slow = middle
    return 1 / slow


def sufficient_ratio(dense: UncompressedStep, network: AlphaBetaNetwork) -> float:
    """How many times smaller gradients must be, at no cost, for the network to keep up with
    backward: sum of T_comm(b / ratio) <= lambda T_comp. inf if messages alone take longer."""
    backward = dense.compute * dense.slowed
    latency = sum(dense.collective(network, 0.0, dense.workers) for _ in dense.buckets)
    whole = sum(dense.collective(network, nbytes, dense.workers) for nbytes in dense.buckets)
    return max(1.0, (whole - latency) / (backward - latency)) if latency < backward else inf
