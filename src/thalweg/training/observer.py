"""The moments of each step, seen from the training thread, under any plan.

    begin ... first gradient ... last gradient ... averages in place ... optimizer ... end

The first gradient is the first hook that is called in a backward. The last is where autograd's
graph is through: a callback that is queued at the first gradient runs before those of DDP and of
our averagers, which wait for the others; one that it queues itself runs after them. So nothing has
to be counted, and no plan has to tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

import torch
from torch import nn

from thalweg.records import Step
from thalweg.runtime.activity import WAITING
from thalweg.runtime.neighbours import own_addresses
from thalweg.runtime.observation import Observation
from thalweg.training.autograd import AtTheEnd
from thalweg.training.averager import trainable
from thalweg.transports.tcp import Connections

FORWARD, BACKWARD, OPTIMIZER, BETWEEN = "forward", "backward", "the optimizer", "a safe point"


class Observer:
    """To be made before a plan runs: its hooks are to be called first."""

    def __init__(
        self, model: nn.Module, observation: Observation, step: int, *, alone: bool
    ) -> None:
        self.observation = observation
        self.blocked = 0.0  # seconds that observing took of the training thread's
        self._connections = None if alone else Connections(own_addresses())
        self._end: AtTheEnd | None = None
        self._step = step
        self._hooks = [_hook(p, self._gradient) for p in trainable(model).values()]
        self._begin(monotonic())

    def _begin(self, now: float) -> None:
        self._began = now
        self._settled = 0.0
        self._first = self._last = self._averaged = self._optimized = 0.0
        self.observation.activity.comes_to(FORWARD, self._step)

    @contextmanager
    def settling(self, what: str = BETWEEN) -> Iterator[None]:
        """Between two steps: what all do together, or wait for."""
        began = monotonic()
        self.observation.activity.comes_to(what, self._step)
        try:
            yield
        finally:
            self._settled += monotonic() - began
            self.observation.activity.comes_to(FORWARD, self._step)

    def _gradient(self, _: torch.Tensor) -> None:
        if self._end is not None and self._end.is_to_come():
            return
        self._end = AtTheEnd(self._is_through)
        if not self._first:
            self._first = monotonic()
            self.observation.activity.comes_to(BACKWARD, self._step)

    def _is_through(self) -> None:
        """Autograd is; what waits for others runs between this and what is queued here."""
        self._last = monotonic()
        self.observation.activity.comes_to(WAITING, self._step)
        AtTheEnd(self._are_averaged)

    def _are_averaged(self) -> None:
        self._averaged = monotonic()
        self.observation.activity.comes_to(OPTIMIZER, self._step)

    def stepped(self) -> None:
        """The optimizer has; parameters may be averaged next."""
        self._optimized = monotonic()
        self.observation.activity.comes_to(WAITING, self._step)

    def ended(self, step: int) -> None:
        """A step that counts is over, and this one begins."""
        now = monotonic()
        if self._first:
            self.observation.hand_in(
                Step(
                    step=step,
                    begin=self._began,
                    settled=self._settled,
                    first=self._first,
                    last=self._last,
                    averaged=self._averaged,
                    optimized=self._optimized,
                    end=now,
                ),
                () if self._connections is None else self._connections.sent(),
            )
        self.begin(step + 1, now)
        self.blocked += monotonic() - now

    def begin(self, step: int, now: float | None = None) -> None:
        """This step, whatever was before: one that was broken off isn't told of."""
        self._step = step
        self._begin(monotonic() if now is None else now)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self.observation.close()


def _hook(parameter: nn.Parameter, ready: Callable[[torch.Tensor], None]) -> Any:
    register: Callable[[Any], Any] = parameter.register_post_accumulate_grad_hook
    return register(ready)
