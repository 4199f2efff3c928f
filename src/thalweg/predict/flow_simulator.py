"""Replay schedules on a cluster's links: when each rank would be done.

Messages are fluids. One from a source to a target occupies every link of its path and the hands of
both ranks; what shares a link shares it max-min fairly (`fairness`), and a crowd on it loses some
of it (`TransportCosts.bandwidth_share`). Messages of one source to one target leave one after the
other, as on a connection. After its last byte a message travels for the latency, and then keeps its
receiver busy for a while, one message at a time. What is done when is up to the ranks (`exchange`).

After a rest a link carries so many bytes at once, as a token bucket does: it holds up to `burst`
tokens, a byte each, and gains them at the rate that it has for the flows on it. While it has some
it doesn't limit; flows that nothing else limits take them in an instant, in equal parts as far as
they need them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from heapq import heappop, heappush
from itertools import count
from math import inf, isclose
from typing import NamedTuple

from thalweg.facts import Cluster, Link
from thalweg.facts.machine import TransportCosts
from thalweg.predict.compiled_schedule import CompiledRank, compiled_ranks
from thalweg.predict.fairness import FluidFlow, SharedResource, fair_rates, neighbours
from thalweg.predict.schedule_run import ScheduleRun
from thalweg.schedules import Schedule

FREE_TRANSPORT_COSTS = TransportCosts()  # messages cost nothing but their way
# What lies less than this part of the time apart happens at the same moment.
SAME_TIME_TOLERANCE = 1e-12
ROUNDING_BYTES = 1e-6  # bytes: less is a matter of rounding
ROUNDING_RATE_RATIO = 1e-9  # and so is less than this part of a rate


def simulate(
    schedule: Schedule,
    cluster: Cluster,
    costs: TransportCosts = FREE_TRANSPORT_COSTS,
    *,
    starts: Mapping[int, float] | None = None,
    burst: float = 0.0,
) -> dict[int, float]:
    """Seconds after which each rank has done its part; who isn't in `starts` begins at 0."""
    flows = FlowSimulator(cluster, costs, burst)
    ends: dict[int, float] = {}

    def ended(rank: int) -> None:
        ends[rank] = flows.now

    exchange = flows.exchange(schedule, ended)
    for rank in schedule.ranks:
        late = 0.0 if starts is None else starts.get(rank, 0.0)
        flows.at(late, partial(exchange.start, rank))
    flows.run()
    return ends


class SimulatedMessage(NamedTuple):
    """`left` is called with its last byte, and `arrived(number)` once its receiver has it."""

    nbytes: int
    arrived: Callable[[int], None]
    number: int
    left: Callable[[], None]


class SimulatedConnection(FluidFlow):
    """The messages from one rank to another: the first is under way, the others wait for it."""

    __slots__ = ("messages", "seconds", "target")

    def __init__(self, target: int, channels: tuple[SharedResource, ...], seconds: float) -> None:
        super().__init__(channels)
        self.target = target
        self.seconds = seconds  # of a byte's way
        self.messages: deque[SimulatedMessage] = deque()


class FlowSimulator:
    """A cluster's links, what is on them, and a clock."""

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
        self._hands: dict[tuple[int, str], SharedResource] = {}
        self._connections: dict[tuple[int, int], SimulatedConnection] = {}
        self._changed: dict[SharedResource, None] = {}  # whose flows aren't the same any more
        self._free_again: dict[int, float] = {}  # when each receiver has handled what has come
        self._events: list[tuple[float, int, Callable[..., None], object]] = []
        self._numbers = count()
        self._under_way: dict[ScheduleRun, None] = {}
        self._parts: dict[
            int, tuple[Schedule, dict[int, CompiledRank]]
        ] = {}  # by the schedule's id

    def at(self, when: float, do: Callable[[], None]) -> None:
        """Do this then, or at once if it is past."""
        self._plan(max(when, self.now), lambda _: do(), None)

    def exchange(
        self, schedule: Schedule, ended: Callable[[int], None] = lambda rank: None
    ) -> ScheduleRun:
        """One execution of a schedule; `ended` is told each rank that has done its part."""
        if id(schedule) not in self._parts:
            self._parts[id(schedule)] = schedule, compiled_ranks(schedule)
        its_parts = self._parts[id(schedule)][1]
        drag = self._costs.slowdown_of(schedule.name).value
        exchange = ScheduleRun(schedule, its_parts, self.post, ended, self._under_way.pop, drag)
        self._under_way[exchange] = None
        return exchange

    def run(self) -> None:
        """Until nothing is left to happen; ScheduleError if that leaves an exchange unended, though
        all of its ranks have started."""
        self._share_out()
        events = self._events
        while events:
            moment = events[0][0] * (1 + SAME_TIME_TOLERANCE)
            while events and events[0][0] <= moment:
                self.now, _, do, what = heappop(events)
                do(what)
            self._share_out()
        for exchange in self._under_way:
            exchange.refuse_to_hang()

    def post(
        self,
        source: int,
        target: int,
        nbytes: int,
        arrived: Callable[[int], None],
        number: int,
        left: Callable[[], None] = lambda: None,
    ) -> None:
        """Hand over a message; `left` is called with its last byte, and `arrived(number)` once its
        receiver has it."""
        connection = self._connections.get((source, target)) or self._connect(source, target)
        message = SimulatedMessage(nbytes, arrived, number, left)
        if not connection.channels:
            self._travel(connection, message)
            self._plan(self.now, _call, left)
            return
        connection.messages.append(message)
        if len(connection.messages) == 1:
            self._enter(connection, nbytes)

    def _connect(self, source: int, target: int) -> SimulatedConnection:
        path = self._cluster.path(source, target)
        links = [self._links[link] for link in path if link in self._links]
        hands = (
            [self._hand(source, "out"), self._hand(target, "in")] if self._costs.byte.value else []
        )
        seconds = self._cluster.seconds_between(source, target)
        made = self._connections[source, target] = SimulatedConnection(
            target, (*links, *hands), seconds
        )
        return made

    def _hand(self, rank: int, way: str) -> SharedResource:
        if (rank, way) not in self._hands:
            self._hands[rank, way] = SharedResource(1 / self._costs.byte.value)
        return self._hands[rank, way]

    def _enter(self, flow: SimulatedConnection, nbytes: int) -> None:
        """A message sets out; with nobody else on its way its rate is known."""
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
            return  # it has been given another rate since
        message = flow.messages.popleft()
        if flow.messages and flow.rate < inf:  # the next takes its place, so no rate changes
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

    def _handle(self, come: tuple[int, SimulatedMessage]) -> None:
        """One after the other, a receiver takes in what has come to it."""
        target, message = come
        begins = max(self.now, self._free_again.get(target, 0.0))
        self._free_again[target] = begins + self._handling
        self._plan(begins + self._handling, message.arrived, message.number)

    def _plan(self, when: float, do: Callable[..., None], what: object) -> None:
        heappush(self._events, (when, next(self._numbers), do, what))

    def _share_out(self) -> None:
        """New rates for all flows that have to do with those which came and went."""
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
        if channel.dry_at == self.now:  # else its flows have changed since
            channel.tokens, channel.spare = 0.0, 0.0
            self._changed[channel] = None


def _call(do: Callable[[], None]) -> None:
    do()


def refill(channels: Iterable[SharedResource], now: float) -> None:
    """What each has by now, its flows having been as they were since it was last looked at."""
    for channel in channels:
        if channel.burst:
            gained = channel.spare * (now - channel.since)
            channel.tokens = min(channel.burst, channel.tokens + gained)
            if channel.tokens < ROUNDING_BYTES:
                channel.tokens = 0.0
        channel.since = now


def burst_through(flows: Iterable[FluidFlow]) -> set[FluidFlow]:
    """Let through at once what no channel limits; the flows of which that is some."""
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
    """After `fair_rates`: the channels whose tokens will be used up, if that is news."""
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
