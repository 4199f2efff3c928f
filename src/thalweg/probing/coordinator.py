"""The coordinator of a probe on rank 0, and the workers that follow its orders.

All that inference knows of a network are the coordinator's round trips, and its rates of flows.
Hosts are numbers from 0; the first rank of each host sends and receives for it.

An order is a small message: describe your host, echo pings, send pings, send a flow, receive one.
Each is answered with a figure or a description.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any, NamedTuple

import numpy as np

from thalweg.facts import grouped
from thalweg.members.abort import AbortFlag
from thalweg.members.world import World
from thalweg.probing.flow import (
    ANSWERS_LABEL,
    ORDERS_LABEL,
    PINGS_LABEL,
    PONGS_LABEL,
    ProbeMessenger,
    receive_flow,
    send_flow,
)

Order = tuple[Any, ...]
"""The name of an action in `ACTIONS`, and its arguments."""
Counted = Callable[[int], None]
"""Called with the number of measurements so far."""
PROBE_LEADER_RANK = 0
ORDER_TIMEOUT_SECONDS = 600.0  # for a worker, while others are measured
PROBE_OVER_ORDER = "over"
MAX_FLOWS_PER_CORE = 4  # where hosts share a machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """The pings of a round trip, and the seconds of a short and of a long flow."""

    pings: int = 200
    short: float = 0.3
    long: float = 0.5


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


class ProbeCoordinator:
    """The network as rank 0 measures it."""

    def __init__(
        self, messenger: ProbeMessenger, size: int, effort: Effort, counted: Counted
    ) -> None:
        self._messenger = messenger
        self._ranks = range(size)
        self._effort = effort
        self._counted = counted
        self.measurements = 0
        self.host_infos = self._describe_hosts()

    @property
    def size(self) -> int:
        """The number of hosts."""
        return len(self.host_infos)

    @property
    def at_once(self) -> int:
        """The number of concurrent flows up to which only links limit them: hosts on one machine
        share its cores."""
        machines = Counter(host.machine for host in self.host_infos)
        cores = [host.cores for host in self.host_infos if machines[host.machine] > 1]
        return max(1, min([self.size // 2, *(MAX_FLOWS_PER_CORE * number for number in cores)]))

    def round_trip(self, source: int, target: int) -> float:
        """The shortest round trip of a small message between two hosts, in seconds."""
        return self.round_trip_of_ranks(self._first_rank(source), self._first_rank(target))

    def round_trip_of_ranks(self, one: int, other: int) -> float:
        pings = self._effort.pings
        found = self._order(
            {
                other: ("echo", one, pings),
                one: ("ping", other, pings),
            }
        )
        return float(found[one])

    def rates(self, flows: Sequence[ProbeFlow], *, short: bool = False) -> list[float]:
        """The rate of each flow in bits per second, while all of them run.

        Every host is in at most one of them. `short` flows are measured less exactly."""
        seconds = self._effort.short if short else self._effort.long
        orders: dict[int, Order] = {}
        for flow in flows:
            source, target = self._first_rank(flow.source), self._first_rank(flow.target)
            orders[target] = ("receive", source, seconds)
            orders[source] = ("send", target, seconds)
        found = self._order(orders, seconds)
        return [float(found[self._first_rank(flow.target)]) for flow in flows]

    def end(self, result: Any) -> None:
        """Make all workers return this result."""
        for rank in self._ranks[1:]:
            self._messenger.send_json(rank, ORDERS_LABEL, (PROBE_OVER_ORDER, result))

    def _first_rank(self, host: int) -> int:
        return self.host_infos[host].ranks[0]

    def _describe_hosts(self) -> list[HostInfo]:
        answers = self._order(dict.fromkeys(self._ranks, ("describe host",)))
        hosts = grouped(
            ((host["name"], host["machine"], host["stack"]), rank)
            for rank, host in sorted(answers.items())
        )
        return [
            HostInfo(
                name=name, machine=machine, cores=answers[ranks[0]]["cores"], ranks=tuple(ranks)
            )
            for (name, machine, _), ranks in hosts.items()
        ]

    def _order(self, orders: dict[int, Order], seconds: float = 0.0) -> dict[int, Any]:
        """Send these orders, and return the answer of each rank."""
        others = orders.keys() - {PROBE_LEADER_RANK}
        for rank in others:
            self._messenger.send_json(rank, ORDERS_LABEL, orders[rank])
        own = orders.keys() - others
        found = {rank: _follow(self._messenger, orders[rank]) for rank in own}
        for rank in others:
            found[rank] = self._messenger.receive_json(rank, ANSWERS_LABEL, seconds)
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
    """Run rank 0's survey of the network; all ranks call this together and get its result."""
    transport = namespace.transport()
    try:
        messenger = ProbeMessenger(transport, abort_flag, namespace.timeout)
        if namespace.rank != PROBE_LEADER_RANK:
            result = serve(messenger)
        else:
            coordinator = ProbeCoordinator(messenger, namespace.size, effort, counted)
            result = survey(coordinator)
            coordinator.end(result)
        namespace.leave(namespace.timeout, abort_flag)
    finally:
        transport.close()
    return result


def serve(messenger: ProbeMessenger) -> Any:
    """Follow the orders of rank 0 until the probe is over; return its result."""
    while True:
        order = messenger.receive_json(PROBE_LEADER_RANK, ORDERS_LABEL, ORDER_TIMEOUT_SECONDS)
        if order[0] == PROBE_OVER_ORDER:
            return order[1]
        messenger.send_json(PROBE_LEADER_RANK, ANSWERS_LABEL, _follow(messenger, order))


def _follow(messenger: ProbeMessenger, order: Order) -> Any:
    action, *arguments = order
    return ACTIONS[action](messenger, *arguments)


def host_description() -> dict[str, Any]:
    """The host of this process: ranks with the same name, machine and network stack share one, and
    no network is between them. Hosts on one machine (containers, a lab) share its cores."""
    machine = stack = ""
    with suppress(OSError):
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        stack = str(Path("/proc/self/ns/net").readlink())
    return {
        "name": socket.gethostname(),
        "machine": machine or socket.gethostname(),
        "stack": stack,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1,
    }


def _ping(messenger: ProbeMessenger, peer: int, pings: int) -> float:
    """The seconds of the fastest round trip: other work on the hosts only adds to it."""
    least = float("inf")
    ping = np.zeros(1, np.uint8)
    for _ in range(pings):
        start = perf_counter()
        sending = messenger.send(peer, PINGS_LABEL, ping)
        messenger.receive(peer, PONGS_LABEL)
        least = min(least, perf_counter() - start)
        sending.wait(monotonic() + messenger.patience)
    return least


def _echo(messenger: ProbeMessenger, peer: int, pings: int) -> None:
    for _ in range(pings):
        sending = messenger.send(peer, PONGS_LABEL, messenger.receive(peer, PINGS_LABEL))
        sending.wait(monotonic() + messenger.patience)


ACTIONS: dict[str, Callable[..., Any]] = {
    "describe host": lambda messenger: host_description(),
    "ping": _ping,
    "echo": _echo,
    "send": send_flow,
    "receive": receive_flow,
}
"""What a worker can be ordered to do, with its messenger and the order's arguments."""
