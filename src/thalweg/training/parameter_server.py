"""The server of `asp`, without its network: gradients come in, parameters go out.

Every gradient is a step of its own, taken when it comes, on the parameters as they are then. Who
has sent one is answered with the parameters, unless that would let it get more than `staleness`
steps ahead of the slowest (stale synchronous parallel, Ho et al., NIPS 2013): then it waits until
the slowest has come that far. The optimizer is a copy of the script's, whose settings it follows;
of the learning rate each of N workers has an N-th, so that N gradients move the parameters about as
far as one step with their mean does.

Now and then all meet: when everybody has said so, all are given the same parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy

import torch
from torch import nn

from thalweg.training.gradients import FLAGS
from thalweg.training.layout import FlatBucket, Layout
from thalweg.transports import Array


class ParameterServer:
    """`layout` has a buffer for the gradients of these parameters, and their flags."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        layout: Layout,
        workers: Iterable[int],
        staleness: int,
    ) -> None:
        self.optimizer = deepcopy(optimizer)
        self.clocks = dict.fromkeys(workers, 0)  # steps that each has taken; who is gone has none
        self._script = optimizer
        self._layout = layout
        self._staleness = staleness
        copies = {
            id(theirs): own
            for group, copied in zip(
                optimizer.param_groups, self.optimizer.param_groups, strict=True
            )
            for theirs, own in zip(group["params"], copied["params"], strict=True)
        }
        self.parameters = {name: copies[id(p)] for name, p in parameters.items() if id(p) in copies}
        self._flags = list(parameters)
        self._gradients: dict[int, dict[int, Array]] = {}  # by worker and bucket
        self._share = len(self.clocks)
        self._waiting: set[int] = set()  # for an answer
        self.unpack: Callable[[FlatBucket, Array], None] = FlatBucket.take
        self._met: set[int] = set()

    def push(self, worker: int, bucket: int, gradients: Array) -> list[int]:
        """A bucket of a worker's gradients; who is to be answered with the parameters."""
        if worker not in self.clocks:
            return []
        buckets = self._gradients.setdefault(worker, {})
        buckets[bucket] = gradients
        if len(buckets) < len(self._layout.buckets):
            return []
        self._take_step(self._gradients.pop(worker))
        self.clocks[worker] += 1
        self._waiting.add(worker)
        return self._released()

    def meet(self, worker: int) -> list[int]:
        """A worker is at the meeting."""
        if worker in self.clocks:
            self._met.add(worker)
        return self._released()

    def lose(self, worker: int) -> list[int]:
        """It is gone: nobody waits for it."""
        self.clocks.pop(worker, None)
        self._gradients.pop(worker, None)
        self._waiting.discard(worker)
        self._met.discard(worker)
        return self._released()

    @torch.no_grad()
    def answer(self) -> list[Array]:
        """The parameters as they are now, bucket by bucket."""
        arrays = []
        for bucket in self._layout.buckets:
            for name, view in bucket.views.items():
                if name in self.parameters:
                    view.copy_(self.parameters[name])
            arrays.append(bucket.vector.copy())
        return arrays

    def _released(self) -> list[int]:
        """Who need not wait any longer."""
        on_their_way = [clock for worker, clock in self.clocks.items() if worker not in self._met]
        slowest = min(on_their_way, default=None)
        free = {
            worker
            for worker in self._waiting
            if slowest is None or self.clocks[worker] <= slowest + self._staleness
        }
        self._waiting -= free
        if self._met and self._met >= self.clocks.keys():
            free |= self._met
            self._met = set()
        return sorted(free)

    @torch.no_grad()
    def _take_step(self, gradients: Mapping[int, Array]) -> None:
        for bucket in self._layout.buckets:
            self.unpack(bucket, gradients[bucket.index])
        views = {name: view for b in self._layout.buckets for name, view in b.views.items()}
        took_part = dict(zip(self._flags, (views[FLAGS] != 0).tolist(), strict=True))
        for name, parameter in self.parameters.items():
            parameter.grad = views[name].to(parameter.device) if took_part[name] else None
        for theirs, own in zip(self._script.param_groups, self.optimizer.param_groups, strict=True):
            own.update({key: value for key, value in theirs.items() if key != "params"})
            if "lr" in own:
                own["lr"] = own["lr"] / self._share
        self.optimizer.step()
