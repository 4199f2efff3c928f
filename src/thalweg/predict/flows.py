"""Replay schedules on a cluster's links: when each rank would be done.

Messages are fluids. One from a source to a target occupies every link of its path and the hands of
both ranks; what shares a link shares it max-min fairly (`fairness`), and a crowd on it loses some
of it (`Road.share`). Messages of one source to one target leave one after the other, as on a
connection. After its last byte a message travels for the latency, and then keeps its receiver busy
for a while, one message at a time. A rank's moves follow `dataflow.order`, as when they are run; a
send is done once the transport has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from heapq import heappop, heappush
from itertools import count

from thalweg.errors import ScheduleError
from thalweg.facts import Cluster, Link
from thalweg.facts.machine import Road
from thalweg.predict.fairness import Channel, Flow, fair_rates, neighbours
from thalweg.predict.move_graph import NOBODY, RECEIVES, MoveGraph, move_graph
from thalweg.schedules import Schedule

FREE = Road()  # messages cost nothing but their way


def simulate(
    schedule: Schedule,
    cluster: Cluster,
    road: Road = FREE,
    *,
    starts: Mapping[int, float] | None = None,
    burst: float = 0.0,
) -> dict[int, float]:
    """Seconds after which each rank has done its part; who isn't in `starts` begins at 0."""
    flows = Flows(cluster, road, burst)
    ends: dict[int, float] = {}

    def ended(rank: int) -> None:
        ends[rank] = flows.now

    exchange = flows.exchange(schedule, ended)
    for rank in schedule.ranks:
        late = 0.0 if starts is None else starts.get(rank, 0.0)
        flows.at(late, partial(exchange.start, rank))
    flows.run()
    return ends


class Flows:
    """A cluster's links, the messages on them, and a clock."""

    def __init__(self, cluster: Cluster, road: Road = FREE, burst: float = 0.0) -> None:
        self.now = 0.0  # seconds
        self._cluster = cluster
        self._road = road
        self._burst = burst
        self._seconds_each = road.message.value
        self._links: dict[Link, Channel | None] = {
            link: Channel(rate.bits_per_second / 8, road) for link, rate in cluster.rates().items()
        }
        self._hands: dict[tuple[int, str], Channel] = {}
        self._flows: dict[tuple[int, int], Flow] = {}
        self._changed: dict[Channel, None] = {}  # whose flows aren't the same any more
        self._free_again: dict[int, float] = {}  # when each receiver has handled what has come
        self._events: list[tuple[float, int, Callable[..., None], object]] = []
        self._numbers = count()
        self._under_way: dict[Exchange, None] = {}

    def at(self, when: float, do: Callable[[], None]) -> None:
        """Do this at a time, or now if that is past."""
        self._plan(max(when, self.now), lambda _: do(), None)

    def exchange(
        self, schedule: Schedule, ended: Callable[[int], None] = lambda rank: None
    ) -> Exchange:
        """One execution of a schedule; `ended` is told each rank that has done its part."""
        exchange = Exchange(self, schedule, ended)
        self._under_way[exchange] = None
        return exchange

    def run(self) -> None:
        """Until nothing is left to happen; ScheduleError if that leaves an exchange unended."""
        self._share_out()
        events = self._events
        while events:
            moment = events[0][0]
            self.now = moment
            while events and events[0][0] <= moment:
                _, _, do, what = heappop(events)
                do(what)
            self._share_out()
        for exchange in self._under_way:
            exchange.refuse_to_hang()

    def over(self, exchange: Exchange) -> None:
        del self._under_way[exchange]

    def post(self, source: int, target: int, nbytes: int, exchange: Exchange, receive: int) -> None:
        """Hand over a message; the exchange is told when its receiver has it."""
        flow = self._flows.get((source, target)) or self._connect(source, target)
        flow.queue.append((nbytes, exchange, receive))
        if flow.message is None:
            self._next_message(flow)

    def _connect(self, source: int, target: int) -> Flow:
        links = [self._links.get(link) for link in self._cluster.path(source, target)]
        hands = [self._hand(source, "out"), self._hand(target, "in")]
        channels = tuple(channel for channel in (*links, *hands) if channel is not None)
        flow = Flow(target, channels, self._cluster.seconds_between(source, target))
        self._flows[source, target] = flow
        return flow

    def _hand(self, rank: int, way: str) -> Channel | None:
        if not self._road.byte.value:
            return None
        if (rank, way) not in self._hands:
            self._hands[rank, way] = Channel(1 / self._road.byte.value, None)
        return self._hands[rank, way]

    def _next_message(self, flow: Flow) -> None:
        nbytes, exchange, receive = flow.queue.popleft()
        if not flow.channels:
            self._sent(flow, exchange, receive)
            return
        flow.message = exchange, receive
        flow.left, flow.since, flow.rate = nbytes, self.now, 0.0
        for channel in flow.channels:
            channel.flows[flow] = None
            self._changed[channel] = None

    def _last_byte(self, flow: Flow) -> None:
        if flow.due != self.now or flow.message is None:
            return  # it has been given another rate since
        exchange, receive = flow.message
        flow.message = None
        for channel in flow.channels:
            del channel.flows[flow]
            self._changed[channel] = None
        self._sent(flow, exchange, receive)
        if flow.queue:
            self._next_message(flow)

    def _sent(self, flow: Flow, exchange: Exchange, receive: int) -> None:
        arrives = self.now + flow.seconds
        if self._seconds_each:
            self._plan(arrives, self._handle, (flow.target, exchange, receive))
        else:
            self._plan(arrives, exchange.deliver, receive)

    def _handle(self, arrived: tuple[int, Exchange, int]) -> None:
        target, exchange, receive = arrived
        begins = max(self.now, self._free_again.get(target, 0.0))
        self._free_again[target] = ends = begins + self._seconds_each
        self._plan(ends, exchange.deliver, receive)

    def _plan(self, when: float, do: Callable[..., None], what: object) -> None:
        heappush(self._events, (when, next(self._numbers), do, what))

    def _share_out(self) -> None:
        """New rates for the flows that those which came and went have to do with."""
        if not self._changed:
            return
        rates = fair_rates(*neighbours(self._changed))
        self._changed.clear()
        for flow, rate in rates.items():
            if rate != flow.rate:
                flow.left -= flow.rate * (self.now - flow.since)
                flow.since, flow.rate = self.now, rate
                flow.due = self.now + max(flow.left, 0.0) / rate
                self._plan(flow.due, self._last_byte, flow)


class Exchange:
    """One execution of a schedule: each rank starts when it likes."""

    def __init__(self, flows: Flows, schedule: Schedule, ended: Callable[[int], None]) -> None:
        self._flows = flows
        self._schedule = schedule
        self._graph: MoveGraph = move_graph(schedule)
        self._ended = ended
        self._waits = self._graph.waits.copy()
        self._to_do = self._graph.to_do.copy()
        self._answered: dict[int, set[int]] = {}  # members by quorum
        self._not_started = set(schedule.ranks)
        self._unended = len(schedule.ranks)

    def start(self, rank: int) -> None:
        """This rank begins its moves now."""
        self._not_started.remove(rank)
        if not self._to_do[rank]:
            self._end(rank)
        self._free(self._graph.first[rank])

    def deliver(self, receive: int) -> None:
        """A message is there, and has been handled."""
        if receive < 0:
            self._answer(~receive)
        elif receive != NOBODY:
            self._free((receive,))

    def refuse_to_hang(self) -> None:
        if self._not_started:
            return
        stuck = next(move for move, waits in enumerate(self._waits) if waits > 0)
        rank = self._graph.ranks[stuck]
        index = stuck - self._graph.ranks.index(rank)
        move = list(self._schedule.moves(rank))[index]
        raise ScheduleError(
            f"{self._schedule.name}: rank {rank} waits for ever ({move})",
            "check the schedule: a message that it waits for is never sent",
        )

    def _answer(self, number: int) -> None:
        """Count one more member of a quorum, and go on if that is enough for the first time."""
        move, member = self._graph.answers[number]
        quorum, rank = self._graph.quorums[move], self._graph.ranks[move]
        if move not in self._answered:
            self._answered[move] = {m for m, peer in enumerate(quorum.peers) if peer == rank}
        there = self._answered[move]
        enough_before = quorum.code.decode(frozenset(there)) is not None
        there.add(member)
        if not enough_before and quorum.code.decode(frozenset(there)) is not None:
            self._free((move,))

    def _free(self, moves: Iterable[int]) -> None:
        """One thing less to wait for: do what is ready, in the order of the rank's list."""
        graph, waits = self._graph, self._waits
        ready: list[int] = []
        while True:
            for move in moves:
                waits[move] -= 1
                if not waits[move]:
                    heappush(ready, move)
            if not ready:
                return
            move = heappop(ready)
            rank, target = graph.ranks[move], graph.targets[move]
            if target != RECEIVES:
                self._flows.post(rank, target, graph.sizes[move], self, graph.taken_by[move])
            moves = graph.frees[move]
            self._to_do[rank] -= 1
            if not self._to_do[rank]:
                self._end(rank)

    def _end(self, rank: int) -> None:
        self._unended -= 1
        if not self._unended:
            self._flows.over(self)
        self._ended(rank)
