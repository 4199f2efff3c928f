"""Rank 0 conducts: it tells who is to ping or to send to whom, and gathers the figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from thalweg.members.abort import AbortFlag
from thalweg.members.world import World
from thalweg.probing.messages import ANSWERS_LABEL, ORDERS_LABEL, ProbeMessenger
from thalweg.probing.network import ProbeFlow
from thalweg.probing.worker import PROBE_LEADER_RANK, PROBE_OVER_ORDER, Order, obey, serve

MAX_FLOWS_PER_CORE = 4  # where hosts share a machine
Counted = Callable[[int], None]
"""Called with the number of measurements so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostInfo:
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


class ProbeCoordinator:
    """The network as rank 0 measures it; every host's first rank speaks for it."""

    def __init__(
        self, exchange: ProbeMessenger, size: int, effort: Effort, counted: Counted
    ) -> None:
        self._exchange = exchange
        self._ranks = range(size)
        self._effort = effort
        self._counted = counted
        self.measurements = 0
        self.host_infos = self._introduce()

    @property
    def size(self) -> int:
        return len(self.host_infos)

    @property
    def at_once(self) -> int:
        """Hosts on one machine share its cores."""
        machines = Counter(host.machine for host in self.host_infos)
        cores = [s.cores for s in self.host_infos if machines[s.machine] > 1]
        return max(1, min([self.size // 2, *(MAX_FLOWS_PER_CORE * number for number in cores)]))

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

    def rates(self, flows: Sequence[ProbeFlow], *, short: bool = False) -> list[float]:
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
            if rank != PROBE_LEADER_RANK:
                self._exchange.send_json(
                    rank, ORDERS_LABEL, {"do": PROBE_OVER_ORDER, "result": result}
                )

    def _speaker(self, host: int) -> int:
        return self.host_infos[host].ranks[0]

    def _introduce(self) -> list[HostInfo]:
        said = self._order({rank: {"do": "introduce"} for rank in self._ranks})
        together: dict[tuple[str, str, str], list[int]] = {}
        for rank in self._ranks:
            who = said[rank]
            together.setdefault((who["name"], who["machine"], who["stack"]), []).append(rank)
        return [
            HostInfo(name=name, machine=machine, cores=said[ranks[0]]["cores"], ranks=tuple(ranks))
            for (name, machine, _), ranks in together.items()
        ]

    def _order(self, orders: dict[int, Order], seconds: float = 0.0) -> dict[int, Any]:
        """What each rank answers."""
        for rank, order in orders.items():
            if rank != PROBE_LEADER_RANK:
                self._exchange.send_json(rank, ORDERS_LABEL, order)
        found = {}
        if PROBE_LEADER_RANK in orders:
            found[PROBE_LEADER_RANK] = obey(self._exchange, orders[PROBE_LEADER_RANK])
        for rank in orders:
            if rank != PROBE_LEADER_RANK:
                found[rank] = self._exchange.receive_json(rank, ANSWERS_LABEL, seconds)
        self.measurements += 1
        self._counted(self.measurements)
        return found


def run_coordinated(
    namespace: World,
    abort_flag: AbortFlag,
    effort: Effort,
    survey: Callable[[ProbeCoordinator], Any],
    counted: Counted,
) -> Any:
    """What rank 0's survey of the network gives, on all ranks, which call this together."""
    line = namespace.transport()
    try:
        exchange = ProbeMessenger(line, abort_flag, namespace.timeout)
        if namespace.rank != PROBE_LEADER_RANK:
            found = serve(exchange)
        else:
            conductor = ProbeCoordinator(exchange, namespace.size, effort, counted)
            found = survey(conductor)
            conductor.end(found)
        namespace.leave(namespace.timeout, abort_flag)
    finally:
        line.close()
    return found
