"""Parameter plans: each rank takes its own step, then parameters are averaged in its group.

Batch norm's statistics are always averaged too, and the optimizer's state if the plan says so; all
in float32 at least, whatever the type is. A delayed average (`delay=1`, or one that takes several
steps) is transferred while the next steps are computed. It is then applied as x += mean(x') - x',
where x' are the values that were sent, so that the steps taken meanwhile are kept. With or without
a delay the mean over all ranks stays the same.
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
from thalweg.members.agreement import Change
from thalweg.plan import Plan
from thalweg.steps import Chain
from thalweg.training.buckets import FlatBucket, Layout, scaled_into
from thalweg.training.compiled_steps import RankStep
from thalweg.training.contention_monitor import (
    CONTENTION_CHANGE,
    Adjustment,
    ContentionMonitor,
    agreed_contention,
)
from thalweg.training.exchanges.compressed import Compression
from thalweg.training.exchanges.rounds import BucketRounds
from thalweg.training.optimizer_state import (
    averaged_tensors,
    has_new_optimizer_state,
    never_negative,
)
from thalweg.training.plan_context import PlanContext
from thalweg.training.sources.source import Source

STATE_CHECK_PERIOD_STEPS = 8
NEW_STATE_CHANGE = "slots"  # in the agreement: the optimizer has state that isn't averaged yet
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class _PendingAverage:
    """An average under way, which is applied at the end of step `due`."""

    futures: tuple[Future[None], ...]
    buckets: tuple[FlatBucket, ...]
    due: int
    delayed: bool


class ParameterSource(Source):
    """Averages parameters, from the context's first step on. Which tensors are averaged is known
    after a step only, as an optimizer has no state before. After a rendezvous each rank keeps its
    parameters."""

    def __init__(
        self,
        context: PlanContext,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        plan: Plan,
    ) -> None:
        self._tensors: Tensors = {}  # the averaged tensors by name; empty until `_open_rounds`
        # True if the averaging groups follow the contended links.
        self._adjusts = bool(plan.topology.arguments.get("adjust")) and context.group.size > 1
        self._context = context
        self._model = model
        self._optimizer = optimizer if plan.averages_optimizer_state else None
        self._plan = plan
        self._group = context.group
        self._engine = context.engine
        self._clock = context.clock
        self._world = context.world.namespace(f"groups/{context.clock.step}")
        self._pending: list[_PendingAverage] = []
        self._sent: dict[str, torch.Tensor] = {}  # x' of the delayed average that is pending
        self._exchange_end = monotonic()  # of the last step
        self._rounds: BucketRounds | None = None  # None until `_open_rounds`
        self._monitor: ContentionMonitor | None = None

    def after_step(self) -> None:
        if self._clock.step >= self._context.first_step:
            try:
                self._synchronize()
            except (Interrupted, StoreLost) as error:
                self._context.on_interrupted(error)
                return
        if self._optimizer is not None and (self._clock.step + 1) % STATE_CHECK_PERIOD_STEPS == 0:
            self._propose_new_state(self._optimizer)

    def _propose_new_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Propose to average new optimizer state. Some appears only when a parameter is first used,
        or after skipped steps."""
        if has_new_optimizer_state(optimizer, self._tensors):
            self._context.agreement.propose(NEW_STATE_CHANGE, True)

    def adopt(self, change: Change) -> Adjustment | None:
        """Average all tensors that exist by the next step, or use the group table for other
        contended links from this step on."""
        if change.name == NEW_STATE_CHANGE:
            self.wait_and_apply()
            self._rounds = None
        if change.name != CONTENTION_CHANGE or not self._adjusts:
            return None
        contention, reason = agreed_contention(change.value)
        self.wait_and_apply()
        self._group = replace(self._group, contention=contention)
        if self._rounds is not None:
            self._rounds.set_group(self._group)
        if self._monitor is not None:
            self._monitor.adopt(contention, self._clock.step)
        return Adjustment(step=change.step, kept_apart=str(contention), reason=reason)

    @torch.no_grad()
    def _synchronize(self) -> None:
        busy_seconds = monotonic() - self._exchange_end
        rounds = self._open_rounds()
        step = self._clock.step
        self._finish(step)
        rank_step = rounds.steps.begin(self._clock)
        futures, buckets = [], []
        for chain in rank_step.chains:
            bucket = rounds.layout.buckets[chain.bucket]
            self._fill(bucket, 1 / chain.contributions(rounds.rank), keep=chain.delay > 0)
            futures.append(self._engine.submit(rounds.work(rank_step, chain)))
            buckets.append(bucket)
        if rank_step.chains:
            delay = rank_step.chains[0].delay
            average = _PendingAverage(tuple(futures), tuple(buckets), step + delay, delay > 0)
            self._pending.append(average)
        if self._monitor is not None:  # while the average is under way
            self._monitor.observe(step, busy_seconds)
        if self._plan.cadence.delay == 0:
            self._finish(step)
        self._exchange_end = monotonic()

    @torch.no_grad()
    def wait_and_apply(self) -> None:
        self._finish(None)

    def detach(self) -> None:
        self.wait_and_apply()

    def abort(self) -> None:
        self._pending.clear()
        self._sent.clear()
        self._rounds = None

    def _open_rounds(self) -> BucketRounds:
        """Return the rounds of the buckets. The first call, in the first step that averages, agrees
        with the other ranks on the averaged tensors, and allocates the buckets."""
        if self._rounds is None:
            context, step = self._context, self._clock.step
            self._tensors = averaged_tensors(
                context.parameters,
                self._model,
                self._optimizer,
                self._world,
                context.abort_flag,
                step,
            )
            layout = Layout.of(
                self._tensors,
                self._plan.settings.bucket,
                Compression.of(self._plan).arrange,
                in_float32=True,
            )
            self._rounds = BucketRounds(self._plan, self._group, layout, self._engine.rank)
            if self._adjusts:
                self._monitor = ContentionMonitor(
                    self._group,
                    self._world,
                    context.agreement,
                    self._engine.arrivals,
                    layout.workload.nbytes,
                )
        return self._rounds

    def _fill(self, bucket: FlatBucket, factor: float, *, keep: bool) -> None:
        """Write the tensors of a bucket, times `factor`, into it; `keep` copies them to `_sent`."""
        for name, view in bucket.views.items():
            scaled_into(view, self._tensors[name], factor)
            if keep:
                if name not in self._sent:
                    self._sent[name] = torch.empty_like(self._tensors[name])
                self._sent[name].copy_(self._tensors[name])

    def _finish(self, step: int | None) -> None:
        """Wait for the averages that are due at this step, or for all if None, and apply them."""
        due = [average for average in self._pending if step is None or average.due <= step]
        self._pending = [average for average in self._pending if average not in due]
        for average in due:
            self._engine.wait(list(average.futures))
            for bucket in average.buckets:
                exact = not (average.delayed or self._open_rounds().compressed)
                self._apply(bucket, delayed=average.delayed, exact=exact)

    def _apply(self, bucket: FlatBucket, *, delayed: bool, exact: bool) -> None:
        """Write the average in a bucket to its tensors. Unless it is exact, elements that are never
        negative by their meaning, such as variances, may be, and are set to 0."""
        for name, view in bucket.views.items():
            tensor = self._tensors[name]
            if delayed:
                tensor.add_(view.to(tensor.device) - self._sent[name])
            else:
                tensor.copy_(view)
            if never_negative(name) and not exact:
                tensor.clamp_(min=0)


@dataclass(frozen=True, slots=True)
class _PendingRackAverage:
    """A part of a bucket that is being averaged between racks. `contribution` is what this rack
    adds to the mean of all racks; the engine sums into it, so it is that mean when the future is
    done."""

    future: Future[None]
    bucket: int
    span: tuple[int, int]
    rack_mean: torch.Tensor
    contribution: torch.Tensor


class TwoLevelSource(ParameterSource):
    """Averages at two levels, the upper one delayed: racks at every step, all racks one step later.

    With m(t) a rack's mean after step t, and M(t) the mean over all racks, weighted by their sizes:

        m(t+1) = mean over the rack of x(t+1)  +  M(t) - m(t)

    so the exchange between racks has a whole step to complete. The j-th host of each rack exchanges
    the j-th part of its rack's mean with the j-th hosts of the other racks. It adds M(t) - m(t) to
    its own contribution to the rack's next average, undivided, so that the sum of the contributions
    distributes the difference in the rack. No link carries more bytes than for the exact average,
    and replicas of different racks differ by one step's noise. With C racks of G workers its
    variance is (1 - 1/C) / G of one worker's.
    """

    # Until the first step sets these on the object:
    _average_pending = False  # an average between racks isn't applied yet; equal on all ranks
    _crossing: tuple[_PendingRackAverage, ...] = ()  # the parts that this rank exchanges

    @torch.no_grad()
    def _synchronize(self) -> None:
        rank_step = self._open_rounds().steps.begin(self._clock)
        self._average(rank_step)
        for chain in rank_step.chains:
            if chain.span is not None:
                self._cross(rank_step, chain, chain.span)
        self._average_pending = (self._clock.step + 1) % self._plan.cadence.every == 0

    @torch.no_grad()
    def wait_and_apply(self) -> None:
        """Wait for the averages under way, and distribute them in the rack."""
        if self._average_pending:
            self._average_pending = False
            self._average(self._open_rounds().steps.begin(self._clock))

    def abort(self) -> None:
        """Drop the averages between racks: every rack keeps its own mean."""
        self._crossing = ()
        self._average_pending = False

    def _average(self, rank_step: RankStep) -> None:
        """Average inside the rack, and distribute the averages between racks of the step before."""
        rounds = self._open_rounds()
        crossed, self._crossing = self._crossing, ()
        futures = []
        for chain in rank_step.chains:
            if chain.span is not None:
                continue
            bucket = rounds.layout.buckets[chain.bucket]
            self._fill(bucket, 1 / chain.contributions(rounds.rank), keep=False)
            for crossing in crossed:
                if crossing.bucket == bucket.index:
                    self._engine.wait([crossing.future])
                    part = bucket.flat[slice(*crossing.span)]
                    part.add_(crossing.contribution).sub_(crossing.rack_mean)
            futures.append(self._engine.submit(rounds.work(rank_step, chain)))
        self._engine.wait(futures)
        for bucket in rounds.layout.buckets:
            self._apply(bucket, delayed=False, exact=False)

    def _cross(self, rank_step: RankStep, chain: Chain, span: tuple[int, int]) -> None:
        """Start to average this rank's part of a bucket between racks."""
        bucket, [round_] = self._open_rounds().layout.buckets[chain.bucket], chain.rounds
        rack_mean = bucket.flat[slice(*span)].clone()
        rack = next(rack for rack in self._group.racks if self._engine.rank in rack)
        contribution = rack_mean * (len(rack) / self._group.size)
        task = rank_step.task(chain, round_, as_array(contribution), bucket.arithmetic)
        future = self._engine.submit(task)
        crossing = _PendingRackAverage(future, bucket.index, span, rack_mean, contribution)
        self._crossing = (*self._crossing, crossing)
