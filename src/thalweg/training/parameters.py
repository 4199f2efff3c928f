"""Parameter plans: every rank takes its own step, then parameters are averaged in its group.

With `delay=1` the average travels while the next step is computed, and is applied one step late:
x += mean(x') - x', where x' is what was sent, so that the step taken meanwhile is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager

import torch
from torch import nn

from thalweg.plan import Plan
from thalweg.runtime import Engine
from thalweg.schedules import Group
from thalweg.training.itinerary import Clock, Itinerary
from thalweg.training.layout import FlatBucket, Layout, scaled_into


class ParameterAverager:
    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        plan: Plan,
        group: Group,
        engine: Engine,
        clock: Clock,
    ) -> None:
        self._parameters = parameters
        self._engine = engine
        self._clock = clock
        self._delayed = plan.cadence.delay > 0
        self._layout = Layout.of(parameters, plan.settings.bucket)
        self._itinerary = Itinerary(plan, group, self._layout.workload, engine.rank)
        self._itinerary.at(plan.cadence.every - 1)  # what can't be done is said now
        self._on_its_way: list[Future[None]] = []
        self._sent: dict[str, torch.Tensor] = {}
        if self._delayed:
            self._sent = {name: torch.empty_like(p) for name, p in parameters.items()}

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients never travel under this plan."""
        yield

    @torch.no_grad()
    def after_step(self) -> None:
        self.settle()
        leg = self._itinerary.at(self._clock.step)
        first = self._clock.claim(leg.numbers)
        for stop in leg.stops:
            bucket = self._layout.buckets[stop.round.bucket]
            for name, view in bucket.views.items():
                scaled_into(view, self._parameters[name], 1 / stop.divisor)
                if self._delayed:
                    self._sent[name].copy_(self._parameters[name])
            task = stop.task(bucket, self._clock.step, first)
            self._on_its_way.append(self._engine.submit(task))
        if not self._delayed:
            self.settle()

    @torch.no_grad()
    def settle(self) -> None:
        """Wait for what is on its way, and apply it."""
        if not self._on_its_way:
            return
        waiting, self._on_its_way = self._on_its_way, []
        self._engine.wait(waiting)
        for bucket in self._layout.buckets:
            self._apply(bucket)

    def detach(self) -> None:
        self.settle()

    def _apply(self, bucket: FlatBucket) -> None:
        for name, view in bucket.views.items():
            parameter = self._parameters[name]
            if self._delayed:
                parameter.add_(view.to(parameter.device) - self._sent[name])
            else:
                parameter.copy_(view)
