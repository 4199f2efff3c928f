"""How the buckets of a gradient plan travel: by the rounds of its schedule, through the engine.

Coded plans have a carrier of their own, which waits for nobody (`coded.py`).
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

from thalweg.plan import Plan
from thalweg.runtime import Engine
from thalweg.schedules import Group
from thalweg.training.itinerary import Clock, Itinerary, Leg
from thalweg.training.layout import FlatBucket, Layout


class Fill(Protocol):
    def __call__(self, factor: float, presence: float = 1.0) -> None:
        """Write the gradients, times `factor`, into the bucket; and `presence` for every parameter
        that has one."""


class Carrier(Protocol):
    def begin(self) -> None:
        """The first gradient of a step is there."""

    def send(self, bucket: FlatBucket, fill: Fill) -> None:
        """All gradients of this bucket are there."""

    def finish(self) -> None:
        """All buckets were sent: wait until they hold what the plan makes of them."""

    def drop(self) -> None:
        """The step failed: wait until the buckets are free again."""


class EngineCarrier:
    def __init__(
        self, plan: Plan, group: Group, layout: Layout, engine: Engine, clock: Clock
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._itinerary = Itinerary(plan, group, layout.workload, engine.rank)
        self._itinerary.at(clock.step)  # what can't be done is said now
        self._leg: Leg | None = None
        self._first_round: int | None = None
        self._sent: list[Future[None]] = []

    def begin(self) -> None:
        self._leg = self._itinerary.at(self._clock.step)
        self._first_round = None

    def send(self, bucket: FlatBucket, fill: Fill) -> None:
        assert self._leg is not None
        if self._first_round is None:
            self._first_round = self._clock.claim(self._leg.numbers)
        for stop in self._leg.stops:
            if stop.round.bucket == bucket.index:
                fill(1 / stop.divisor)
                task = stop.task(bucket, self._clock.step, self._first_round)
                self._sent.append(self._engine.submit(task))

    def finish(self) -> None:
        sent, self._sent = self._sent, []
        self._engine.wait(sent)

    def drop(self) -> None:
        self.finish()
