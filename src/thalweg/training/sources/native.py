"""Torch's own path: DistributedDataParallel inside a plain model.

DDP holds the model's parameters and runs in hooks of the model's own forward, as torch's
`replicate` does, so that the script keeps its model.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from threading import Event, Lock, Thread
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from thalweg.errors import Interrupted, PlanError, RunError
from thalweg.plan import Plan, Settings
from thalweg.training.backward_hooks import Hook, after_backward
from thalweg.training.plan_context import PlanContext
from thalweg.training.sources.source import Source

EVICTION_WAIT_SECONDS = 30.0  # for the failed rank to be detected
EVICTION_POLL_SECONDS = 0.02
REDUCTION_POLL_SECONDS = 0.1
Reduced = torch.futures.Future[Any]


class PendingReductions:
    """Torch's own all-reduces under way, which a rendezvous can interrupt: `gives_up` is polled,
    and True aborts them.

    Gloo raises if a peer dies, and waits for its timeout if one hangs. Neither reaches DDP here: an
    all-reduce that fails, or is aborted, looks as if it had completed, and `broken` holds the
    reason. Its buffer is undefined then, and Gloo may still write into it.
    """

    def __init__(self, gives_up: Callable[[], bool]) -> None:
        self.broken = ""  # the reason of the first failure
        self._gives_up = gives_up
        self._under_way: dict[Reduced, torch.Tensor] = {}
        self._lock = Lock()
        self._closed = Event()
        Thread(target=self._watch, name="thalweg-reductions", daemon=True).start()

    def start(self, buffer: torch.Tensor, ranks: int) -> Reduced:
        """Start the mean all-reduce of a buffer, in place."""
        result: Reduced = torch.futures.Future()
        with self._lock:
            self._under_way[result] = buffer
        try:
            buffer.mul_(1 / ranks)
            work = dist.all_reduce(buffer, async_op=True)
            assert work is not None
            work.get_future().add_done_callback(lambda done: self._done(result, done))
        except RuntimeError as error:  # torch's DistError is one
            self._end(result, _reason(error))
        return result

    def close(self) -> None:
        self._closed.set()

    def _done(self, result: Reduced, done: torch.futures.Future[Any]) -> None:
        try:
            done.value()
        except RuntimeError as error:
            self._end(result, _reason(error))
        else:
            self._end(result)

    def _end(self, result: Reduced, reason: str = "") -> None:
        with self._lock:
            buffer = self._under_way.pop(result, None)
            self.broken = self.broken or reason
        if buffer is not None:
            result.set_result(buffer)

    def _watch(self) -> None:
        while not self._closed.wait(REDUCTION_POLL_SECONDS):
            if self._under_way and self._gives_up():
                with self._lock:
                    aborted = list(self._under_way)
                for result in aborted:
                    self._end(result, "aborted by a rendezvous")


def _reason(error: RuntimeError) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class NativeSource(Source):
    """DDP inside a plain model, which keeps its class and its calls. Where members may change, an
    interrupted step calls `on_interrupted`, as with other plans; the members that are left continue
    without torch's process group, which can't lose a rank."""

    keeps_gradients = False  # torch's all-reduce overwrites them with means or partial sums

    def __init__(self, context: PlanContext, model: nn.Module, plan: Plan) -> None:
        membership = context.world.membership
        self._context = context
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._reductions: PendingReductions | None = None
        self._end: Callable[[], object] | None = None
        options: dict[str, Any] = {}
        if plan.settings.bucket != Settings().bucket:
            options["bucket_cap_mb"] = plan.settings.bucket.nbytes / 2**20
        self._went_forward = False
        frozen = [name for name, p in context.parameters.items() if not p.requires_grad]
        if frozen:
            raise PlanError(
                f"{plan} averages what is trained when it begins, and {frozen[0]} is frozen now",
                "unfreeze it before, or use the plan ring",
            )
        parameters = nn.ParameterList(model.parameters())
        self._ddp: Any = DistributedDataParallel(parameters, **options)
        if membership is not None:
            self._reductions = PendingReductions(lambda: membership.rendezvous_pending)
            # DDP requires the name of the second parameter
            self._ddp.register_comm_hook(self, lambda source, bucket: source.send(bucket))
        self._hooks = [
            model.register_forward_pre_hook(Hook(self._before), with_kwargs=True),
            model.register_forward_hook(Hook(self._after)),
        ]

    def join_forward(self) -> None:
        """Join the forward in which this was created, whose hooks torch has listed already."""
        self._before(self._ddp, (), {})

    def _before(self, model: nn.Module, args: Any, kwargs: Any = None) -> Any:
        if self._ddp is None:  # the plan changed in this forward, whose hooks torch had listed
            return None
        self._went_forward = True
        DistributedDataParallel._active_ddp_module = self._ddp
        return self._ddp._pre_forward(*args, **kwargs)

    def _after(self, model: nn.Module, args: Any, output: Any) -> Any:
        DistributedDataParallel._active_ddp_module = None
        return self._ddp._post_forward(output)

    def send(self, bucket: GradBucket) -> torch.futures.Future[Any]:
        assert self._reductions is not None
        if self._end is None or self._end() is None:
            self._end = after_backward(self._finish_after_ddp)
        self._context.bad_gradients.report_from(bucket, self._names)
        return self._reductions.start(bucket.buffer(), dist.get_world_size())

    def _finish_after_ddp(self) -> None:
        """Queue `_finish` behind DDP's own callback, which was queued after this one."""
        after_backward(self._finish)

    def _finish(self) -> None:
        reductions, membership = self._reductions, self._context.world.membership
        if reductions is None or membership is None or not reductions.broken:
            return
        # The backend doesn't tell which connection broke.
        membership.note_broken_connections(*membership.membership_epoch.members)
        deadline = monotonic() + EVICTION_WAIT_SECONDS
        while not membership.rendezvous_pending:
            if monotonic() > deadline:
                raise RunError(
                    f"torch's all-reduce failed, and no rank is missing: {reductions.broken}",
                    "start the run again from its last checkpoint",
                )
            sleep(EVICTION_POLL_SECONDS)
        self._context.on_interrupted(Interrupted(reductions.broken))

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext() if self._ddp is None else self._ddp.no_sync()

    def after_step(self) -> None:
        self.before_step()
        self._went_forward = False

    def before_step(self) -> None:
        """Refuse a step in which the model wasn't called: DDP hasn't averaged its gradients."""
        if not self._went_forward:
            raise RunError(
                "the model wasn't called in this step, and torch's DDP averages only the gradients "
                "of model(...)",
                "call the model itself, or use the plan ring",
            )

    def detach(self) -> None:
        """Remove the hooks; DDP's own go with its reducer."""
        for hook in self._hooks:
            hook.remove()
        if self._reductions is not None:
            self._reductions.close()
        if DistributedDataParallel._active_ddp_module is self._ddp:  # inside a forward
            DistributedDataParallel._active_ddp_module = None
        self._ddp = None
