"""The interface of sources: where the tensors of buckets come from, and where results go.

A run calls these methods, and sources define those that they need. The exchange (`exchanges/`)
transfers the buckets; a source that has its own way to do so keeps the base class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from thalweg.members.agreement import Change
from thalweg.training.contention_monitor import Adjustment
from thalweg.training.exchanges.exchange import Exchange
from thalweg.training.finite import not_finite
from thalweg.training.plan_state import PlanState, restore_state, state_of
from thalweg.transports import Array


class Source:
    """Synchronises the replicas of a model under a plan."""

    exchange = Exchange()
    keeps_gradients = True  # unchanged in a step that is interrupted
    sends_own_gradients = False  # of this rank's backward: errors can name the rank
    bad: Sequence[str] = ()  # parameters whose gradients on this rank were not finite

    @property
    def kept(self) -> PlanState:
        """The state that the plan keeps from step to step, as views."""
        return state_of(self.exchange.compressed)

    @property
    def kept_before(self) -> PlanState:
        """The kept state before the current step, for the case that it is interrupted."""
        return self.exchange.kept_before

    def load_kept(self, state: PlanState) -> Mapping[str, Array]:
        """Continue with the state that another plan kept; returns the residuals that can't be held
        here."""
        return restore_state(state, self.exchange.compressed)

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, backward accumulates gradients without averaging them."""
        return nullcontext()

    def begin_backward(self) -> None:
        """The first gradient of a backward is ready; none was, since the last backward ended."""

    def gradient_ready(self, name: str) -> None:
        """The gradient of this parameter is ready."""

    def join_forward(self) -> None:
        """Take part in the forward that is running, in which this source was made."""

    def spoilt(self, gradients: Mapping[str, torch.Tensor]) -> Sequence[str] | None:
        """The parameters, if known, whose gradients make the step unusable; None if it is usable.
        `gradients` are those that the optimizer finds."""
        return not_finite(gradients) or None

    def before_step(self) -> None:
        """The optimizer is about to step."""

    def after_step(self) -> None:
        """Called after each step of the optimizer."""

    def adopt(self, change: Change) -> Adjustment | None:
        """Follow an agreed change that a source proposed; returns a change of groups."""
        return None

    def wait_and_apply(self) -> None:
        """Wait for the transfers under way, and apply their results."""

    def detach(self) -> None:
        """Finish, and remove all hooks from the model."""

    def abort(self) -> None:
        """Detach at once; transfers under way are dropped."""
        self.detach()
