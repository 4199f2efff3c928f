"""Rank 0 conducts: it tells who is to ping or to send to whom, and gathers the figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from thalweg.members.abort import Alarm
from thalweg.members.world import World
from thalweg.probing.messages import ANSWERS, ORDERS, Exchange
from thalweg.probing.network import Flow
from thalweg.probing.worker import LEADER, OVER, Order, obey, serve

FLOWS_A_CORE = 4  # where hosts share a machine
Counted = Callable[[int], None]
"""Called with the number of measurements so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Station:
    """A host as it introduces itself, and the ranks on it."""

    name: str
    machine: str
    cores: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How long is measured: small messages to a round trip, seconds to a flow."""

    pings: int = 200
    short: float = 0.3
    long: float = 0.5


class Conductor:
    """The network as rank 0 measures it; every host's first rank speaks for it."""

    def __init__(self, exchange: Exchange, size: int, effort: Effort, counted: Counted) -> None:
        self._exchange = exchange
        self._ranks = range(size)
        self._effort = effort
        self._counted = counted
        self.measurements = 0
        self.stations = self._introduce()

    @property
    def size(self) -> int:
        return len(self.stations)

    @property
    def at_once(self) -> int:
        """Hosts on one machine share its cores."""
        machines = Counter(station.machine for station in self.stations)
        cores = [s.cores for s in self.stations if machines[s.machine] > 1]
        return max(1, min([self.size // 2, *(FLOWS_A_CORE * number for number in cores)]))

    def round_trip(self, source: int, target: int) -> float:
        return self.round_trip_of_ranks(self._speaker(source), self._speaker(target))

    def round_trip_of_ranks(self, one: int, other: int) -> float:
        pings = self._effort.pings
        found = self._order(
            {
                other: {"do": "echo", "peer": one, "pings": pings},
                one: {"do": "ping", "peer": other, "pings": pings},
            }
        )
        return float(found[one])

    def rates(self, flows: Sequence[Flow], *, short: bool = False) -> list[float]:
        seconds = self._effort.short if short else self._effort.long
        orders: dict[int, Order] = {}
        for flow in flows:
            source, target = self._speaker(flow.source), self._speaker(flow.target)
            orders[target] = {"do": "take", "peer": source, "seconds": seconds}
            orders[source] = {"do": "send", "peer": target, "seconds": seconds}
        found = self._order(orders, seconds)
        return [float(found[self._speaker(flow.target)]) for flow in flows]

    def end(self, result: Any) -> None:
        """All workers return this."""
        for rank in self._ranks:
            if rank != LEADER:
                self._exchange.tell(rank, ORDERS, {"do": OVER, "result": result})

    def _speaker(self, host: int) -> int:
        return self.stations[host].ranks[0]

    def _introduce(self) -> list[Station]:
        said = self._order({rank: {"do": "introduce"} for rank in self._ranks})
        together: dict[tuple[str, str, str], list[int]] = {}
        for rank in self._ranks:
            who = said[rank]
            together.setdefault((who["name"], who["machine"], who["stack"]), []).append(rank)
        return [
            Station(name=name, machine=machine, cores=said[ranks[0]]["cores"], ranks=tuple(ranks))
            for (name, machine, _), ranks in together.items()
        ]

    def _order(self, orders: dict[int, Order], seconds: float = 0.0) -> dict[int, Any]:
        """What each rank answers."""
        for rank, order in orders.items():
            if rank != LEADER:
                self._exchange.tell(rank, ORDERS, order)
        found = {}
        if LEADER in orders:
            found[LEADER] = obey(self._exchange, orders[LEADER])
        for rank in orders:
            if rank != LEADER:
                found[rank] = self._exchange.hear(rank, ANSWERS, seconds)
        self.measurements += 1
        self._counted(self.measurements)
        return found


def conducted(
    room: World,
    alarm: Alarm,
    effort: Effort,
    survey: Callable[[Conductor], Any],
    counted: Counted,
) -> Any:
    """What rank 0's survey of the network gives, on all ranks, which call this together."""
    line = room.transport()
    try:
        exchange = Exchange(line, alarm, room.timeout)
        if room.rank != LEADER:
            found = serve(exchange)
        else:
            conductor = Conductor(exchange, room.size, effort, counted)
            found = survey(conductor)
            conductor.end(found)
        room.part(room.timeout, alarm)
    finally:
        line.close()
    return found
