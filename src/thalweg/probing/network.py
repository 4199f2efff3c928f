"""The interface through which racks and rates are measured: round trips, and rates of flows.

It is all that inference knows of a network, so a simulated network serves as well as a real one.
Hosts are numbers from 0; one rank of each host sends and receives for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple, Protocol


class ProbeFlow(NamedTuple):
    """A flow of as many bytes as the network carries, from one host to another."""

    source: int
    target: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostInfo:
    """A host's description of itself, and the ranks on it."""

    name: str
    machine: str
    cores: int
    ranks: tuple[int, ...]


class Network(Protocol):
    @property
    def size(self) -> int:
        """The number of hosts."""

    @property
    def at_once(self) -> int:
        """The number of concurrent flows up to which only links limit them."""

    def round_trip(self, source: int, target: int) -> float:
        """The shortest round trip of a small message between two hosts, in seconds."""

    def rates(self, flows: Sequence[ProbeFlow], *, short: bool = False) -> list[float]:
        """The rate of each flow in bits per second, while all of them run.

        Every host is in at most one of them. `short` flows are measured less exactly."""


class NetworkOfHosts(Network, Protocol):
    """A network whose hosts have names and ranks."""

    @property
    def host_infos(self) -> Sequence[HostInfo]: ...

    @property
    def measurements(self) -> int: ...

    def round_trip_of_ranks(self, one: int, other: int) -> float: ...


def in_rounds(
    flows: Iterable[ProbeFlow], most: int, rack_of: Mapping[int, int] | None = None
) -> list[list[ProbeFlow]]:
    """Rounds of at most `most` flows, in which every host is in at most one flow.

    With `rack_of`, also every rack's uplink carries at most one flow of a round."""
    rounds: list[tuple[list[ProbeFlow], set[object]]] = []
    for flow in flows:
        racks = {("rack", rack_of[host]) for host in flow} if rack_of else set()
        used = {*flow, *(racks if len(racks) == 2 else ())}
        for together, busy in rounds:
            if len(together) < most and not busy & used:
                together.append(flow)
                busy |= used
                break
        else:
            rounds.append(([flow], used))
    return [together for together, _ in rounds]


def interleaved(groups: Iterable[Sequence[int]]) -> list[int]:
    """The hosts of several groups, one of each group in turn."""
    return [host for turn in zip_longest(*groups) for host in turn if host is not None]
