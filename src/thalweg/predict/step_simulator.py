"""The simulation of a plan's steps: every rank computes, submits its buckets, and continues when it
has the results that it needs, over links that all ranks share.

    gradients    a bucket is submitted when backward has computed its last gradient; the step ends
                 when all averages have arrived and the optimizer has stepped
    parameters   all buckets are submitted after the optimizer; the rank waits for those due

A rank waits only for the members of its rounds, so a slow group delays the others only when they
synchronise with one of its members. A rank's engine runs two chains at once, like the real one.
Encoding and decoding take the engine's time, and during backward also some of backward's.
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
"""The number of N-th parts of the batch that each rank computes."""


@dataclass(frozen=True, slots=True)
class BucketTimes:
    """The times at which one rank submits a bucket, begins to exchange it, and has its result."""

    step: int
    handed_in: float
    began: float
    ended: float


@dataclass(slots=True, kw_only=True)
class RankTimes:
    """The times at which one rank ends its computation and its step, by step."""

    computed: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    passages: list[BucketTimes] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedSteps:
    marks: Mapping[int, RankTimes]
    skipped: int  # warm-up steps

    @property
    def seconds(self) -> float:
        """The mean step time over ranks."""
        return fmean(self._step_seconds(marks.ended) for marks in self.marks.values())

    def _step_seconds(self, ended: list[float]) -> float:
        since = ended[self.skipped - 1] if self.skipped else 0.0
        return (ended[-1] - since) / (len(ended) - self.skipped)


def simulate_steps(
    chains: StepChains,
    cluster: Cluster,
    transport: TransportCosts,
    machine: Machine,
    costs: Costs,
    steps: int,
    *,
    skipped: int = 1,
    serial: bool = False,
    shares: Shares | None = None,
) -> SimulatedSteps:
    """The simulation of `steps` steps; with `serial`, buckets are submitted after backward."""
    flows = FlowSimulator(cluster, transport, machine.burst)
    job = _SharedExchanges(chains, flows, costs, steps, machine.contention, serial)
    ranks = [_SimulatedRank(job, rank, (shares or {}).get(rank, 1.0)) for rank in chains.ranks]
    for rank in ranks:
        rank.begin()
    flows.run()
    return SimulatedSteps(marks={rank.number: rank.marks for rank in ranks}, skipped=skipped)


class _SharedExchanges:
    """The exchanges in flight and the settings, shared by all ranks."""

    def __init__(
        self,
        chains: StepChains,
        flows: FlowSimulator,
        costs: Costs,
        steps: int,
        contention: float,
        serial: bool,
    ) -> None:
        self.chains = chains
        self.flows = flows
        self.costs = costs
        self.steps = steps
        self.contention = contention
        self.serial = serial
        self._runs: dict[tuple[int, int, tuple[int, ...]], ScheduleRun] = {}
        self._waiting: dict[tuple[int, int, tuple[int, ...]], dict[int, Callable[[], None]]] = {}

    def join(self, step: int, round_: Round, rank: int, ended: Callable[[], None]) -> None:
        """Begin the rank's part of the round; `ended` is called at its end."""
        key = step, round_.number, round_.group.ranks
        if key not in self._runs:
            waiting = self._waiting[key] = {}
            run = self.flows.exchange(round_.schedule, lambda member: waiting.pop(member)())
            self._runs[key] = run
        self._waiting[key][rank] = ended
        self._runs[key].start(rank)


class _SimulatedEngine:
    """The communication thread of one rank."""

    def __init__(self, job: _SharedExchanges, rank: _SimulatedRank) -> None:
        self._job = job
        self._flows = job.flows
        self._rank = rank
        self._queue: deque[_ChainInFlight] = deque()
        self._in_flight = 0
        self._busy_until = 0.0

    def submit(self, chain: _ChainInFlight) -> None:
        self._queue.append(chain)
        self._begin_waiting()

    def _begin_waiting(self) -> None:
        while self._queue and self._in_flight < MAX_CHAINS_IN_FLIGHT:
            self._in_flight += 1
            chain = self._queue.popleft()
            chain.began = self._flows.now
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
            self._job.join(chain.step, round_, self._rank.number, lambda: self._ended(chain))

    def _ended(self, chain: _ChainInFlight) -> None:
        chain.left -= 1
        if not chain.left:
            chain.stage += 1
            self._advance(chain)

    def _over(self, chain: _ChainInFlight) -> None:
        self._in_flight -= 1
        chain.over = True
        times = BucketTimes(chain.step, chain.handed_in, chain.began, self._flows.now)
        self._rank.marks.passages.append(times)
        self._rank.resume()
        self._begin_waiting()

    def _work(self, seconds: float, then: Callable[[], None]) -> None:
        if not seconds:
            then()
            return
        self._rank.slow_backward(seconds)
        self._busy_until = max(self._flows.now, self._busy_until) + seconds
        self._flows.at(self._busy_until, then)


@dataclass(slots=True, eq=False)
class _ChainInFlight:
    chain: Chain
    step: int
    handed_in: float
    began: float = 0.0
    stage: int = 0
    left: int = 0  # rounds of this stage
    over: bool = False


class _SimulatedRank:
    def __init__(self, job: _SharedExchanges, number: int, shares: float) -> None:
        self.number = number
        self.marks = RankTimes()
        self._job = job
        self._flows = job.flows
        self._engine = _SimulatedEngine(job, self)
        self._shares = shares
        self._step = 0
        self._codec_seconds = 0.0  # by which codecs delay backward
        self._computes = False
        self._in_flight: list[tuple[int, _ChainInFlight]] = []  # by the step at which it is due
        self._then: Callable[[], None] | None = None  # called when all due results have arrived

    def begin(self) -> None:
        chains, costs = self._job.chains.at(self._step)[self.number], self._job.costs
        forward = costs.forward.seconds * self._shares
        backward = costs.backward.seconds * self._shares
        self._computes, self._codec_seconds = True, 0.0
        if self._job.chains.plan.averages_parameters:
            compute = forward + backward + costs.optimizer.seconds
            self._compute([(compute, lambda: self._average(chains))])
            return
        milestones: list[tuple[float, Callable[[], None]]] = []
        if not self._job.serial:
            for chain in chains:
                moment = forward + min(chain.ready * self._shares, backward)
                milestones.append((moment, partial(self._submit, chain)))
        milestones.append((forward + backward, lambda: self._end_backward(chains)))
        self._compute(milestones)

    def slow_backward(self, seconds: float) -> None:
        """Account for a codec that computes at the same time."""
        if self._computes:
            self._codec_seconds += seconds * self._job.contention

    def _compute(
        self, milestones: list[tuple[float, Callable[[], None]]], since: float = 0.0
    ) -> None:
        """Reach the milestones one after the other, each delayed by concurrent codecs."""
        (moment, act), *others = milestones

        def reach() -> None:
            if self._codec_seconds:
                delay, self._codec_seconds = self._codec_seconds, 0.0
                self._flows.at(self._flows.now + delay, reach)
                return
            act()
            if others:
                self._compute(others, moment)

        self._flows.at(self._flows.now + max(0.0, moment - since), reach)

    def _end_backward(self, chains: tuple[Chain, ...]) -> None:
        self._computes = False
        self.marks.computed.append(self._flows.now)
        if self._job.serial:
            for chain in chains:
                self._submit(chain)
        optimizer = self._job.costs.optimizer.seconds
        self._wait(lambda: self._flows.at(self._flows.now + optimizer, self._end))

    def _average(self, chains: tuple[Chain, ...]) -> None:
        """After the optimizer's step, apply the results that are due and submit parameters."""
        self._computes = False
        self.marks.computed.append(self._flows.now)
        self._wait(lambda: self._submit_parameters(chains))

    def _submit_parameters(self, chains: tuple[Chain, ...]) -> None:
        two_levels = self._job.chains.plan.cadence.two_levels
        delayed = [chain for chain in chains if two_levels and chain.delay]
        for chain in chains:
            if not (two_levels and chain.delay):
                self._submit(chain)

        def rest() -> None:
            for chain in delayed:
                self._submit(chain)
            self._end()

        self._wait(rest)

    def _submit(self, chain: Chain) -> None:
        submitted = _ChainInFlight(chain, self._step, self._flows.now)
        self._in_flight.append((self._step + chain.delay, submitted))
        self._engine.submit(submitted)

    def _wait(self, then: Callable[[], None]) -> None:
        self._then = then
        self.resume()

    def resume(self) -> None:
        """Continue if all results that are due have arrived."""
        self._in_flight = [(due, chain) for due, chain in self._in_flight if not chain.over]
        if self._then is None or any(due <= self._step for due, _ in self._in_flight):
            return
        then, self._then = self._then, None
        then()

    def _end(self) -> None:
        self.marks.ended.append(self._flows.now)
        self._step += 1
        if self._step < self._job.steps:
            self.begin()
