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

from concurrent.futures import Future
from dataclasses import dataclass

import torch

from thalweg.training.itinerary import Itinerary, Stop
from thalweg.training.layout import Layout, as_array, scaled_into
from thalweg.training.parameters import ParameterAverager
from thalweg.training.slots import never_negative


@dataclass(frozen=True, slots=True)
class _Crossing:
    """A part of a bucket on its way between the racks."""

    future: Future[None]
    bucket: int
    span: tuple[int, int]
    sent: torch.Tensor  # the rack's mean
    held: torch.Tensor  # all racks', when it is over


class TwoLevelAverager(ParameterAverager):
    _meets = False  # racks, and what comes of it isn't applied; the same on all ranks
    _crossing: tuple[_Crossing, ...] = ()

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

    def break_off(self) -> None:
        """What is between the racks is lost: every rack keeps its own mean."""
        self._crossing = ()
        self._meets = False

    @property
    def _ready(self) -> tuple[Layout, Itinerary]:
        if self._layout is None or self._itinerary is None:
            return self._prepare()
        return self._layout, self._itinerary

    def _stops(self, step: int) -> tuple[list[Stop], list[Stop]]:
        """Inside the rack, and between racks."""
        stops = self._ready[1].at(step).stops
        return [s for s in stops if not s.round.delay], [s for s in stops if s.round.delay]

    def _average(self, stops: list[Stop], first: int) -> None:
        layout, _ = self._ready
        crossed, self._crossing = self._crossing, ()
        futures = []
        for stop in stops:
            bucket = layout.buckets[stop.round.bucket]
            for name, view in bucket.views.items():
                scaled_into(view, self.tensors[name], 1 / stop.divisor)
            for crossing in crossed:
                if crossing.bucket == bucket.index:
                    self._engine.wait([crossing.future])
                    part = bucket.flat[slice(*crossing.span)]
                    part.add_(crossing.held).sub_(crossing.sent)
            futures.append(self._engine.submit(stop.task(bucket, self._clock.step, first)))
        self._engine.wait(futures)
        for bucket in layout.buckets:
            for name, view in bucket.views.items():
                self.tensors[name].copy_(view)
                if never_negative(name):
                    self.tensors[name].clamp_(min=0)

    def _cross(self, stop: Stop, first: int) -> None:
        bucket = self._ready[0].buckets[stop.round.bucket]
        sent = bucket.flat[slice(*stop.round.span)].clone()
        rack = next(rack for rack in self._group.racks if self._engine.rank in rack)
        held = sent * (len(rack) / self._group.size)
        task = stop.task(bucket, self._clock.step, first, as_array(held))
        future = self._engine.submit(task)
        crossing = _Crossing(future, bucket.index, stop.round.span, sent, held)
        self._crossing = (*self._crossing, crossing)
