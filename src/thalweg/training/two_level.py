"""Two levels, the upper one late: racks average at every step, all racks one step behind.

With m(t) a rack's mean after step t, and M(t) the mean of all racks' by their sizes:

    m(t+1) = mean over the rack of x(t+1)  +  M(t) - m(t)

so the exchange between racks has a whole step to travel. The j-th host of each rack exchanges the
j-th part of its rack's mean with its like, and adds what the others bring, G_c times, to its own
contribution to the rack's next average, which hands it to all. No byte more crosses a link than
for the exact average, and replicas differ by one step's noise between racks: its variance is
(1 - 1/C) / G of one worker's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from thalweg.errors import Interrupted, StoreLost
from thalweg.plan import Plan
from thalweg.runtime import Engine
from thalweg.schedules import Group
from thalweg.training.held import KeepsNothing
from thalweg.training.itinerary import Clock, Itinerary, Stop
from thalweg.training.layout import Layout, as_array, scaled_into
from thalweg.training.parameters import Tensors
from thalweg.training.slots import never_negative


@dataclass(frozen=True, slots=True)
class _Crossing:
    """A part of a bucket on its way between the racks."""

    future: Future[None]
    bucket: int
    span: tuple[int, int]
    sent: torch.Tensor  # the rack's mean
    held: torch.Tensor  # all racks', when it is over


class TwoLevelAverager(KeepsNothing):
    def __init__(
        self,
        tensors: Callable[[], Tensors],
        plan: Plan,
        group: Group,
        engine: Engine,
        clock: Clock,
        *,
        begins: int = 0,
        broken_off: Callable[[], None] = lambda: None,
    ) -> None:
        self._begins = begins
        self._broken_off = broken_off
        self._ask_for_tensors = tensors
        self._plan = plan
        self._group = group
        self._engine = engine
        self._clock = clock
        rack = next(rack for rack in group.racks if engine.rank in rack)
        self._weight = len(rack) / group.size
        self._meets = False  # racks, and what comes of it isn't applied; the same on all ranks
        self._crossing: list[_Crossing] = []
        self._tensors: Tensors = {}
        self._layout: Layout | None = None
        self._itinerary: Itinerary | None = None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients never travel under this plan."""
        yield

    def after_step(self) -> None:
        if self._clock.step < self._begins:
            return
        try:
            self._meet()
        except (Interrupted, StoreLost):
            self._broken_off()

    @torch.no_grad()
    def _meet(self) -> None:
        inside, across = self._stops(self._clock.step)
        first = self._clock.claim(2 * len(self._ready[0].buckets))
        self._average(inside, first)
        for stop in across:
            self._cross(stop, first)
        self._meets = (self._clock.step + 1) % self._plan.cadence.every == 0

    @torch.no_grad()
    def settle(self) -> None:
        """Wait for what is under way, and hand it to the rack."""
        if self._meets:
            self._meets = False
            inside, _ = self._stops(self._clock.step)
            self._average(inside, self._clock.claim(2 * len(self._ready[0].buckets)))

    def detach(self) -> None:
        self.settle()

    def break_off(self) -> None:
        """What is between the racks is lost: every rack keeps its own mean."""
        self._crossing.clear()
        self._meets = False

    @property
    def _ready(self) -> tuple[Layout, Itinerary]:
        if self._layout is None or self._itinerary is None:
            self._tensors = self._ask_for_tensors()
            self._layout = Layout.of(self._tensors, self._plan.settings.bucket)
            workload = self._layout.workload
            self._itinerary = Itinerary(self._plan, self._group, workload, self._engine.rank)
        return self._layout, self._itinerary

    def _stops(self, step: int) -> tuple[list[Stop], list[Stop]]:
        """Inside the rack, and between racks."""
        stops = self._ready[1].at(step).stops
        return [s for s in stops if not s.round.delay], [s for s in stops if s.round.delay]

    def _average(self, stops: list[Stop], first: int) -> None:
        layout, _ = self._ready
        crossed, self._crossing = self._crossing, []
        futures = []
        for stop in stops:
            bucket = layout.buckets[stop.round.bucket]
            for name, view in bucket.views.items():
                scaled_into(view, self._tensors[name], 1 / stop.divisor)
            for crossing in crossed:
                if crossing.bucket == bucket.index:
                    self._engine.wait([crossing.future])
                    part = bucket.flat[slice(*crossing.span)]
                    part.add_(crossing.held).sub_(crossing.sent)
            futures.append(self._engine.submit(stop.task(bucket, self._clock.step, first)))
        self._engine.wait(futures)
        for bucket in layout.buckets:
            for name, view in bucket.views.items():
                self._tensors[name].copy_(view)
                if never_negative(name):
                    self._tensors[name].clamp_(min=0)

    def _cross(self, stop: Stop, first: int) -> None:
        bucket = self._ready[0].buckets[stop.round.bucket]
        sent = bucket.flat[slice(*stop.round.span)].clone()
        held = sent * self._weight
        task = stop.task(bucket, self._clock.step, first, as_array(held))
        future = self._engine.submit(task)
        self._crossing.append(_Crossing(future, bucket.index, stop.round.span, sent, held))
