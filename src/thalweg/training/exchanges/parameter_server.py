"""The parameter server of `asp` without its network: messages come in, messages go out.

Every gradient is a step of its own, taken when it arrives, on the parameters at that time. Its
sender is answered with the parameters, unless that would let it get more than `staleness` steps
ahead of the slowest (stale synchronous parallel, Ho et al., NIPS 2013): then it waits until the
slowest is near enough. The optimizer is a copy of the script's, whose settings it follows, except
that its learning rate is divided by the number N of workers: N gradients then move the parameters
about as far as one step with their mean does.

    REQUEST  "send the parameters; I have taken this many steps"      answered at once
    ANSWER   a bucket of a gradient                                   answered when it is due
    BARRIER  "send them when all others are at this barrier too"      all get the same
    FOLLOW   "I still wait for the answer to this request"            the answer, or REQUEST_PARTIAL
    LEAVE    "I have ended"                                           no answer

The fields of these messages, and of RESULT, the server's answer:

              step                     piece                        covered
    REQUEST   number of the request    -                            steps the worker has taken
    ANSWER    number of the request    index of the bucket          number of the gradient
    BARRIER   number of the request    -                            -
    FOLLOW    number of the request    -                            -
    RESULT    number of the request    0: header, n + 1: bucket n   number of the answer

Requests are numbered by worker, and so are gradients, whose numbers outlive the server: `applied`
has the number of each worker's last gradient that is in the parameters. So a message that arrives
twice, or a gradient that is sent again to another server, changes nothing. No rank waits for a
removed worker; its next request registers it again, at the clock of the slowest, and the answer
tells it how many steps to skip.
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

UNKNOWN_CLOCK = -(1 << 62)  # the clock of a worker that has yet to send its number of steps


class ParameterServer:
    """The parameters, the optimizer and the pending requests. `layout` has a buffer for the
    gradients of these parameters, and for their participation flags. The clock of a worker is the
    number of steps that it has taken."""

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
        self.optimizer_state: dict[str, Any] = {}  # as of the last barrier
        self._script_optimizer = optimizer
        self._layout = layout
        self._staleness = staleness
        copies = {
            id(script_parameter): copy
            for group, copied in zip(
                optimizer.param_groups, self.optimizer.param_groups, strict=True
            )
            for script_parameter, copy in zip(group["params"], copied["params"], strict=True)
        }
        self.parameters = {name: copies[id(p)] for name, p in parameters.items() if id(p) in copies}
        self._flag_names = list(parameters)
        self._workers = len(self.clocks)
        self._removed: dict[int, int] = {}  # clocks of removed workers
        self._to_skip: dict[int, int] = {}  # steps that a returning worker has to skip
        self._partial: dict[int, dict[int, Array]] = {}  # buckets of incomplete gradients
        # Numbers of requests, by worker:
        self._newest: dict[int, int] = {}  # the last one that arrived
        self._waiting: dict[int, int] = {}  # the pending one of a worker that waits for the slowest
        self._at_barrier: dict[int, int] = {}  # the pending one of a worker at a barrier
        self._answered: dict[int, int] = {}  # the last one that was answered
        self._answer_count = 0

    def arrive(self, message: BestEffortMessage) -> list[BestEffortMessage]:
        """Process a message; returns the messages to send. A message of an earlier request than the
        worker's last is dropped."""
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
            own_clock = self._removed.pop(worker)
            self.clocks[worker] = max(own_clock, min(self.clocks.values(), default=own_clock))
            self._to_skip[worker] += self.clocks[worker] - own_clock

    def _push(self, message: BestEffortMessage) -> bool:
        """Store a bucket of a gradient. True if it completes the gradient, which is then applied
        unless it was before, and whose answer is pending."""
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
        """Answer the workers that need not wait any longer; returns the messages to send. A barrier
        is one of workers with equal clocks: a worker with a later clock has missed it, and those at
        the barrier don't wait for it."""
        clocks, barrier = self.clocks, self._at_barrier
        slowest = min(
            (clock for worker, clock in clocks.items() if worker not in barrier), default=0
        )
        near_slowest = {
            worker: number
            for worker, number in self._waiting.items()
            if worker in clocks and clocks[worker] <= slowest + self._staleness
        }
        past_barrier = {
            worker: number
            for worker, number in barrier.items()
            if all(
                clock > clocks[worker] or (other in barrier and clock == clocks[worker])
                for other, clock in clocks.items()
            )
        }
        if past_barrier:
            self.optimizer_state = deepcopy(self.optimizer.state_dict()["state"])
        for worker in near_slowest:
            del self._waiting[worker]
        for worker in past_barrier:
            del barrier[worker]
        return self._answer({**near_slowest, **past_barrier})

    def _answer(self, requests: Mapping[int, int]) -> list[BestEffortMessage]:
        """The messages with the current parameters for these requests. Each worker gets a header,
        which has the number of steps to skip and then `applied` as pairs of worker and number, and
        the buckets."""
        if not requests:
            return []
        self._answer_count += 1
        arrays = self._parameter_arrays()
        applied = [number for pair in sorted(self.applied.items()) for number in pair]
        headers = {w: np.array([self._to_skip[w], *applied], np.int64) for w in requests}
        self._answered |= requests
        return [
            BestEffortMessage(worker, MessageKind.RESULT, number, piece, self._answer_count, array)
            for worker, number in sorted(requests.items())
            for piece, array in enumerate([headers[worker], *arrays])
        ]

    @torch.no_grad()
    def _parameter_arrays(self) -> list[Array]:
        arrays = []
        for bucket in self._layout.buckets:
            for name, view in bucket.views.items():
                if name in self.parameters:
                    view.copy_(self.parameters[name])
            arrays.append(bucket.vector.copy())
        return arrays

    @torch.no_grad()
    def _take_step(self, gradients: Mapping[int, Array]) -> None:
        """Take an optimizer step with these gradients by bucket, unless the last flag says that
        they are not finite."""
        for bucket in self._layout.buckets:
            bucket.load(gradients[bucket.index])
        views = {name: view for b in self._layout.buckets for name, view in b.views.items()}
        *flags, is_bad = (views[PARTICIPATION_FLAGS] != 0).tolist()
        if is_bad:
            return
        took_part = dict(zip(self._flag_names, flags, strict=True))
        for name, parameter in self.parameters.items():
            parameter.grad = views[name].to(parameter.device) if took_part[name] else None
        for settings, own in zip(
            self._script_optimizer.param_groups, self.optimizer.param_groups, strict=True
        ):
            own.update({key: value for key, value in settings.items() if key != "params"})
            if "lr" in own:
                own["lr"] = own["lr"] / self._workers
        self.optimizer.step()
