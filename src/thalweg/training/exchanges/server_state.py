"""The server of `asp` without its network: messages come in, messages go out.

Every gradient is a step of its own, taken when it arrives, on the parameters at that time. Its
sender is answered with the parameters, unless that would let it get more than `staleness` steps
ahead of the slowest (stale synchronous parallel, Ho et al., NIPS 2013): then it waits until the
slowest is near enough. The optimizer is a copy of the script's, whose settings it follows; of the
learning rate each of N workers has an N-th, so that N gradients move the parameters about as far as
one step with their mean does.

    REQUEST  "send the parameters; I have taken this many steps"      answered at once
    ANSWER   a bucket of a gradient                                   answered when it is due
    BARRIER  "send them when all others are here"                     all get the same
    FOLLOW   "I still wait for the answer to this request"            the answer, or REQUEST_PARTIAL
    LEAVE    "I have ended"                                           no answer

Requests are numbered, and so are gradients, whose numbers outlive the server: `applied` has the
last number of each worker whose gradient is in the parameters. So a message that arrives twice, or
a gradient that is sent again to another server, changes nothing. No rank waits for a removed
worker; its next request registers it again, beside the slowest, with the number of steps to skip.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import nn

from thalweg.training.buckets import Layout
from thalweg.training.sources.gradients import PARTICIPATION_FLAGS
from thalweg.transports import Array
from thalweg.transports.best_effort import BestEffortMessage, MessageKind

UNKNOWN_CLOCK = -(1 << 62)  # of a worker that has yet to send its number of steps


class ParameterServer:
    """The parameters, the optimizer and the pending requests. `layout` has a buffer for the
    gradients of these parameters, and their flags. `clocks` are the steps that each worker has
    taken."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        layout: Layout,
        clocks: Mapping[int, int],
        staleness: int,
        applied: Mapping[int, int],
    ) -> None:
        self.optimizer = deepcopy(optimizer)
        self.clocks = dict(clocks)
        self.applied = dict(applied)
        self.optimizer_state: dict[str, Any] = {}  # at the last barrier
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
        self._workers = len(self.clocks)
        self._removed: dict[int, int] = {}  # clocks of removed workers
        self._to_skip: dict[int, int] = {}  # steps that a returning worker has to skip
        self._partial: dict[int, dict[int, Array]] = {}  # buckets of incomplete gradients
        self._newest: dict[int, int] = {}  # the last request of each worker,
        self._waiting: dict[int, int] = {}  # ... of workers that wait for the slowest,
        self._at_barrier: dict[int, int] = {}  # ... of workers at a barrier,
        self._answered: dict[int, int] = {}  # ... and the last that was answered
        self._answers = 0

    def arrive(self, message: BestEffortMessage) -> list[BestEffortMessage]:
        """Process a message; returns the messages to send."""
        worker, number = message.peer, message.step
        if message.kind is MessageKind.LEAVE:
            return self.remove_worker(worker)
        if number < self._newest.get(worker, 0):
            return []
        if number == self._answered.get(worker):
            return self._answer({worker: number}) if message.kind is MessageKind.FOLLOW else []
        self._register(worker, number)
        if number not in (self._waiting.get(worker), self._at_barrier.get(worker)):
            if message.kind is MessageKind.FOLLOW:
                return [BestEffortMessage(worker, MessageKind.REQUEST_PARTIAL, number)]
            if message.kind is MessageKind.REQUEST:
                self.clocks[worker] = max(self.clocks[worker], message.covered)
                self._to_skip[worker] = self.clocks[worker] - message.covered
                return [*self._answer({worker: number}), *self._released()]
            if message.kind is MessageKind.BARRIER:
                self._at_barrier[worker] = number
            elif not self._push(message):
                return []
        return self._released()

    def remove_worker(self, worker: int) -> list[BestEffortMessage]:
        """Remove a failed worker, for which no other waits any more; returns the messages to
        send."""
        if worker not in self.clocks:
            return []
        self._removed[worker] = self.clocks.pop(worker)
        self._at_barrier.pop(worker, None)
        return self._released()

    def _register(self, worker: int, number: int) -> None:
        """Register the worker of a new request, also one that was removed before."""
        if number > self._newest.get(worker, 0):
            self._newest[worker] = number
            self._partial[worker] = {}
            self._to_skip[worker] = 0
        if worker in self._removed:
            was = self._removed.pop(worker)
            self.clocks[worker] = max(was, min(self.clocks.values(), default=was))
            self._to_skip[worker] += self.clocks[worker] - was

    def _push(self, message: BestEffortMessage) -> bool:
        """Store a bucket of a gradient; True if the gradient is complete, and so is applied."""
        worker, gradient, buckets = message.peer, message.covered, self._partial[message.peer]
        assert message.array is not None
        buckets[message.piece] = message.array
        if len(buckets) < len(self._layout.buckets):
            return False
        self._partial[worker] = {}
        if gradient > self.applied.get(worker, 0):
            self._take_step(buckets)
            self.applied[worker] = gradient
        self.clocks[worker] += 1
        self._waiting[worker] = message.step
        return True

    def _released(self) -> list[BestEffortMessage]:
        """The answers to workers that need not wait any longer. A barrier is that of workers with
        the same number of steps; a worker with more has missed it, and isn't waited for."""
        clocks, barrier = self.clocks, self._at_barrier
        slowest = min(
            (clock for worker, clock in clocks.items() if worker not in barrier), default=0
        )
        free = {
            worker: number
            for worker, number in self._waiting.items()
            if worker in clocks and clocks[worker] <= slowest + self._staleness
        }
        over = {
            worker: number
            for worker, number in barrier.items()
            if all(
                clock > clocks[worker] or (other in barrier and clock == clocks[worker])
                for other, clock in clocks.items()
            )
        }
        if over:
            self.optimizer_state = deepcopy(self.optimizer.state_dict()["state"])
        for worker in free:
            del self._waiting[worker]
        for worker in over:
            del barrier[worker]
        return self._answer({**free, **over})

    def _answer(self, requests: Mapping[int, int]) -> list[BestEffortMessage]:
        """The current parameters, bucket by bucket, for these workers. A header comes first: the
        number of steps to skip, and pairs of workers and numbers. All messages have the number of
        this answer."""
        if not requests:
            return []
        self._answers += 1
        arrays = self._arrays()
        applied = [number for pair in sorted(self.applied.items()) for number in pair]
        messages = []
        for worker, number in sorted(requests.items()):
            self._answered[worker] = number
            header = np.array([self._to_skip[worker], *applied], np.int64)
            for piece, array in enumerate([header, *arrays]):
                messages.append(
                    BestEffortMessage(
                        worker, MessageKind.RESULT, number, piece, self._answers, array
                    )
                )
        return messages

    @torch.no_grad()
    def _arrays(self) -> list[Array]:
        arrays = []
        for bucket in self._layout.buckets:
            for name, view in bucket.views.items():
                if name in self.parameters:
                    view.copy_(self.parameters[name])
            arrays.append(bucket.vector.copy())
        return arrays

    @torch.no_grad()
    def _take_step(self, gradients: Mapping[int, Array]) -> None:
        for bucket in self._layout.buckets:
            bucket.load(gradients[bucket.index])
        views = {name: view for b in self._layout.buckets for name, view in b.views.items()}
        *flags, is_bad = (views[PARTICIPATION_FLAGS] != 0).tolist()
        if is_bad:  # the worker's gradients are not finite
            return
        took_part = dict(zip(self._flags, flags, strict=True))
        for name, parameter in self.parameters.items():
            parameter.grad = views[name].to(parameter.device) if took_part[name] else None
        for theirs, own in zip(self._script.param_groups, self.optimizer.param_groups, strict=True):
            own.update({key: value for key, value in theirs.items() if key != "params"})
            if "lr" in own:
                own["lr"] = own["lr"] / self._workers
        self.optimizer.step()
