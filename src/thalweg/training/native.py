"""Torch's own path: DistributedDataParallel, either round a plain model or as it came.

For a plain model, DDP holds its parameters and is run from hooks of the model's own forward, as
torch's `replicate` does, so that the script keeps its model. For a DDP object the plan's rounds run
in its communication hook; with the plan `ddp` it is left as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thalweg.errors import RunError
from thalweg.facts import Tensor, Workload
from thalweg.plan import Plan, Settings
from thalweg.runtime import Engine, arithmetic_of
from thalweg.schedules import Group
from thalweg.training.autograd import AtTheEnd
from thalweg.training.hook import Hook
from thalweg.training.itinerary import Clock, Itinerary
from thalweg.training.layout import DTYPES, FlatBucket, as_array, scaled_into

WHOLE = "bucket"  # DDP's are one tensor to us


class NativeAverager:
    """DDP in place, round a plain model, which keeps its class and its calls."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        options: dict[str, Any] = {}
        if plan.settings.bucket != Settings().bucket:
            options["bucket_cap_mb"] = plan.settings.bucket.nbytes / 2**20
        self._went_forward = False
        parameters = nn.ParameterList(model.parameters())
        self._ddp: Any = DistributedDataParallel(parameters, **options)
        self._hooks = [
            model.register_forward_pre_hook(Hook(self._before), with_kwargs=True),
            model.register_forward_hook(Hook(self._after)),
        ]

    def _before(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        self._went_forward = True
        DistributedDataParallel._active_ddp_module = self._ddp
        return self._ddp._pre_forward(*args, **kwargs)

    def _after(self, model: nn.Module, args: Any, output: Any) -> Any:
        DistributedDataParallel._active_ddp_module = None
        return self._ddp._post_forward(output)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        with self._ddp.no_sync():
            yield

    def after_step(self) -> None:
        """DDP has averaged in backward, if the model itself was called."""
        if not self._went_forward:
            raise RunError(
                "the model wasn't called in this step, and torch's DDP averages only what comes "
                "out of model(...)",
                "call the model itself, or use the plan ring",
            )
        self._went_forward = False

    def settle(self) -> None:
        """Nothing is on its way between two steps."""

    def detach(self) -> None:
        """DDP's own hooks go with its reducer."""
        for hook in self._hooks:
            hook.remove()
        self._ddp = None


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
        self._buckets: dict[int, FlatBucket] = {}
        self._sent: list[Future[None]] = []
        self._end: AtTheEnd | None = None
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
        """DDP keeps its communication hook."""

    def send(self, index: int, gradients: torch.Tensor) -> torch.futures.Future[Any]:
        if self._end is None or not self._end.is_to_come():
            self._finish()  # one that failed may have buckets on their way
            self._end = AtTheEnd(self._finish)
        bucket = self._bucket(index, gradients)
        buffer = bucket.views[WHOLE]
        leg = self._itinerary(gradients).at(self._clock.step)
        first = self._clock.claim(leg.numbers)
        result: torch.futures.Future[Any] = torch.futures.Future()
        for stop in leg.stops:
            scaled_into(buffer, gradients, 1 / stop.divisor)
            sent = self._engine.submit(stop.task(bucket, self._clock.step, first))
            sent.add_done_callback(lambda _: result.set_result(buffer))
            self._sent.append(sent)
        return result

    def _finish(self) -> None:
        """Raise what went wrong, before DDP takes the results: it would put it in its own words."""
        sent, self._sent = self._sent, []
        self._engine.wait(sent)

    def _bucket(self, index: int, like: torch.Tensor) -> FlatBucket:
        """Kept from step to step; DDP lays its buckets out anew once."""
        kept = self._buckets.get(index)
        if kept is None or not _alike(kept.views[WHOLE], like):
            buffer = torch.empty_like(like, device="cpu")
            self._buckets[index] = FlatBucket(
                index=index,
                flat=buffer.reshape(-1),
                views={WHOLE: buffer},
                vector=as_array(buffer),
                arithmetic=arithmetic_of(buffer.dtype),
            )
        return self._buckets[index]

    def _itinerary(self, gradients: torch.Tensor) -> Itinerary:
        key = gradients.dtype, gradients.numel()
        if key not in self._itineraries:
            whole = Tensor(name=WHOLE, shape=(key[1],), dtype=DTYPES[key[0]])
            workload = Workload(name="bucket", tensors=(whole,))
            self._itineraries[key] = Itinerary(self._plan, self._group, workload, self._engine.rank)
        return self._itineraries[key]


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype)
