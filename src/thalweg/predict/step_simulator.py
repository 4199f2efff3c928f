"""The simulation of a plan's steps: every rank computes, submits its buckets, and continues when it
has the results that it needs, over links that all ranks share.

    gradients    a bucket is submitted when backward has computed its last gradient; the step ends
                 when all averages have arrived and the optimizer has stepped
    parameters   all buckets are submitted after the optimizer; the rank waits for those due

A rank waits only for the members of its rounds, so a slow group delays the others only when they
synchronise with one of its members. A rank's engine runs two chains at once, like the real one.
Encoding and decoding take the engine's time, and during backward also some of backward's. The
backend has buckets of its own: the first closes at 1 MiB unless the plan sets the bucket size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import TypeAlias

from thalweg.catalog import Catalog
from thalweg.facts import (
    Bucket,
    Cluster,
    CodecCost,
    FittedValue,
    Machine,
    TransportCosts,
    Workload,
)
from thalweg.plan import Choice, Plan, PlanText, Settings
from thalweg.predict.flow_simulator import FlowSimulator
from thalweg.predict.schedule_run import ScheduleRun
from thalweg.schedules import Group
from thalweg.steps import (
    DDP_FIRST_BUCKET,
    MAX_CHAINS_IN_FLIGHT,
    Chain,
    Round,
    Stage,
    Work,
    compile_buckets,
    cycle,
    warm_up,
)

SIMULATED_WARMUP_STEPS = 2
Process: TypeAlias = Iterator[Callable[[Callable[[], None]], None]]
"""What a thread does, from one wait to the next: each wait gets the function that continues it."""


@dataclass(slots=True, eq=False)
class BucketTimes:
    """The times at which one rank submits a bucket, begins to exchange it, and has its result."""

    step: int
    handed_in: float
    began: float = 0.0
    ended: float = 0.0


@dataclass(slots=True, kw_only=True)
class RankTimes:
    """The times at which one rank ends its computation and its step, by step."""

    computed: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    passages: list[BucketTimes] = field(default_factory=list)


def mean_step_seconds(marks: Mapping[int, RankTimes]) -> float:
    """The mean step time over ranks and steps, after the warm-up."""
    warm, ended = SIMULATED_WARMUP_STEPS, [times.ended for times in marks.values()]
    return fmean((times[-1] - times[warm - 1]) / (len(times) - warm) for times in ended)


def simulate_steps(
    chains: StepChains,
    cluster: Cluster,
    transport: TransportCosts,
    steps: int,
    *,
    serial: bool,
    shares: Mapping[int, float] | None,
    delays: Mapping[int, float] | None,
) -> dict[int, RankTimes]:
    """The times of each rank in `steps` simulated steps and the warm-up. With `serial`, buckets are
    submitted after backward; `shares` are the N-th parts of the batch that each rank computes, and
    `delays` the seconds by which stragglers begin each step later."""
    flows = FlowSimulator(cluster, transport, chains.machine.burst)
    job = _SharedExchanges(chains, flows, steps + SIMULATED_WARMUP_STEPS, serial)
    ranks = [
        _SimulatedRank(job, rank, (shares or {}).get(rank, 1.0), (delays or {}).get(rank, 0.0))
        for rank in chains.ranks
    ]
    for rank in ranks:
        _advance(rank.steps())
    flows.run()
    return {rank.number: rank.marks for rank in ranks}


def _advance(process: Process) -> None:
    """Continue a process up to its next wait."""
    wait = next(process, None)
    if wait is not None:
        wait(partial(_advance, process))


@dataclass(slots=True)
class _SharedExchanges:
    """The exchanges in flight and the settings, shared by all ranks."""

    chains: StepChains
    flows: FlowSimulator
    steps: int
    serial: bool
    _runs: dict[tuple[int, int, tuple[int, ...]], ScheduleRun] = field(default_factory=dict)

    def join(self, step: int, round_: Round, rank: int, ended: Callable[[], None]) -> None:
        """Begin the rank's part of the round; `ended` is called at its end."""
        key = step, round_.number, round_.group.ranks
        if key not in self._runs:
            self._runs[key] = self.flows.exchange(round_.schedule)
        self._runs[key].start(rank, ended)


class _SimulatedRank:
    """The training thread of a rank, and its engine, which exchanges buckets."""

    def __init__(self, job: _SharedExchanges, number: int, shares: float, delay: float) -> None:
        self.number = number
        self.marks = RankTimes()
        self._job = job
        self._flows = job.flows
        self._shares = shares
        self._delay = delay
        self._step = 0
        self._computes = False
        self._codec_seconds = 0.0  # by which codecs delay backward
        self._due: dict[BucketTimes, int] = {}  # buckets in flight, by the step that needs them
        self._continue: Callable[[], None] | None = None  # when all due results have arrived
        self._queue: deque[tuple[PricedChain, BucketTimes]] = deque()
        self._exchanging = 0
        self._engine_busy_until = 0.0

    def steps(self) -> Process:
        """The process of the training thread."""
        job, costs = self._job, self._job.chains.costs
        forward = costs.forward.seconds * self._shares
        backward = costs.backward.seconds * self._shares
        plan, optimizer = job.chains.plan, costs.optimizer.seconds
        for self._step in range(job.steps):
            chains = job.chains.at(self._step)[self.number]
            self._computes, self._codec_seconds = True, 0.0
            if self._delay:
                yield partial(self._sleep, self._delay)
            if plan.averages_parameters:
                yield from self._compute(forward + backward + optimizer)
                self._end_compute()
                yield self._wait_for_results
                self._submit([priced for priced in chains if priced.chain.span is None])
                yield self._wait_for_results
                self._submit([priced for priced in chains if priced.chain.span is not None])
            else:
                moment = 0.0
                for priced in chains if not job.serial else ():
                    before, moment = moment, forward + min(priced.ready * self._shares, backward)
                    yield from self._compute(moment - before)
                    self._submit([priced])
                yield from self._compute(forward + backward - moment)
                self._end_compute()
                self._submit(chains if job.serial else ())
                yield self._wait_for_results
                yield partial(self._sleep, optimizer)
            self.marks.ended.append(self._flows.now)

    def _compute(self, seconds: float) -> Process:
        """Compute for this time, and as much longer as concurrent codecs take."""
        yield partial(self._sleep, max(0.0, seconds))
        while self._codec_seconds:
            delay, self._codec_seconds = self._codec_seconds, 0.0
            yield partial(self._sleep, delay)

    def _end_compute(self) -> None:
        self._computes = False
        self.marks.computed.append(self._flows.now)

    def _sleep(self, seconds: float, then: Callable[[], None]) -> None:
        self._flows.at(self._flows.now + seconds, then)

    def _wait_for_results(self, then: Callable[[], None]) -> None:
        self._continue = then
        self._continue_if_due()

    def _continue_if_due(self) -> None:
        """Continue a waiting training thread if all results that are due have arrived."""
        then = self._continue
        if then is not None and all(due > self._step for due in self._due.values()):
            self._continue = None
            then()

    def _submit(self, chains: Sequence[PricedChain]) -> None:
        for priced in chains:
            bucket = BucketTimes(self._step, self._flows.now)
            self._due[bucket] = self._step + priced.chain.delay
            self._queue.append((priced, bucket))
            self._begin_exchanges()

    def _begin_exchanges(self) -> None:
        while self._queue and self._exchanging < MAX_CHAINS_IN_FLIGHT:
            self._exchanging += 1
            _advance(self._exchange(*self._queue.popleft()))

    def _exchange(self, priced: PricedChain, bucket: BucketTimes) -> Process:
        """The process of one chain on the engine."""
        bucket.began = self._flows.now
        for stage in priced.chain.stages:
            if seconds := priced.codec_seconds(stage):
                yield partial(self._run_codec, seconds)
            if stage.rounds:
                yield partial(self._join, bucket.step, stage.rounds)
        bucket.ended = self._flows.now
        self._exchanging -= 1
        del self._due[bucket]
        self.marks.passages.append(bucket)
        self._continue_if_due()
        self._begin_exchanges()

    def _run_codec(self, seconds: float, then: Callable[[], None]) -> None:
        """Encode or decode, which slows down backward, too."""
        if self._computes:
            self._codec_seconds += seconds * self._job.chains.machine.contention
        self._engine_busy_until = max(self._flows.now, self._engine_busy_until) + seconds
        self._flows.at(self._engine_busy_until, then)

    def _join(self, step: int, rounds: Sequence[Round], then: Callable[[], None]) -> None:
        """Take part in concurrent rounds; `then` is called when all have ended."""
        left = len(rounds)

        def ended() -> None:
            nonlocal left
            left -= 1
            if not left:
                then()

        for round_ in rounds:
            self._job.join(step, round_, self.number, ended)


@dataclass(frozen=True, slots=True)
class PricedChain:
    """A chain of one rank. Of a payload that takes two shots, `decode` covers both."""

    chain: Chain
    ready: float  # seconds since backward began
    encode: float  # seconds
    decode: float  # seconds

    def codec_seconds(self, stage: Stage) -> float:
        """The codec's seconds before the rounds of this stage."""
        return {Work.ENCODE: self.encode, Work.DECODE: self.decode}.get(stage.work, 0.0)


class StepChains:
    def __init__(
        self, plan: Plan, group: Group, workload: Workload, machine: Machine, catalog: Catalog
    ) -> None:
        self.plan = plan
        self.machine = machine
        self.costs = workload.costs
        self.cycle = cycle(plan, group, catalog)
        self.ranks = group.ranks
        self._group = group
        self._catalog = catalog
        self._cost, _ = codec_cost(plan.precision, machine)
        self._compressor = catalog.compressors[plan.precision.name] if plan.precision else None
        self.buckets = _buckets(plan, workload, catalog)
        self._cached: dict[int, dict[int, tuple[PricedChain, ...]]] = {}

    def at(self, step: int) -> dict[int, tuple[PricedChain, ...]]:
        """The chains of every rank in order of submission, after the compressor's warm-up."""
        phase = step % self.cycle
        if phase not in self._cached:
            warm = -(-warm_up(self.plan) // self.cycle) * self.cycle
            compiled = compile_buckets(
                self.plan, self._group, self.buckets, warm + phase, self._catalog
            )
            self._cached[phase] = {
                rank: tuple(map(self._priced, compiled.of(rank))) for rank in self.ranks
            }
        return self._cached[phase]

    def _priced(self, chain: Chain) -> PricedChain:
        bucket, encoded, cost = self.buckets[chain.bucket], chain.encoded, self._cost
        if not encoded or self._compressor is None:
            return PricedChain(chain, bucket.ready_seconds, 0.0, 0.0)
        decode = cost.decode.value
        if not self._compressor.summable:
            always = not self._compressor.elementwise
            gathered = cost.decoding(encoded[0].group.size, always=always)
            decode = cost.decoding_shards if len(encoded) > 1 else gathered
        return PricedChain(
            chain,
            bucket.ready_seconds,
            cost.bucket.value + cost.encode.value * bucket.elements,
            decode * bucket.elements,
        )


def codec_cost(precision: Choice | None, machine: Machine) -> tuple[CodecCost, list[str]]:
    """The codec cost measured for this choice, or for the same compressor with the most arguments
    in common, and what is assumed about its speed, in words."""
    if precision is None:
        return CodecCost(), []
    own = _arguments(str(precision))
    same = [text for text in machine.codecs if PlanText.parse(text).preset.name == precision.name]
    if not same:
        assumed = "compressors without measurement: 1 ns per element for encode and decode each"
        return ASSUMED_CODEC, [assumed]
    timed = max(same, key=lambda text: len(own & _arguments(text)))
    assumed = "compressors are as fast as with the arguments that were measured"
    return machine.codecs[timed], [] if _arguments(timed) <= own else [assumed]


def _arguments(text: str) -> set[tuple[str, str]]:
    return {pair for pair in PlanText.parse(text).preset.arguments if pair[0] != "warmup"}


ASSUMED_CODEC = CodecCost(encode=FittedValue(1e-9, 0.5), decode=FittedValue(1e-9, 0.5))


def _buckets(plan: Plan, workload: Workload, catalog: Catalog) -> tuple[Bucket, ...]:
    limit = plan.settings.bucket
    if not catalog.is_native(plan) or limit != Settings().bucket:
        return workload.buckets(limit)
    first = workload.buckets(DDP_FIRST_BUCKET)[0]
    others = tuple(tensor for tensor in workload.tensors if tensor not in first.tensors)
    if not others:
        return (first,)
    ready = workload.ready_seconds()
    rest = (
        replace(b, index=b.index + 1, ready_seconds=max(ready[t.name] for t in b.tensors))
        for b in replace(workload, tensors=others).buckets(limit)
    )
    return (first, *rest)
