"""The base class of synchronizers: a run calls these methods, and plans define those they need."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

from thalweg.training.exchanges.rounds import Exchange
from thalweg.training.plan_state import PlanState, restore_state, state_of
from thalweg.transports import Array


class Synchronizer:
    """Synchronises the replicas of a model under a plan; `exchange` transfers its gradients, unless
    it does that itself."""

    exchange = Exchange()

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

    def after_step(self) -> None:
        """Called after each step of the optimizer."""

    def wait_and_apply(self) -> None:
        """Wait for the transfers under way, and apply their results."""

    def detach(self) -> None:
        """Finish, and remove all hooks from the model."""

    def abort(self) -> None:
        """Detach at once; transfers under way are dropped."""
        self.detach()
