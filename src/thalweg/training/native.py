"""Torch's own path: DistributedDataParallel, either round a plain model or as it came.

For a plain model it is put in place by torch's `replicate`, which runs DDP from the model's own
forward, so that the script keeps its model. For a DDP object the plan's rounds run in its
communication hook; with the plan `ddp` it is left as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.nn.parallel import DistributedDataParallel

from thalweg.errors import PlanError
from thalweg.facts import Tensor, Workload
from thalweg.plan import Plan, Settings
from thalweg.runtime import Engine, Task, arithmetic_of
from thalweg.schedules import Group
from thalweg.training.itinerary import Clock, Itinerary
from thalweg.training.layout import DTYPES, as_array, scaled_into


class NativeAverager:
    """DDP in place, round a plain model."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self._model: Any = model
        options: dict[str, Any] = {}
        if plan.settings.bucket != Settings().bucket:
            options["bucket_cap_mb"] = plan.settings.bucket.nbytes / 2**20
        replicate(model, **options)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self._model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._model.set_requires_gradient_sync(True)

    def after_step(self) -> None:
        """DDP averages in backward."""

    def settle(self) -> None:
        """Nothing is on its way between two steps."""

    def detach(self) -> None:
        raise PlanError("torch's DDP can't be taken off a model again", "start with another plan")


class DdpAdapter:
    """A DDP object whose buckets travel by our rounds; by torch's own if the plan is `ddp`."""

    def __init__(
        self,
        model: DistributedDataParallel,
        plan: Plan,
        group: Group,
        engine: Engine,
        clock: Clock,
        *,
        native: bool,
    ) -> None:
        self._model = model
        self._plan = plan
        self._group = group
        self._engine = engine
        self._clock = clock
        self._itineraries: dict[tuple[torch.dtype, int], Itinerary] = {}
        self._buffers: dict[int, torch.Tensor] = {}
        if not native:
            # DDP looks the second parameter up by its name
            model.register_comm_hook(
                self, lambda adapter, bucket: adapter.send(bucket.index(), bucket.buffer())
            )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        with self._model.no_sync():
            yield

    def after_step(self) -> None:
        """DDP averages in backward."""

    def settle(self) -> None:
        """Nothing is on its way between two steps."""

    def detach(self) -> None:
        raise PlanError("a DDP object keeps its communication hook", "start with another plan")

    def send(self, index: int, gradients: torch.Tensor) -> torch.futures.Future[Any]:
        buffer = self._buffer(index, gradients)
        leg = self._itinerary(gradients).at(self._clock.step)
        first = self._clock.claim(leg.numbers)
        result: torch.futures.Future[Any] = torch.futures.Future()

        def done(finished: Future[None]) -> None:
            error = finished.exception()
            if error is None:
                result.set_result(buffer)
            else:
                result.set_exception(error if isinstance(error, Exception) else RuntimeError(error))

        for stop in leg.stops:
            scaled_into(buffer, gradients, 1 / stop.divisor)
            task = Task(
                part=stop.part,
                vector=as_array(buffer),
                step=self._clock.step,
                round_number=first + stop.round.number,
                bucket=index,
                arithmetic=arithmetic_of(buffer.dtype),
            )
            self._engine.submit(task).add_done_callback(done)
        return result

    def _buffer(self, index: int, like: torch.Tensor) -> torch.Tensor:
        """Kept from step to step; DDP lays its buckets out anew once."""
        kept = self._buffers.get(index)
        if kept is None or (kept.shape, kept.dtype) != (like.shape, like.dtype):
            self._buffers[index] = torch.empty_like(like, device="cpu")
        return self._buffers[index]

    def _itinerary(self, gradients: torch.Tensor) -> Itinerary:
        key = gradients.dtype, gradients.numel()
        if key not in self._itineraries:
            whole = Tensor(name="bucket", shape=(key[1],), dtype=DTYPES[key[0]])
            workload = Workload(name="bucket", tensors=(whole,))
            self._itineraries[key] = Itinerary(self._plan, self._group, workload, self._engine.rank)
        return self._itineraries[key]
