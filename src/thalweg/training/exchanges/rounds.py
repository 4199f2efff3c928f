"""The exchange of a gradient plan's buckets by the rounds of its schedule, through the engine.

Coded plans have an exchange of their own, which waits for no rank (`tree.py`).
"""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future
from typing import Protocol

from thalweg.engine.collectives import SEE_OUTPUT_REMEDY, Collectives, RoundCounter
from thalweg.engine.engine import Chain, Engine
from thalweg.plan import Plan
from thalweg.schedules import Group
from thalweg.steps import warm_up
from thalweg.training.buckets import FlatBucket, Layout
from thalweg.training.compiled_steps import CompiledSteps, RankStep
from thalweg.training.compression_overlap import Overlap
from thalweg.training.compressor_state import CompressorState, state_views
from thalweg.training.exchanges.compressed import CompressedBucket, Compression
from thalweg.transports import Array


class Fill(Protocol):
    """Writes gradients into a bucket."""

    def __call__(self, factor: float, presence: float = 1.0) -> bool:
        """Write the gradients, times `factor`, into the bucket, and `presence` for every parameter
        that has one. False if some are not finite: those are zero in the bucket."""


class Exchange(Protocol):
    """Synchronises the buckets of a step."""

    def begin(self) -> None:
        """The first gradient of a step is ready."""

    def send(self, bucket: FlatBucket, fill: Fill) -> None:
        """All gradients of this bucket are ready."""

    def finish(self) -> None:
        """Wait until the buckets, all of which were sent, hold the plan's result."""

    def drop(self) -> None:
        """Wait until the buckets of a failed step are free again."""

    def restore_state(self) -> None:
        """Restore the compressor state from before the step, which is skipped."""

    def release(self) -> None:
        """Free the memory; the exchange isn't used any more."""

    @property
    def compressed(self) -> Collection[CompressedBucket]:
        """The buckets with compressor state."""

    @property
    def compressor_state_before(self) -> CompressorState:
        """The compressor state before the current step."""


class StatelessExchange:
    """The state of exchanges that keep nothing from step to step."""

    @property
    def compressed(self) -> Collection[CompressedBucket]:
        return ()

    @property
    def compressor_state_before(self) -> CompressorState:
        return {}

    def restore_state(self) -> None:
        """Nothing has to be restored."""


class RoundsExchange:
    """The exchange by rounds. `compression` is the plan's, if it has one."""

    def __init__(
        self,
        plan: Plan,
        group: Group,
        layout: Layout,
        engine: Engine,
        clock: RoundCounter,
        compression: Compression | None = None,
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._compiled_steps = CompiledSteps(plan, group, layout.workload, engine.rank)
        self._compiled_steps.at(clock.step)  # errors are raised now
        self._contributions = group.size
        self._rank_step: RankStep | None = None
        self._first_round: int | None = None
        self._sent: list[Future[None]] = []
        self._buffered_chains: list[Chain] = []
        self._before: dict[str, dict[str, Array]] = {}
        self._compressed: dict[int, CompressedBucket] = {}
        if compression is not None:
            self._compressed = {
                bucket.index: CompressedBucket(bucket, compression, engine.rank)
                for bucket in layout.buckets
            }
        choice = compression is not None and len(layout.buckets) > 1
        collectives = Collectives(group, engine, clock, SEE_OUTPUT_REMEDY)
        average = collectives.all_reduce_mean if choice else None
        first = max(clock.step, warm_up(plan))
        self.overlap = Overlap(average, first, plan.settings.overlap)

    @property
    def compressed(self) -> Collection[CompressedBucket]:
        return self._compressed.values()

    @property
    def compressor_state_before(self) -> CompressorState:
        return self._before

    def begin(self) -> None:
        self._rank_step = self._compiled_steps.at(self._clock.step)
        self._first_round = None
        self._remember()
        self.overlap.begin()

    def _remember(self) -> None:
        """Copy the compressor state: an interrupted step begins with it again."""
        for kind, arrays in state_views(self._compressed.values()).items():
            before = self._before.setdefault(kind, {})
            for name, array in arrays.items():
                if name in before:
                    before[name][:] = array
                else:
                    before[name] = array.copy()

    def send(self, bucket: FlatBucket, fill: Fill) -> None:
        assert self._rank_step is not None
        if self._first_round is None:
            self._first_round = self._clock.claim(self._rank_step.numbers)
        step, first = self._clock.step, self._first_round
        rank_rounds = self._rank_step.of(bucket.index)
        fill(1 / self._contributions)
        if bucket.index not in self._compressed:
            self._sent += [
                self._engine.submit(rank_round.task(bucket, step, first))
                for rank_round in rank_rounds
            ]
            return
        chain = self.overlap.timed(self._compressed[bucket.index].chain(rank_rounds, step, first))
        if self.overlap.is_serial:
            self._buffered_chains.append(chain)
        else:
            self._sent.append(self._engine.submit(chain))

    def finish(self) -> None:
        self.overlap.backward_is_over()
        chains, self._buffered_chains = self._buffered_chains, []
        self._sent += [self._engine.submit(chain) for chain in chains]
        self._wait()
        self.overlap.end(self._clock.step)

    def drop(self) -> None:
        """Drop chains that haven't begun: the other ranks don't wait for them, as their step fails
        too. The messages that were sent are lost, with their residuals."""
        self._buffered_chains.clear()
        self._wait()

    def restore_state(self) -> None:
        for kind, arrays in state_views(self._compressed.values()).items():
            for name, array in arrays.items():
                array[:] = self._before[kind][name]

    def release(self) -> None:
        self._buffered_chains, self._sent, self._compressed, self._before = [], [], {}, {}

    def _wait(self) -> None:
        sent, self._sent = self._sent, []
        self._engine.wait(sent)
