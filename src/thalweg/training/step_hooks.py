"""The hooks of a run in the model and the optimizer, which make a script's own steps those of all
ranks.

    forward ── the safe point before it, if the script has its own loader
    backward ─ its end: a step whose gradients are not finite is refused, or skipped on all ranks
    step ───── before it: gradients of a step that doesn't count are hidden, so it changes nothing
               after it: the source averages parameters, and the step is counted
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any
from weakref import ref

import torch
from torch import nn

from thalweg.engine.digest import digest
from thalweg.errors import RunError
from thalweg.observe.monitor import REPLICA_CHECK_PERIOD_STEPS
from thalweg.training.backward_hooks import Hook
from thalweg.training.coded_model_check import warn_of_what_differs
from thalweg.training.events import Events
from thalweg.training.finite import ReportedNames, not_finite
from thalweg.training.lifecycle import RankSession, inner
from thalweg.training.optimizer_state import statistics_of
from thalweg.training.recovery import Recovery
from thalweg.training.step_timer import StepTimer

log = logging.getLogger("thalweg")
TRAINABLE_CHECK_PERIOD_STEPS = 8
DIFFERENCE_CHANGE = "difference"  # replicas differ that should be equal: the run ends
SECOND_BACKWARD_ERROR = (
    "a second backward in one step followed one whose gradients were not finite",
    "accumulate inside run.no_sync(), and zero the gradients after each step",
)


class StepHooks:
    """The hooks of one run. `skips`: steps whose gradients are not finite are skipped. `safe_point`
    is the run's, and `on_step` is called when a step counts."""

    def __init__(
        self,
        session: RankSession,
        recovery: Recovery,
        timer: StepTimer,
        events: Events,
        safe_point: Callable[[], None],
        on_step: Callable[[], None],
        *,
        skips: bool,
    ) -> None:
        self.passed_safe_point = False
        self.shares_random = False  # run.shared_random was used for this batch
        self._used_all = True  # in the last step the model was called, and used every parameter
        self._session = session
        self._recovery = recovery
        self._position = session.data_position
        self._timer = timer
        self._events = events
        self._safe_point = safe_point
        self._on_step = on_step
        self._skips_nonfinite = skips
        self._without_gradient: list[tuple[nn.Parameter, torch.Tensor | None]] = []
        self._step_skipped = False  # the step that the optimizer is about to take was skipped
        # Of the last step: a gradient and its version.
        self._stepped_with: tuple[ref[torch.Tensor], int] | None = None
        self._was_called = False  # the model was called in this step
        self._skipped_gradients: list[tuple[torch.Tensor, int]] = []  # with their versions
        self._accumulates = False
        self._open_steps = 0  # nested calls of the optimizer's step that are under way
        self._has_closure = False  # the last optimizer step was called with a closure
        # A copy of model and optimizer before a step with a closure, which changes them before its
        # last backward; only where members may change.
        self._before_closure: tuple[dict[str, Any], dict[str, Any]] | None = None
        self._handles: list[Any] = []
        if not session.has_optimizer:
            hook = Hook(lambda *_: self._refuse_forward_without_optimizer())
            self._handles = [session.model.register_forward_pre_hook(hook)]

    def install(self) -> None:
        self.remove()
        optimizer = self._session.optimizer
        self._handles = [
            optimizer.register_step_pre_hook(Hook(lambda _, *given: self._before_step(*given))),
            optimizer.register_step_post_hook(Hook(lambda *_: self._after_step())),
            self._session.model.register_forward_pre_hook(Hook(lambda *_: self._before_forward())),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Inside, gradients are accumulated, and not checked."""
        was, self._accumulates = self._accumulates, True
        try:
            yield
        finally:
            self._accumulates = was

    def reach_safe_point(self) -> bool:
        """True if this rank is at a safe point that it hasn't passed."""
        if not self._has_closure or self._position.rank_loader is not None:
            # Only a closure calls forward inside a step, so an earlier step has failed.
            self._open_steps = 0
        return not self.passed_safe_point

    def _before_step(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Hide the gradients of a step that doesn't count. Optimizers skip parameters without a
        gradient, and their state, so such a step changes nothing."""
        self._open_steps += 1
        if self._open_steps > 1:
            return  # torch calls hooks again where a subclass's step calls its base's
        self._has_closure = any(map(callable, (*args[1:], *kwargs.values())))
        if self._has_closure and self._recovery.membership is not None:
            model, optimizer = inner(self._session.model), self._session.optimizer
            self._before_closure = deepcopy((model.state_dict(), optimizer.state_dict()))
        if self._session.applies and not self._step_skipped and not self._has_closure:
            self._refuse_gradients_of_no_backward()
        if not self._session.applies or (self._step_skipped and not self._without_gradient):
            self._hide_gradients()
        elif not self._has_closure:
            self._session.attached.before_step()

    def _refuse_gradients_of_no_backward(self) -> None:
        """Refuse gradients that no hook has seen, such as those of `torch.autograd.grad`. The
        gradients of the last step may be used again."""
        computed, self._timer.computed = self._timer.computed, False
        first = next((p.grad for p in self._session.trained.values() if p.grad is not None), None)
        if first is None:
            return
        before, self._stepped_with = self._stepped_with, (ref(first), first._version)
        again = before is not None and before[0]() is first and before[1] == first._version
        if computed or again:
            return
        if self._session.replicas_differ:
            self.check_gradients()
        else:
            self._fail(
                RunError(
                    "the optimizer steps with gradients that no backward has computed, so they "
                    f"are not averaged (rank {self._session.rank}, step {self._session.step})",
                    "call backward on the loss, instead of writing to .grad",
                )
            )

    def _fail(self, error: RunError) -> None:
        """Raise the error, and publish it to the ranks that wait for this one."""
        with self._session.shutdown.publishing_errors():
            raise error

    def _hide_gradients(self) -> None:
        groups = self._session.optimizer.param_groups
        self._without_gradient = [(p, p.grad) for group in groups for p in group["params"]]
        for parameter, _ in self._without_gradient:
            parameter.grad = None

    def check_gradients(self) -> None:
        """Check the gradients at the end of backward. A step whose gradients are not finite is
        refused, or counts as over: a GradScaler won't call the optimizer then, and if the script
        does, the call changes nothing."""
        session, was_over, self._step_skipped = self._session, self._step_skipped, False
        if (
            self._open_steps and not session.applies
        ):  # interrupted in a closure, after the step began
            self._hide_gradients()
        syncs = getattr(session.model, "require_backward_grad_sync", True)  # False in DDP's no_sync
        if self._accumulates or session.closed or not session.applies or not syncs:
            return
        source, own = session.attached, session.replicas_differ
        if was_over and self._open_steps:  # another evaluation of a closure whose step was skipped
            self._hide_gradients()
            self._step_skipped = True
            return
        if (
            was_over
            and own
            and self._position.rank_loader is not None
            and not self.passed_safe_point
        ):
            self._fail(RunError(*SECOND_BACKWARD_ERROR))
        names = source.spoilt(session.gradients)
        if names is None:
            if source.bad:  # a code has decoded the step from other ranks' answers
                text = f"not used: gradients of {', '.join(source.bad)} are not finite"
                self._events.add("nonfinite", session.step, text)
                log.warning("rank %d, step %d: %s", session.rank, session.step, text)
            return
        bad_gradients = session.context.bad_gradients
        are_own = own or source.sends_own_gradients  # of this rank's backward
        reported: ReportedNames = {session.rank: names} if names and are_own else {}
        if not own and not (
            reported and self._skips_nonfinite and session.rank != session.world.members[0]
        ):
            reported = bad_gradients.reports() or reported
        error = bad_gradients.error(reported, names)
        if not self._skips_nonfinite:
            self._fail(error)
        if spoilt := not_finite(statistics_of(session.model)):
            self._fail(
                RunError(
                    f"{spoilt[0]} has inf or nan on rank {session.rank} at step {session.step}, "
                    "and skipping the step doesn't remove it",
                    "check the data of that rank: the forward pass itself was not finite",
                )
            )
        if own:
            self._refuse_sums_of_skipped_gradients([session.gradients[name] for name in names])
        text = f"skipped: {error.problem}"
        self._events.add("nonfinite", session.step, text, error.problem)
        if own or session.rank == session.world.members[0]:
            log.warning("%s", text)
        if self._open_steps:  # in a closure
            self._hide_gradients()
        self._end_step()
        self._step_skipped = True

    def _refuse_sums_of_skipped_gradients(self, bad: Sequence[torch.Tensor]) -> None:
        """Refuse to accumulate into gradients of a skipped step: each backward would count as a
        step here, and the other ranks have counted one. A gradient that was zeroed in between is
        another tensor, or was written to twice."""
        for gradient, version in self._skipped_gradients:
            if gradient._version <= version + 1 and any(gradient is other for other in bad):
                self._fail(RunError(*SECOND_BACKWARD_ERROR))
        self._skipped_gradients = [(gradient, gradient._version) for gradient in bad]

    def _after_step(self) -> None:
        self._open_steps -= 1
        if self._open_steps:
            return
        for parameter, gradient in self._without_gradient:
            parameter.grad = gradient
        self._without_gradient = []
        before, self._before_closure = self._before_closure, None
        if before is not None and self._recovery.is_interrupted and not self._session.applies:
            inner(self._session.model).load_state_dict(before[0])
            self._session.optimizer.load_state_dict(before[1])
        over, self._step_skipped = self._step_skipped, False
        if not over:
            self._end_step()

    def _end_step(self) -> None:
        session, timer = self._session, self._timer
        timer.stepped()
        if session.applies:
            session.attached.after_step()
        self.passed_safe_point = False
        if not session.applies:
            timer.begin(session.step)
            return
        timer.ended(session.step)
        self._on_step()
        self._was_called = False
        if session.warns:
            warn_of_what_differs(session.model, random=not self.shares_random)
            session.warns = False
        session.clock.tick()
        self._recovery.stepped()
        self._position.stepped()
        if not self._recovery.is_interrupted:
            self._compare_replicas()

    def note_use(self) -> None:
        """Note, when a step counts, whether DDP could have run it."""
        used = all(p.grad is not None for p in self._session.trained.values())
        self._used_all = used and self._was_called

    @property
    def suits_ddp(self) -> bool:
        """True if DDP could have run the last step, and no parameter is frozen now."""
        return self._used_all and all(p.requires_grad for p in self._session.trained.values())

    def _compare_replicas(self) -> None:
        """Submit a digest of the parameters at intervals; if digests differ, all ranks end at the
        same safe point."""
        session, monitor = self._session, self._timer.monitor
        if (
            session.group.size > 1
            and not session.keeps_own
            and not session.step % REPLICA_CHECK_PERIOD_STEPS
        ):
            monitor.submit_digest(session.step, digest(session.trained.values()))
        if monitor.difference:
            session.agreement.propose(DIFFERENCE_CHANGE, monitor.difference)
            monitor.difference = ""

    def _before_forward(self) -> None:
        """Run the safe point before a training forward, if the script has its own loader."""
        session = self._session
        steps = session.model.training and torch.is_grad_enabled() and not session.in_consensus
        self._was_called = self._was_called or steps
        if steps and self._position.rank_loader is None:
            before = session.source
            self._safe_point()
            if session.source is not None and session.source is not before:
                session.source.join_forward()

    def refuse_new_parameters(self) -> None:
        """Look at intervals for parameters that no plan averages: replicas would differ."""
        if self._session.step % TRAINABLE_CHECK_PERIOD_STEPS:
            return
        for name, parameter in self._session.model.named_parameters():
            if parameter.requires_grad and id(parameter) not in self._session.averaged:
                raise RunError(
                    f"parameter {name} was added or unfrozen after attach(), so it isn't averaged",
                    "call attach() when the model is complete and trainable; freeze parts after it",
                )

    def _refuse_forward_without_optimizer(self) -> None:
        if self._session.model.training and torch.is_grad_enabled():
            self._session.require_optimizer()
