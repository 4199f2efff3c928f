"""Parameter plans: each rank takes its own step, then parameters are averaged in its group.

More than parameters are averaged: batch norm's statistics always, the optimizer's state if the plan
has it; all in float32 at least, whatever the type is. A delayed result (`delay=1`, or an averaging
over several steps) is transferred while the next steps are computed: x += mean(x') - x', where x'
are the values that were sent, so that the steps taken meanwhile are kept. Either way the mean over
all ranks stays the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from time import monotonic

import torch
from torch import nn

from thalweg.engine.arithmetic import as_array
from thalweg.errors import Interrupted, StoreLost
from thalweg.plan import Plan, What
from thalweg.schedules import ContendedLinks
from thalweg.training.buckets import FlatBucket, Layout, scaled_into
from thalweg.training.compiled_steps import RankRound
from thalweg.training.contention_monitor import ContentionMonitor
from thalweg.training.exchanges.compressed import Compression
from thalweg.training.exchanges.rounds import BucketRounds
from thalweg.training.optimizer_state import averaged_tensors, never_negative
from thalweg.training.plan_context import PlanContext
from thalweg.training.synchronizer import Synchronizer

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class _PendingAverage:
    """An averaging under way, to be applied when the optimizer takes step `due`."""

    futures: tuple[Future[None], ...]
    buckets: tuple[FlatBucket, ...]
    due: int
    delayed: bool


class ParameterSynchronizer(Synchronizer):
    """Averages parameters; the tensors are known after the first step only, as an optimizer has no
    state before. No rank averages before the context's first step. After a rendezvous each rank
    keeps its parameters."""

    def __init__(
        self,
        context: PlanContext,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        plan: Plan,
    ) -> None:
        self.tensors: Tensors = {}  # the averaged tensors
        # True if the groups follow the contended links
        self.adjusts = bool(plan.topology.arguments.get("adjust")) and context.group.size > 1
        self._context = context
        self._model = model
        self._optimizer = optimizer if plan.what is What.EVERYTHING else None
        self._plan = plan
        self._group = context.group
        self._engine = context.engine
        self._clock = context.clock
        self._world = context.world.namespace(f"groups/{context.clock.step}")
        self._under_way: list[_PendingAverage] = []
        self._sent: dict[str, torch.Tensor] = {}
        self._over = monotonic()  # the end of the last step's exchange
        self._rounds: BucketRounds | None = None
        self._monitor: ContentionMonitor | None = None

    def after_step(self) -> None:
        if self._clock.step >= self._context.first_step and not self._try_synchronize():
            self._context.on_interrupted()

    def _try_synchronize(self) -> bool:
        try:
            self._synchronize()
        except (Interrupted, StoreLost):
            return False
        return True

    @torch.no_grad()
    def _synchronize(self) -> None:
        busy = monotonic() - self._over
        rounds = self._ready
        step = self._clock.step
        self._finish(step)
        rank_step = rounds.at(step)
        first = self._clock.claim(rank_step.numbers)
        futures, buckets = [], []
        for bucket in rounds.layout.buckets:
            rank_rounds = rank_step.of(bucket.index)
            if not rank_rounds:
                continue
            self._fill(bucket, 1 / rank_rounds[0].divisor, keep=rank_rounds[0].round.delay > 0)
            futures.append(self._engine.submit(rounds.work(bucket, rank_rounds, step, first)))
            buckets.append(bucket)
        if rank_step.rounds:
            delay = rank_step.rounds[0].round.delay
            exchange = _PendingAverage(tuple(futures), tuple(buckets), step + delay, delay > 0)
            self._under_way.append(exchange)
        if self._monitor is not None:  # while the average is under way
            self._monitor.publish(step, busy)
            self._monitor.evaluate(step)
        if self._plan.cadence.delay == 0:
            self._finish(step)
        self._over = monotonic()

    @torch.no_grad()
    def wait_and_apply(self) -> None:
        self._finish(None)

    def detach(self) -> None:
        self.wait_and_apply()

    def abort(self) -> None:
        self._under_way.clear()
        self._sent.clear()
        self._rounds = None

    def refresh_tensors(self) -> None:
        """Average all tensors that exist by the next step."""
        self.wait_and_apply()
        self._rounds = None

    def adopt(self, contention: ContendedLinks) -> None:
        """Use the group table for these contended links from this step on."""
        self.wait_and_apply()
        self._group = replace(self._group, contention=contention)
        if self._rounds is not None:
            self._rounds.set_group(self._group)
        if self._monitor is not None:
            self._monitor.adopt(contention, self._clock.step)

    @property
    def _ready(self) -> BucketRounds:
        """The rounds of the buckets, which are laid out in the first step that averages."""
        if self._rounds is None:
            context, step = self._context, self._clock.step
            self.tensors = averaged_tensors(
                self._model, self._optimizer, self._world, context.abort_flag, step
            )
            layout = Layout.of(
                self.tensors,
                self._plan.settings.bucket,
                Compression.of(self._plan).arrange,
                in_float32=True,
            )
            self._rounds = BucketRounds(self._plan, self._group, layout, self._engine.rank)
            if self.adjusts:
                self._monitor = ContentionMonitor(
                    self._group,
                    self._world,
                    context.agreement,
                    self._engine.arrivals,
                    layout.workload.nbytes,
                )
        return self._rounds

    def _fill(self, bucket: FlatBucket, factor: float, *, keep: bool) -> None:
        for name, view in bucket.views.items():
            scaled_into(view, self.tensors[name], factor)
            if keep:
                if name not in self._sent:
                    self._sent[name] = torch.empty_like(self.tensors[name])
                self._sent[name].copy_(self.tensors[name])

    def _finish(self, step: int | None) -> None:
        """Apply the averages that are due at this step; all if None."""
        over = [e for e in self._under_way if step is None or e.due <= step]
        self._under_way = [e for e in self._under_way if e not in over]
        for exchange in over:
            self._engine.wait(list(exchange.futures))
            for bucket in exchange.buckets:
                exact = not (exchange.delayed or self._ready.compressed)
                self._apply(bucket, late=exchange.delayed, exact=exact)

    def _apply(self, bucket: FlatBucket, *, late: bool, exact: bool) -> None:
        for name, view in bucket.views.items():
            tensor = self.tensors[name]
            if late:
                tensor.add_(view.to(tensor.device) - self._sent[name])
            else:
                tensor.copy_(view)
            if never_negative(name) and not exact:
                tensor.clamp_(min=0)


@dataclass(frozen=True, slots=True)
class _PendingRackAverage:
    """A part of a bucket that is being averaged between racks."""

    future: Future[None]
    bucket: int
    span: tuple[int, int]
    sent: torch.Tensor  # the rack's mean
    global_mean: torch.Tensor  # of all racks, when the future is done


class TwoLevelSynchronizer(ParameterSynchronizer):
    """Averages at two levels, the upper one delayed: racks at every step, all racks one step later.

    With m(t) a rack's mean after step t, and M(t) the mean of all racks' by their sizes:

        m(t+1) = mean over the rack of x(t+1)  +  M(t) - m(t)

    so the exchange between racks has a whole step to complete. The j-th host of each rack exchanges
    the j-th part of its rack's mean with the j-th hosts of the others, and adds the difference, G_c
    times, to its own contribution to the rack's next average, which distributes it. No link carries
    more bytes than for the exact average, and replicas of different racks differ by one step's
    noise: its variance is (1 - 1/C) / G of one worker's.
    """

    _average_pending = False  # an average between racks isn't applied yet; equal on all ranks
    _crossing: tuple[_PendingRackAverage, ...] = ()

    @torch.no_grad()
    def _synchronize(self) -> None:
        inside, across = self._rounds_of(self._clock.step)
        first = self._claim()
        self._average(inside, first)
        for rank_round in across:
            self._cross(rank_round, first)
        self._average_pending = (self._clock.step + 1) % self._plan.cadence.every == 0

    @torch.no_grad()
    def wait_and_apply(self) -> None:
        """Wait for the averages under way, and distribute them in the rack."""
        if self._average_pending:
            self._average_pending = False
            inside, _ = self._rounds_of(self._clock.step)
            self._average(inside, self._claim())

    def abort(self) -> None:
        """Drop the averages between racks: every rack keeps its own mean."""
        self._crossing = ()
        self._average_pending = False

    def _rounds_of(self, step: int) -> tuple[list[RankRound], list[RankRound]]:
        """The rounds of a step inside the rack, and those between racks."""
        rank_rounds = self._ready.at(step).rounds
        inside = [one for one in rank_rounds if not one.round.delay]
        return inside, [one for one in rank_rounds if one.round.delay]

    def _claim(self) -> int:
        return self._clock.claim(2 * len(self._ready.layout.buckets))

    def _average(self, rank_rounds: list[RankRound], first: int) -> None:
        layout = self._ready.layout
        crossed, self._crossing = self._crossing, ()
        futures = []
        for rank_round in rank_rounds:
            bucket = layout.buckets[rank_round.round.bucket]
            self._fill(bucket, 1 / rank_round.divisor, keep=False)
            for crossing in crossed:
                if crossing.bucket == bucket.index:
                    self._engine.wait([crossing.future])
                    part = bucket.flat[slice(*crossing.span)]
                    part.add_(crossing.global_mean).sub_(crossing.sent)
            futures.append(self._engine.submit(rank_round.task(bucket, self._clock.step, first)))
        self._engine.wait(futures)
        for bucket in layout.buckets:
            self._apply(bucket, late=False, exact=False)

    def _cross(self, rank_round: RankRound, first: int) -> None:
        bucket = self._ready.layout.buckets[rank_round.round.bucket]
        sent = bucket.flat[slice(*rank_round.round.span)].clone()
        rack = next(rack for rack in self._group.racks if self._engine.rank in rack)
        mean = sent * (len(rack) / self._group.size)
        task = rank_round.task(bucket, self._clock.step, first, as_array(mean))
        future = self._engine.submit(task)
        crossing = _PendingRackAverage(future, bucket.index, rank_round.round.span, sent, mean)
        self._crossing = (*self._crossing, crossing)
