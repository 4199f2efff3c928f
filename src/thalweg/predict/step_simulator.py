"""Steps of a plan replayed: every rank computes, hands in its buckets, and goes on when it has what
it needs, over links that all of them share.

    gradients    a bucket is handed in when backward has come to its last gradient; the step ends
                 when all averages are there, and the optimizer has stepped
    parameters   all buckets are handed in after the optimizer; what is due is waited for

No rank waits for anybody whom its rounds don't make it wait for, so a group that is slow holds up
the others only when they meet it. A rank's engine has two chains under way at once, as the real one
has. Encoding and decoding take the engine's time, and while backward runs also some of backward's:
both compute.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean

from thalweg.facts import Cluster, Costs, Machine, Road
from thalweg.predict.compiled_step import Chain, Script
from thalweg.predict.flow_simulator import Flows
from thalweg.predict.schedule_run import Exchange
from thalweg.steps import Round

AT_ONCE = 2  # chains under way

Shares = Mapping[int, float]
"""How many N-th parts of the batch each rank computes."""


@dataclass(frozen=True, slots=True)
class Passage:
    """A bucket's way through one rank's engine: handed in, begun, and its result there."""

    step: int
    handed_in: float
    began: float
    ended: float


@dataclass(slots=True, kw_only=True)
class Marks:
    """One rank's moments, by step: its computation was over, and its step was."""

    computed: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    passages: list[Passage] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    marks: Mapping[int, Marks]
    skipped: int  # steps at the beginning that don't count

    @property
    def seconds(self) -> float:
        """Of a step, the mean over ranks."""
        return fmean(self._pace(marks) for marks in self.marks.values())

    def _pace(self, marks: Marks) -> float:
        since = marks.ended[self.skipped - 1] if self.skipped else 0.0
        return (marks.ended[-1] - since) / (len(marks.ended) - self.skipped)


def replay(
    script: Script,
    cluster: Cluster,
    road: Road,
    machine: Machine,
    costs: Costs,
    steps: int,
    *,
    skipped: int = 1,
    serial: bool = False,
    shares: Shares | None = None,
) -> Replayed:
    """So many steps on these links; with `serial`, buckets are held back until backward is over."""
    flows = Flows(cluster, road, machine.burst)
    course = _Course(script, flows, costs, steps, machine.contention, serial)
    ranks = [_Rank(course, rank, (shares or {}).get(rank, 1.0)) for rank in script.ranks]
    for rank in ranks:
        rank.begin()
    flows.run()
    return Replayed(marks={rank.number: rank.marks for rank in ranks}, skipped=skipped)


class _Course:
    """What the ranks have in common: the exchanges under way."""

    def __init__(
        self,
        script: Script,
        flows: Flows,
        costs: Costs,
        steps: int,
        contention: float,
        serial: bool,
    ) -> None:
        self.script = script
        self.flows = flows
        self.costs = costs
        self.steps = steps
        self.contention = contention
        self.serial = serial
        self._exchanges: dict[tuple[int, int, tuple[int, ...]], Exchange] = {}
        self._waiting: dict[tuple[int, int, tuple[int, ...]], dict[int, Callable[[], None]]] = {}

    def join(self, step: int, round_: Round, rank: int, ended: Callable[[], None]) -> None:
        """This rank begins its part of the round now; `ended` is called when it is over."""
        key = step, round_.number, round_.group.ranks
        if key not in self._exchanges:
            waiting: dict[int, Callable[[], None]] = {}
            self._waiting[key] = waiting
            self._exchanges[key] = self.flows.exchange(
                round_.schedule, lambda member: waiting.pop(member)()
            )
        self._waiting[key][rank] = ended
        self._exchanges[key].start(rank)


class _Engine:
    """One rank's communication thread."""

    def __init__(self, course: _Course, rank: _Rank) -> None:
        self._course = course
        self._rank = rank
        self._queue: deque[_Way] = deque()
        self._under_way = 0
        self._busy_until = 0.0

    def submit(self, way: _Way) -> None:
        self._queue.append(way)
        self._go_on()

    def _go_on(self) -> None:
        while self._queue and self._under_way < AT_ONCE:
            self._under_way += 1
            way = self._queue.popleft()
            way.began = self._course.flows.now
            self._advance(way)

    def _advance(self, way: _Way) -> None:
        if way.stage == len(way.chain.stages):
            self._work(way.chain.decode, lambda: self._over(way))
            return
        stage = way.chain.stages[way.stage]
        way.left = len(stage.rounds)
        self._work(stage.codec, lambda: self._begin(way))

    def _begin(self, way: _Way) -> None:
        for round_ in way.chain.stages[way.stage].rounds:
            self._course.join(way.step, round_, self._rank.number, lambda: self._ended(way))

    def _ended(self, way: _Way) -> None:
        way.left -= 1
        if not way.left:
            way.stage += 1
            self._advance(way)

    def _over(self, way: _Way) -> None:
        self._under_way -= 1
        way.over = True
        passage = Passage(way.step, way.handed_in, way.began, self._course.flows.now)
        self._rank.marks.passages.append(passage)
        self._rank.look()
        self._go_on()

    def _work(self, seconds: float, then: Callable[[], None]) -> None:
        if not seconds:
            then()
            return
        self._rank.hold_up(seconds)
        self._busy_until = max(self._course.flows.now, self._busy_until) + seconds
        self._course.flows.at(self._busy_until, then)


@dataclass(slots=True, eq=False)
class _Way:
    """A chain on its way."""

    chain: Chain
    step: int
    handed_in: float
    began: float = 0.0
    stage: int = 0
    left: int = 0  # rounds of this stage
    over: bool = False


class _Rank:
    def __init__(self, course: _Course, number: int, shares: float) -> None:
        self.number = number
        self.marks = Marks()
        self._course = course
        self._engine = _Engine(course, self)
        self._shares = shares
        self._step = 0
        self._debt = 0.0  # seconds that codecs took from backward
        self._computes = False
        self._under_way: list[tuple[int, _Way]] = []  # by the step at which it is due
        self._then: Callable[[], None] | None = None  # when all that is due is there

    def begin(self) -> None:
        chains = self._course.script.at(self._step)[self.number]
        costs = self._course.costs
        forward = costs.forward.seconds * self._shares
        backward = costs.backward.seconds * self._shares
        optimizer = costs.optimizer.seconds
        self._computes, self._debt = True, 0.0
        if self._course.script.plan.averages_parameters:
            self._compute([(forward + backward + optimizer, lambda: self._average(chains))])
            return
        milestones: list[tuple[float, Callable[[], None]]] = []
        if not self._course.serial:
            for chain in chains:
                moment = forward + min(chain.ready * self._shares, backward)
                milestones.append((moment, partial(self._send, chain)))
        milestones.append((forward + backward, lambda: self._backward_is_over(chains)))
        self._compute(milestones)

    def hold_up(self, seconds: float) -> None:
        """A codec computes meanwhile."""
        if self._computes:
            self._debt += seconds * self._course.contention

    # Computing

    def _compute(
        self, milestones: list[tuple[float, Callable[[], None]]], since: float = 0.0
    ) -> None:
        """Reach one after the other; what was taken away from backward is made up for."""
        (moment, act), *others = milestones

        def reach() -> None:
            if self._debt:
                debt, self._debt = self._debt, 0.0
                self._course.flows.at(self._course.flows.now + debt, reach)
                return
            act()
            if others:
                self._compute(others, moment)

        self._course.flows.at(self._course.flows.now + max(0.0, moment - since), reach)

    def _backward_is_over(self, chains: tuple[Chain, ...]) -> None:
        self._computes = False
        self.marks.computed.append(self._course.flows.now)
        if self._course.serial:
            for chain in chains:
                self._send(chain)
        optimizer = self._course.costs.optimizer.seconds
        self._wait(lambda: self._course.flows.at(self._course.flows.now + optimizer, self._end))

    def _average(self, chains: tuple[Chain, ...]) -> None:
        """After the optimizer's step: what is due is applied, then parameters leave."""
        self._computes = False
        self.marks.computed.append(self._course.flows.now)
        self._wait(lambda: self._leave(chains))

    def _leave(self, chains: tuple[Chain, ...]) -> None:
        at_once = [chain for chain in chains if not chain.delay]
        late = [chain for chain in chains if chain.delay]
        if not self._course.script.plan.cadence.two_levels:
            at_once, late = list(chains), []
        for chain in at_once:
            self._send(chain)

        def rest() -> None:
            for chain in late:
                self._send(chain)
            self._end()

        self._wait(rest)

    def _send(self, chain: Chain) -> None:
        way = _Way(chain, self._step, self._course.flows.now)
        self._under_way.append((self._step + chain.delay, way))
        self._engine.submit(way)

    # Waiting

    def _wait(self, then: Callable[[], None]) -> None:
        self._then = then
        self.look()

    def look(self) -> None:
        """Go on if all that is due is there."""
        self._under_way = [(due, way) for due, way in self._under_way if not way.over]
        if self._then is None or any(due <= self._step for due, _ in self._under_way):
            return
        then, self._then = self._then, None
        then()

    def _end(self) -> None:
        self.marks.ended.append(self._course.flows.now)
        self._step += 1
        if self._step < self._course.steps:
            self.begin()
