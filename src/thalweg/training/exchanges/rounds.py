"""The exchange of a gradient plan's buckets by the rounds of its schedule, through the engine.

Coded plans have an exchange of their own, which waits for no rank (`tree.py`).
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace

from thalweg.compress import Kept
from thalweg.engine.collectives import SEE_OUTPUT_REMEDY
from thalweg.engine.engine import ChainTasks
from thalweg.engine.execute import Task
from thalweg.plan import Plan
from thalweg.schedules import Group
from thalweg.steps import Chain, warm_up
from thalweg.training.buckets import FlatBucket, Layout
from thalweg.training.compiled_steps import CompiledSteps, RankStep
from thalweg.training.compression_overlap import Overlap
from thalweg.training.exchanges.compressed import Compression
from thalweg.training.exchanges.exchange import Exchange
from thalweg.training.plan_context import Peers
from thalweg.training.plan_state import state_of


class BucketRounds:
    """The rounds of a plan for the buckets of a layout: compiled for this rank, and compressed if
    the plan is."""

    def __init__(self, plan: Plan, group: Group, layout: Layout, rank: int) -> None:
        self.layout = layout
        self.compressed = Compression.of(plan).buckets(layout, rank)
        self._plan = plan
        self.rank = rank
        self.set_group(group)

    def set_group(self, group: Group) -> None:
        """Use the rounds of this group from now on."""
        self.steps = CompiledSteps(self._plan, group, self.layout.workload, self.rank)

    def release(self) -> None:
        """Free the memory of the buckets."""
        self.layout = replace(self.layout, buckets=())
        self.compressed.clear()

    def work(self, rank_step: RankStep, chain: Chain) -> Task | ChainTasks:
        """The work of the engine for a chain of this step."""
        if chain.bucket in self.compressed:
            return self.compressed[chain.bucket].tasks(rank_step, chain)
        bucket = self.layout.buckets[chain.bucket]
        [stage] = chain.stages
        [round_] = stage.rounds
        return rank_step.task(chain, round_, bucket.vector, bucket.arithmetic)


class RoundsExchange(Exchange):
    """The exchange by rounds."""

    def __init__(self, peers: Peers, plan: Plan, layout: Layout) -> None:
        group, engine, clock = peers.group, peers.engine, peers.clock
        self.factor = 1 / group.size
        self._engine = engine
        self._clock = clock
        self._rounds = BucketRounds(plan, group, layout, engine.rank)
        self._rounds.steps.at(clock.step)  # errors are raised now
        self._work: dict[int, Task | ChainTasks] | None = None  # of this step, by bucket
        self._sent: list[Future[None]] = []
        self._buffered_chains: list[Task | ChainTasks] = []
        self._before: dict[str, Kept] = {}
        self.kept_before = self._before
        self.compressed = self._rounds.compressed.values()
        choice = self._rounds.compressed and len(layout.buckets) > 1
        average = peers.collectives(SEE_OUTPUT_REMEDY).all_reduce_mean if choice else None
        first = max(clock.step, warm_up(plan))
        self._overlap = Overlap(average, first, plan.settings.overlap)
        self.timings = self._overlap.timings

    def begin(self) -> None:
        self._work = None
        for kind, kept in state_of(self.compressed).items():
            before = self._before.setdefault(kind, replace(kept, arrays={})).arrays
            for name, array in kept.arrays.items():
                if name in before:
                    before[name][:] = array
                else:
                    before[name] = array.copy()
        self._overlap.begin()

    def send(self, bucket: FlatBucket, *, is_finite: bool) -> None:
        if self._work is None:
            step, rounds = self._rounds.steps.begin(self._clock), self._rounds
            self._work = {chain.bucket: rounds.work(step, chain) for chain in step.chains}
        work = self._work[bucket.index]
        if not isinstance(work, Task):
            work = self._overlap.timed(work)
            if self._overlap.is_serial:
                self._buffered_chains.append(work)
                return
        self._sent.append(self._engine.submit(work))

    def finish(self) -> None:
        self._overlap.backward_is_over()
        chains, self._buffered_chains = self._buffered_chains, []
        self._sent += [self._engine.submit(chain) for chain in chains]
        self._wait()
        self._overlap.end(self._clock.step)

    def drop(self) -> None:
        """Drop chains that haven't begun: the other ranks don't wait for them, as their step fails
        too. The messages that were sent are lost, with their residuals."""
        self._buffered_chains.clear()
        self._wait()

    def restore_state(self) -> None:
        for kind, kept in state_of(self.compressed).items():
            for name, array in kept.arrays.items():
                array[:] = self._before[kind].arrays[name]

    def close(self) -> None:
        self._sent.clear()
        self._buffered_chains.clear()
        self._work = None
        self._before, self.kept_before = {}, {}
        self._rounds.release()

    def _wait(self) -> None:
        sent, self._sent = self._sent, []
        self._engine.wait(sent)
