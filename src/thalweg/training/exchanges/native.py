"""Torch's own path: DistributedDataParallel, either inside a plain model or as the script's object.

For a plain model, DDP holds its parameters and runs in hooks of the model's own forward, as torch's
`replicate` does, so that the script keeps its model. For a DDP object the plan's rounds run in its
communication hook; with the plan `ddp` it is left unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from threading import Event, Lock, Thread
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from thalweg.compress import Kept
from thalweg.engine.engine import ChainTasks
from thalweg.errors import Interrupted, NotFinite, RunError
from thalweg.facts import Size, Tensor
from thalweg.plan import Plan, Settings
from thalweg.schedules import Group
from thalweg.training.backward_hooks import AfterBackward, Hook
from thalweg.training.buckets import DTYPES, Layout, scaled_into
from thalweg.training.exchanges.compressed import Compression
from thalweg.training.exchanges.rounds import BucketRounds
from thalweg.training.finite import is_finite, not_finite
from thalweg.training.plan_context import PlanContext
from thalweg.training.plan_state import PlanState, residuals_in, restore_state, state_of, summands
from thalweg.training.sources.source import Source
from thalweg.transports import Array

EVICTION_WAIT_SECONDS = 30.0  # for the failed rank to be detected
EVICTION_POLL_SECONDS = 0.02
REDUCTION_POLL_SECONDS = 0.1
Reduced = torch.futures.Future[Any]


def _bad_in(bucket: GradBucket, names: Mapping[int, str], context: PlanContext) -> list[str]:
    """The parameters whose gradients are not finite; they are reported before anything is sent."""
    if is_finite(bucket.buffer()):
        return []
    pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
    bad = not_finite({names[id(parameter)]: gradient for parameter, gradient in pairs})
    if bad:
        context.bad_gradients.report(bad)
    return bad


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

    def __init__(self, context: PlanContext, model: nn.Module, plan: Plan) -> None:
        membership = context.world.membership
        self._context = context
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._reductions: PendingReductions | None = None
        self._end: AfterBackward | None = None
        options: dict[str, Any] = {}
        if plan.settings.bucket != Settings().bucket:
            options["bucket_cap_mb"] = plan.settings.bucket.nbytes / 2**20
        self._went_forward = False
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
        if self._end is None or not self._end.is_to_come():
            self._end = AfterBackward(self._finish_after_ddp)
        _bad_in(bucket, self._names, self._context)
        return self._reductions.start(bucket.buffer(), dist.get_world_size())

    def _finish_after_ddp(self) -> None:
        """Queue `_finish` behind DDP's own callback, which was queued after this one."""
        AfterBackward(self._finish)

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

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        with nullcontext() if self._ddp is None else self._ddp.no_sync():
            yield

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


class DdpSource(Source):
    """A DDP object whose buckets are synchronised by our rounds; by torch's if the plan is
    `ddp`."""

    def __init__(
        self, context: PlanContext, model: DistributedDataParallel, plan: Plan, *, native: bool
    ) -> None:
        self._context = context
        self._model = model
        self._plan = plan
        self._engine = context.engine
        self._clock = context.clock
        self._compression = Compression.of(plan)
        self._names = {id(p): name for name, p in model.module.named_parameters()}
        self._exchanges: dict[int, _BucketExchange] = {}
        self._kept: dict[str, Kept] = {}  # of buckets that DDP has replaced
        self._sent: list[Future[None]] = []
        self._end: AfterBackward | None = None
        if not native:
            # DDP requires the name of the second parameter
            model.register_comm_hook(self, lambda adapter, bucket: adapter.send(bucket))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        with self._model.no_sync():
            yield

    @property
    def kept(self) -> PlanState:
        exchanges = self._exchanges.values()
        state = state_of(b for exchange in exchanges for b in exchange.rounds.compressed.values())
        for kind, kept in self._kept.items():
            arrays = state[kind].arrays if kind in state else {}
            state[kind] = replace(kept, arrays={**kept.arrays, **arrays})
        return state

    def load_kept(self, state: PlanState) -> Mapping[str, Array]:
        """Keep the state for the buckets that DDP is about to make."""
        self._kept = {k: replace(v, arrays=dict(v.arrays)) for k, v in summands(state).items()}
        residuals = residuals_in(self._kept)
        left = {name: array for name, array in residuals.items() if not self._keeps(name)}
        self._drop(left)
        return left

    def _drop(self, names: Iterable[str]) -> None:
        for name in names:
            for kept in self._kept.values():
                kept.arrays.pop(name, None)

    def _keeps(self, name: str) -> bool:
        """True if this parameter has a residual."""
        if not self._compression.keeps:
            return False
        parameter = self._model.module.get_parameter(name)
        fact = Tensor(name=name, shape=tuple(parameter.shape), dtype=DTYPES[parameter.dtype])
        return bool(self._compression.arrange([fact]).compressed)

    @torch.no_grad()
    def send(self, bucket: GradBucket) -> torch.futures.Future[Any]:
        if self._end is None or not self._end.is_to_come():
            self._finish()  # a failed backward may have left transfers
            self._end = AfterBackward(self._finish)
        exchange = self._exchange_of(bucket)
        step = self._clock.step
        rank_step = exchange.rounds.steps.begin(self._clock)
        bad = _bad_in(bucket, self._names, self._context)
        for view, gradient in zip(exchange.views, bucket.gradients(), strict=True):
            scaled_into(view, gradient, 1 / self._context.group.size)
        [chain] = rank_step.chains
        work = exchange.rounds.work(rank_step, chain)
        if bad and exchange.rounds.compressed:  # a compressor would keep them in its state
            work = _refused(NotFinite(bad, f" on rank {self._engine.rank} at step {step}"))
        sent = self._engine.submit(work)
        result: torch.futures.Future[Any] = torch.futures.Future()
        sent.add_done_callback(lambda _: result.set_result(exchange.gathered()))
        self._sent.append(sent)
        return result

    def _finish(self) -> None:
        """Raise errors before DDP gets the results, as it would reword them."""
        sent, self._sent = self._sent, []
        self._engine.wait(sent)

    def _exchange_of(self, bucket: GradBucket) -> _BucketExchange:
        """The exchange of a bucket, kept from step to step. DDP rebuilds its buckets once, and then
        each parameter's residual moves with it."""
        names = [self._names[id(parameter)] for parameter in bucket.parameters()]
        kept = self._exchanges.get(bucket.index())
        if kept is not None and kept.names == names:
            return kept
        self._leave([index for index in self._exchanges if index >= bucket.index()])
        gradients = dict(zip(names, bucket.gradients(), strict=True))
        exchange = _BucketExchange(
            gradients, bucket.buffer(), self._plan, self._context.group, self._engine.rank
        )
        self._exchanges[bucket.index()] = exchange
        restore_state(self._kept, exchange.rounds.compressed.values())
        if exchange.rounds.compressed:
            self._drop(names)
        return exchange

    def _leave(self, old: Sequence[int]) -> None:
        """Keep the state of buckets that DDP has replaced; those before them are new already."""
        for index in old:
            compressed = self._exchanges.pop(index).rounds.compressed.values()
            for kind, kept in summands(state_of(compressed)).items():
                self._kept.setdefault(kind, replace(kept, arrays={})).arrays.update(kept.arrays)


def _refused(error: NotFinite) -> ChainTasks:
    """A chain that ends the run on all ranks, as any failure in the engine does."""
    raise error
    yield


class _BucketExchange:
    """The buffers and rounds of one of DDP's buckets."""

    def __init__(
        self,
        gradients: Mapping[str, torch.Tensor],
        buffer: torch.Tensor,
        plan: Plan,
        group: Group,
        rank: int,
    ) -> None:
        self.names = list(gradients)
        limit = Size(max(1, buffer.nbytes))  # one bucket
        undivided = replace(plan, settings=replace(plan.settings, bucket=limit))
        like = {name: gradients[name] for name in reversed(self.names)}
        layout = Layout.of(like, limit, Compression.of(plan).arrange)
        self.rounds = BucketRounds(undivided, group, layout, rank)
        [self.bucket] = layout.buckets
        self.views = [self.bucket.views[name] for name in self.names]
        in_order = not self.bucket.arrangement.compressed
        self._result = self.bucket.flat if in_order else torch.empty_like(buffer, device="cpu")

    def gathered(self) -> torch.Tensor:
        """The result in the order of DDP's buffer."""
        if self._result is not self.bucket.flat:
            torch.cat([view.reshape(-1) for view in self.views], out=self._result)
        return self._result
