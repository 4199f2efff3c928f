"""How the buckets of a gradient plan travel: by the rounds of its schedule, through the engine.

Coded plans have a carrier of their own, which waits for nobody (`coded.py`).
"""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future
from typing import Protocol

from thalweg.engine.collectives import Collectives, RoundCounter
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
    def __call__(self, factor: float, presence: float = 1.0) -> bool:
        """Write the gradients, times `factor`, into the bucket; and `presence` for every parameter
        that has one. Whether all of them are finite: those that are not are zero there."""


class Exchange(Protocol):
    def begin(self) -> None:
        """The first gradient of a step is there."""

    def send(self, bucket: FlatBucket, fill: Fill) -> None:
        """All gradients of this bucket are there."""

    def finish(self) -> None:
        """All buckets were sent: wait until they hold what the plan makes of them."""

    def drop(self) -> None:
        """The step failed: wait until the buckets are free again."""

    def restore_state(self) -> None:
        """The step is skipped: hold what was held before it."""

    def release(self) -> None:
        """It isn't used any more, and holds no memory."""

    @property
    def compressed(self) -> Collection[CompressedBucket]:
        """The buckets that a compressor keeps something of."""

    @property
    def compressor_state_before(self) -> CompressorState:
        """What they kept before the step that was begun."""


class StatelessExchange:
    """For carriers that keep nothing from step to step."""

    @property
    def compressed(self) -> Collection[CompressedBucket]:
        return ()

    @property
    def compressor_state_before(self) -> CompressorState:
        return {}

    def restore_state(self) -> None:
        """There is nothing to go back to."""


class RoundsExchange:
    """`compression` is the plan's, if it has one."""

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
        self._compiled_steps.at(clock.step)  # what can't be done is said now
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
        collectives = Collectives(group, engine, clock, "look at what it printed")
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
        """What is kept from step to step: one that is broken off begins with it again."""
        for kind, arrays in state_views(self._compressed.values()).items():
            kept = self._before.setdefault(kind, {})
            for name, array in arrays.items():
                if name in kept:
                    kept[name][:] = array
                else:
                    kept[name] = array.copy()

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
        held, self._buffered_chains = self._buffered_chains, []
        self._sent += [self._engine.submit(chain) for chain in held]
        self._wait()
        self.overlap.end(self._clock.step)

    def drop(self) -> None:
        """What was held back never begins: the others don't wait for it, as their step failed too,
        or will. What had left is lost, with what had been kept of it."""
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
