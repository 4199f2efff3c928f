"""What the probe asks of a network: how long a small message takes, how fast flows are at once.

What infers racks and rates knows no more of it than this, so a simulated network serves as well as
a real one. Hosts are numbers from 0; each is spoken for by one of its ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol


class ProbeFlow(NamedTuple):
    """As many bytes as the network takes, from one host to another."""

    source: int
    target: int


class Network(Protocol):
    @property
    def size(self) -> int:
        """How many hosts there are."""

    @property
    def at_once(self) -> int:
        """How many flows may run at the same time and be limited by links alone."""

    def round_trip(self, source: int, target: int) -> float:
        """Seconds that a small message and its answer take at least."""

    def rates(self, flows: Sequence[ProbeFlow], *, short: bool = False) -> list[float]:
        """Bits per second of each, while all of them run; every host is in one of them at most.
        What runs for a short time is measured less exactly."""


def in_rounds(flows: Iterable[ProbeFlow], most: int) -> list[list[ProbeFlow]]:
    """Rounds of so many flows at most, in which every host is in one flow at most."""
    rounds: list[list[ProbeFlow]] = []
    for flow in flows:
        for others in rounds:
            if len(others) < most and not any({*flow} & {*other} for other in others):
                others.append(flow)
                break
        else:
            rounds.append([flow])
    return rounds
