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

from thalweg.facts import Cluster, Costs, Machine, TransportCosts
from thalweg.predict.compiled_step import Chain, StepChains
from thalweg.predict.flow_simulator import FlowSimulator
from thalweg.predict.schedule_run import ScheduleRun
from thalweg.steps import MAX_CHAINS_IN_FLIGHT, Round

Shares = Mapping[int, float]
"""How many N-th parts of the batch each rank computes."""


@dataclass(frozen=True, slots=True)
class BucketTimes:
    """A bucket's way through one rank's engine: handed in, begun, and its result there."""

    step: int
    handed_in: float
    began: float
    ended: float


@dataclass(slots=True, kw_only=True)
class RankTimes:
    """One rank's moments, by step: its computation was over, and its step was."""

    computed: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    passages: list[BucketTimes] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedSteps:
    marks: Mapping[int, RankTimes]
    skipped: int  # steps at the beginning that don't count

    @property
    def seconds(self) -> float:
        """Of a step, the mean over ranks."""
        return fmean(self._pace(marks) for marks in self.marks.values())

    def _pace(self, marks: RankTimes) -> float:
        since = marks.ended[self.skipped - 1] if self.skipped else 0.0
        return (marks.ended[-1] - since) / (len(marks.ended) - self.skipped)


def simulate_steps(
    script: StepChains,
    cluster: Cluster,
    road: TransportCosts,
    machine: Machine,
    costs: Costs,
    steps: int,
    *,
    skipped: int = 1,
    serial: bool = False,
    shares: Shares | None = None,
) -> SimulatedSteps:
    """So many steps on these links; with `serial`, buckets are held back until backward is over."""
    flows = FlowSimulator(cluster, road, machine.burst)
    course = _SharedExchanges(script, flows, costs, steps, machine.contention, serial)
    ranks = [_SimulatedRank(course, rank, (shares or {}).get(rank, 1.0)) for rank in script.ranks]
    for rank in ranks:
        rank.begin()
    flows.run()
    return SimulatedSteps(marks={rank.number: rank.marks for rank in ranks}, skipped=skipped)


class _SharedExchanges:
    """What the ranks have in common: the exchanges under way."""

    def __init__(
        self,
        script: StepChains,
        flows: FlowSimulator,
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
        self._exchanges: dict[tuple[int, int, tuple[int, ...]], ScheduleRun] = {}
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


class _SimulatedEngine:
    """One rank's communication thread."""

    def __init__(self, course: _SharedExchanges, rank: _SimulatedRank) -> None:
        self._exchanges = course
        self._rank = rank
        self._queue: deque[_ChainInFlight] = deque()
        self._under_way = 0
        self._busy_until = 0.0

    def submit(self, chain: _ChainInFlight) -> None:
        self._queue.append(chain)
        self._go_on()

    def _go_on(self) -> None:
        while self._queue and self._under_way < MAX_CHAINS_IN_FLIGHT:
            self._under_way += 1
            chain = self._queue.popleft()
            chain.began = self._exchanges.flows.now
            self._advance(chain)

    def _advance(self, chain: _ChainInFlight) -> None:
        if chain.stage == len(chain.chain.stages):
            self._work(chain.chain.decode, lambda: self._over(chain))
            return
        stage = chain.chain.stages[chain.stage]
        chain.left = len(stage.rounds)
        self._work(stage.codec, lambda: self._begin(chain))

    def _begin(self, chain: _ChainInFlight) -> None:
        for round_ in chain.chain.stages[chain.stage].rounds:
            self._exchanges.join(chain.step, round_, self._rank.number, lambda: self._ended(chain))

    def _ended(self, chain: _ChainInFlight) -> None:
        chain.left -= 1
        if not chain.left:
            chain.stage += 1
            self._advance(chain)

    def _over(self, chain: _ChainInFlight) -> None:
        self._under_way -= 1
        chain.over = True
        passage = BucketTimes(chain.step, chain.handed_in, chain.began, self._exchanges.flows.now)
        self._rank.marks.passages.append(passage)
        self._rank.resume()
        self._go_on()

    def _work(self, seconds: float, then: Callable[[], None]) -> None:
        if not seconds:
            then()
            return
        self._rank.hold_up(seconds)
        self._busy_until = max(self._exchanges.flows.now, self._busy_until) + seconds
        self._exchanges.flows.at(self._busy_until, then)


@dataclass(slots=True, eq=False)
class _ChainInFlight:
    """A chain on its way."""

    chain: Chain
    step: int
    handed_in: float
    began: float = 0.0
    stage: int = 0
    left: int = 0  # rounds of this stage
    over: bool = False


class _SimulatedRank:
    def __init__(self, course: _SharedExchanges, number: int, shares: float) -> None:
        self.number = number
        self.marks = RankTimes()
        self._exchanges = course
        self._engine = _SimulatedEngine(course, self)
        self._shares = shares
        self._step = 0
        self._codec_seconds = 0.0  # seconds that codecs took from backward
        self._computes = False
        self._under_way: list[tuple[int, _ChainInFlight]] = []  # by the step at which it is due
        self._then: Callable[[], None] | None = None  # when all that is due is there

    def begin(self) -> None:
        chains = self._exchanges.script.at(self._step)[self.number]
        costs = self._exchanges.costs
        forward = costs.forward.seconds * self._shares
        backward = costs.backward.seconds * self._shares
        optimizer = costs.optimizer.seconds
        self._computes, self._codec_seconds = True, 0.0
        if self._exchanges.script.plan.averages_parameters:
            self._compute([(forward + backward + optimizer, lambda: self._average(chains))])
            return
        milestones: list[tuple[float, Callable[[], None]]] = []
        if not self._exchanges.serial:
            for chain in chains:
                moment = forward + min(chain.ready * self._shares, backward)
                milestones.append((moment, partial(self._send, chain)))
        milestones.append((forward + backward, lambda: self._backward_is_over(chains)))
        self._compute(milestones)

    def hold_up(self, seconds: float) -> None:
        """A codec computes meanwhile."""
        if self._computes:
            self._codec_seconds += seconds * self._exchanges.contention

    # Computing

    def _compute(
        self, milestones: list[tuple[float, Callable[[], None]]], since: float = 0.0
    ) -> None:
        """Reach one after the other; what was taken away from backward is made up for."""
        (moment, act), *others = milestones

        def reach() -> None:
            if self._codec_seconds:
                debt, self._codec_seconds = self._codec_seconds, 0.0
                self._exchanges.flows.at(self._exchanges.flows.now + debt, reach)
                return
            act()
            if others:
                self._compute(others, moment)

        self._exchanges.flows.at(self._exchanges.flows.now + max(0.0, moment - since), reach)

    def _backward_is_over(self, chains: tuple[Chain, ...]) -> None:
        self._computes = False
        self.marks.computed.append(self._exchanges.flows.now)
        if self._exchanges.serial:
            for chain in chains:
                self._send(chain)
        optimizer = self._exchanges.costs.optimizer.seconds
        self._wait(
            lambda: self._exchanges.flows.at(self._exchanges.flows.now + optimizer, self._end)
        )

    def _average(self, chains: tuple[Chain, ...]) -> None:
        """After the optimizer's step: what is due is applied, then parameters leave."""
        self._computes = False
        self.marks.computed.append(self._exchanges.flows.now)
        self._wait(lambda: self._leave(chains))

    def _leave(self, chains: tuple[Chain, ...]) -> None:
        at_once = [chain for chain in chains if not chain.delay]
        late = [chain for chain in chains if chain.delay]
        if not self._exchanges.script.plan.cadence.two_levels:
            at_once, late = list(chains), []
        for chain in at_once:
            self._send(chain)

        def rest() -> None:
            for chain in late:
                self._send(chain)
            self._end()

        self._wait(rest)

    def _send(self, chain: Chain) -> None:
        way = _ChainInFlight(chain, self._step, self._exchanges.flows.now)
        self._under_way.append((self._step + chain.delay, way))
        self._engine.submit(way)

    # Waiting

    def _wait(self, then: Callable[[], None]) -> None:
        self._then = then
        self.resume()

    def resume(self) -> None:
        """Go on if all that is due is there."""
        self._under_way = [(due, chain) for due, chain in self._under_way if not chain.over]
        if self._then is None or any(due <= self._step for due, _ in self._under_way):
            return
        then, self._then = self._then, None
        then()

    def _end(self) -> None:
        self.marks.ended.append(self._exchanges.flows.now)
        self._step += 1
        if self._step < self._exchanges.steps:
            self.begin()
