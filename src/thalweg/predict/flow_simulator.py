"""The simulation of schedules on a cluster's links: when each rank ends.

Messages are fluids. A message occupies every link of its path, the sending side of its source and
the receiving side of its target; flows share a link max-min fairly (`fairness.py`), and many flows
lose some of its rate (`TransportCosts.bandwidth_share`). Messages from one rank to another leave
one after the other, as on a connection. After its last byte a message travels for the latency, and
then keeps its receiver busy for a while, one message at a time. The ranks decide when they send
(`schedule_run.py`).

An idle link collects a burst, as a token bucket does: it holds up to `burst` tokens, a byte each,
and gains them at the rate that its flows leave. While it has tokens it doesn't limit; flows that
nothing else limits use them at once, in equal parts as far as needed.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from heapq import heappop, heappush
from itertools import count
from math import inf, isclose
from typing import NamedTuple

from thalweg.facts import Cluster, Link, TransportCosts
from thalweg.predict.fairness import FluidFlow, SharedResource, fair_rates, neighbours
from thalweg.predict.schedule_run import CompiledRank, ScheduleRun, compiled_ranks
from thalweg.schedules import Schedule

FREE_TRANSPORT_COSTS = TransportCosts()  # messages cost nothing but latency and bandwidth
SAME_TIME_TOLERANCE = 1e-12  # relative difference of simultaneous events
ROUNDING_BYTES = 1e-6  # less is rounding
ROUNDING_RATE_RATIO = 1e-9  # less of a rate is rounding


def simulate(
    schedule: Schedule,
    cluster: Cluster,
    costs: TransportCosts = FREE_TRANSPORT_COSTS,
    *,
    starts: Mapping[int, float] | None = None,
    burst: float = 0.0,
) -> dict[int, float]:
    """The time in seconds at which each rank ends; ranks that aren't in `starts` begin at 0."""
    return FlowSimulator(cluster, costs, burst).ends([schedule], starts or {})


class SimulatedMessage(NamedTuple):
    """A message: `left` is called when its last byte leaves, `arrived(number)` when it was
    received."""

    nbytes: int
    arrived: Callable[[int], None]
    number: int
    left: Callable[[], None]


class SimulatedConnection(FluidFlow):
    """The messages from one rank to another: the first is in flight, the others wait for it."""

    __slots__ = ("messages", "seconds", "target")

    def __init__(self, target: int, channels: tuple[SharedResource, ...], seconds: float) -> None:
        super().__init__(channels)
        self.target = target
        self.seconds = seconds  # latency
        self.messages: deque[SimulatedMessage] = deque()


class FlowSimulator:
    """A cluster's links, the flows on them, and a clock."""

    def __init__(
        self, cluster: Cluster, costs: TransportCosts = FREE_TRANSPORT_COSTS, burst: float = 0.0
    ) -> None:
        self.now = 0.0  # seconds
        self._cluster = cluster
        self._costs = costs
        self._burst = burst
        self._handling = costs.message.value
        self._links: dict[Link, SharedResource] = {
            link: SharedResource(rate.bits_per_second / 8, costs, burst)
            for link, rate in cluster.rates().items()
        }
        self._sides: dict[tuple[int, str], SharedResource] = {}  # of ranks, by direction
        self._connections: dict[tuple[int, int], SimulatedConnection] = {}
        self._changed: dict[SharedResource, None] = {}  # resources whose flows have changed
        self._free_at: dict[int, float] = {}  # the time until which each receiver is busy
        self._events: list[tuple[float, int, Callable[..., None], object]] = []
        self._numbers = count()
        self._runs: list[ScheduleRun] = []
        # By the schedule's id; keeping the schedule keeps its id unique.
        self._compiled: dict[int, tuple[Schedule, dict[int, CompiledRank]]] = {}

    def at(self, when: float, do: Callable[[], None]) -> None:
        """Call `do` at this time, or now if it is past."""
        self._plan(max(when, self.now), lambda _: do(), None)

    def exchange(self, schedule: Schedule) -> ScheduleRun:
        """One execution of a schedule, whose ranks are still to start."""
        if id(schedule) not in self._compiled:
            self._compiled[id(schedule)] = schedule, compiled_ranks(schedule)
        parts = self._compiled[id(schedule)][1]
        slowdown = self._costs.slowdown_of(schedule.name).value
        run = ScheduleRun(schedule, parts, self.post, slowdown)
        self._runs.append(run)
        return run

    def ends(self, schedules: Iterable[Schedule], starts: Mapping[int, float]) -> dict[int, float]:
        """Run these schedules together: the time at which each rank ends the last of its own."""
        ends: dict[int, float] = {}

        def ended(rank: int) -> None:
            ends[rank] = self.now

        for schedule in schedules:
            run = self.exchange(schedule)
            for rank in schedule.ranks:
                self.at(starts.get(rank, 0.0), partial(run.start, rank, partial(ended, rank)))
        self.run()
        return ends

    def run(self) -> None:
        """Process all events; ScheduleError if an exchange then hasn't ended although all of its
        ranks have started."""
        self._share_out()
        events = self._events
        while events:
            moment = events[0][0] * (1 + SAME_TIME_TOLERANCE)
            while events and events[0][0] <= moment:
                self.now, _, do, what = heappop(events)
                do(what)
            self._share_out()
        for run in self._runs:
            run.refuse_to_hang()

    def post(
        self,
        source: int,
        target: int,
        nbytes: int,
        arrived: Callable[[int], None],
        number: int,
        left: Callable[[], None] = lambda: None,
    ) -> None:
        """Send a message; `left` is called when its last byte leaves, `arrived(number)` when it was
        received."""
        connection = self._connections.get((source, target)) or self._connect(source, target)
        message = SimulatedMessage(nbytes, arrived, number, left)
        if not connection.channels:
            self._travel(connection, message)
            self.at(self.now, left)
            return
        connection.messages.append(message)
        if len(connection.messages) == 1:
            self._enter(connection, nbytes)

    def _connect(self, source: int, target: int) -> SimulatedConnection:
        path = self._cluster.path(source, target)
        shared = [self._links[link] for link in path if link in self._links]
        if byte := self._costs.byte.value:
            for side in ((source, "out"), (target, "in")):
                shared.append(self._sides.setdefault(side, SharedResource(1 / byte)))
        seconds = self._cluster.seconds_between(source, target)
        connection = SimulatedConnection(target, tuple(shared), seconds)
        self._connections[source, target] = connection
        return connection

    def _enter(self, flow: SimulatedConnection, nbytes: int) -> None:
        """Begin a message; without other flows on its path its rate is known."""
        alone = not self._burst
        for channel in flow.channels:
            channel.flows[flow] = None
            if len(channel.flows) > 1:
                alone = False
        flow.left, flow.since, flow.rate = nbytes, self.now, 0.0
        if alone:
            self._give(flow, flow.alone)
        else:
            self._changed |= dict.fromkeys(flow.channels)

    def _give(self, flow: FluidFlow, rate: float) -> None:
        flow.rate = rate
        flow.due = self.now + flow.left / rate
        heappush(self._events, (flow.due, next(self._numbers), self._last_byte, flow))

    def _last_byte(self, flow: SimulatedConnection) -> None:
        if flow.due != self.now:
            return  # its rate has changed since
        message = flow.messages.popleft()
        if flow.messages and flow.rate < inf:  # the next message replaces it: no rate changes
            flow.left, flow.since = flow.messages[0].nbytes, self.now
            self._give(flow, flow.rate)
        else:
            self._leave(flow)
        self._travel(flow, message)
        message.left()

    def _leave(self, flow: SimulatedConnection) -> None:
        flow.due = -1.0
        for channel in flow.channels:
            del channel.flows[flow]
            if channel.flows or self._burst:
                self._changed[channel] = None
        if flow.messages:
            self._enter(flow, flow.messages[0].nbytes)

    def _travel(self, connection: SimulatedConnection, message: SimulatedMessage) -> None:
        arrives = self.now + connection.seconds
        if self._handling:
            self._plan(arrives, self._handle, (connection.target, message))
        else:
            self._plan(arrives, message.arrived, message.number)

    def _handle(self, received: tuple[int, SimulatedMessage]) -> None:
        """A receiver handles its messages one after the other."""
        target, message = received
        end = max(self.now, self._free_at.get(target, 0.0)) + self._handling
        self._free_at[target] = end
        self._plan(end, message.arrived, message.number)

    def _plan(self, when: float, do: Callable[..., None], what: object) -> None:
        heappush(self._events, (when, next(self._numbers), do, what))

    def _share_out(self) -> None:
        """Set new rates for all flows that depend on changed resources."""
        if not self._changed:
            return
        flows, channels = neighbours(self._changed)
        self._changed.clear()
        for flow in flows:
            flow.left = max(0.0, flow.left - flow.rate * (self.now - flow.since))
            flow.since = self.now
        burst: set[FluidFlow] = set()
        if self._burst:
            refill(channels, self.now)
            burst = burst_through(flows)
        rates = fair_rates(flows, channels)
        for flow in flows:
            if flow in burst and not flow.left:
                self._give(flow, inf)
            elif flow in burst or rates[flow] != flow.rate:
                self._give(flow, rates[flow])
        if self._burst:
            for channel in run_down(channels):
                self._plan(channel.dry_at, self._dry, channel)

    def _dry(self, channel: SharedResource) -> None:
        if channel.dry_at == self.now:  # otherwise its flows have changed since
            channel.tokens, channel.spare = 0.0, 0.0
            self._changed[channel] = None


def refill(channels: Iterable[SharedResource], now: float) -> None:
    """Update the tokens of each resource, whose flows haven't changed since the last update."""
    for channel in channels:
        if channel.burst:
            gained = channel.spare * (now - channel.since)
            channel.tokens = min(channel.burst, channel.tokens + gained)
            if channel.tokens < ROUNDING_BYTES:
                channel.tokens = 0.0
        channel.since = now


def burst_through(flows: Iterable[FluidFlow]) -> set[FluidFlow]:
    """Let flows with tokens on all their resources use them at once; return these flows."""
    free = [flow for flow in flows if all(channel.tokens for channel in flow.channels)]
    moved = set(free)
    while free:
        crossing = Counter(channel for flow in free for channel in flow.channels)
        level = min(channel.tokens / number for channel, number in crossing.items())
        level = min(level, *(flow.left for flow in free))
        for flow in free:
            flow.left = _less(flow.left, level)
        for channel, number in crossing.items():
            channel.tokens = _less(channel.tokens, level * number)
        free = [flow for flow in free if flow.left and all(c.tokens for c in flow.channels)]
    return moved


def run_down(channels: Iterable[SharedResource]) -> list[SharedResource]:
    """The resources whose tokens will be used up at another time than before `fair_rates`."""
    emptying = []
    for channel in channels:
        if channel.burst:
            full = abs(channel.room) < ROUNDING_RATE_RATIO * channel.rate
            channel.spare = 0.0 if full else channel.room
            if not channel.tokens or channel.spare >= 0:
                channel.dry_at = inf
                continue
            dry_at = channel.since - channel.tokens / channel.spare
            if not isclose(dry_at, channel.dry_at, rel_tol=1e-12):
                channel.dry_at = dry_at
                emptying.append(channel)
    return emptying


def _less(what: float, by: float) -> float:
    return what - by if what - by > ROUNDING_BYTES else 0.0
