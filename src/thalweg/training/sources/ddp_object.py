"""A DistributedDataParallel object of the script: the plan's rounds run in its communication hook.

With the plan `ddp` it is left unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from thalweg.compress import Kept
from thalweg.engine.engine import ChainTasks
from thalweg.errors import NotFinite
from thalweg.facts import Size, Tensor
from thalweg.plan import Plan
from thalweg.schedules import Group
from thalweg.training.backward_hooks import after_backward
from thalweg.training.buckets import DTYPES, Layout, scaled_into
from thalweg.training.exchanges.compressed import Compression
from thalweg.training.exchanges.rounds import BucketRounds
from thalweg.training.plan_context import PlanContext
from thalweg.training.plan_state import PlanState, residuals_in, restore_state, state_of, summands
from thalweg.training.sources.source import Source
from thalweg.transports import Array


class DdpSource(Source):
    """A DDP object whose buckets are synchronised by our rounds; by torch's if the plan is
    `ddp`."""

    def __init__(
        self, context: PlanContext, model: DistributedDataParallel, plan: Plan, *, native: bool
    ) -> None:
        self._context = context
        self._model = model
        self._plan = plan
        self._compression = Compression.of(plan)
        self._names = {id(p): name for name, p in model.module.named_parameters()}
        self._exchanges: dict[int, _BucketExchange] = {}
        self._kept: dict[str, Kept] = {}  # of buckets that DDP has replaced
        self._sent: list[Future[None]] = []
        self._end: Callable[[], object] | None = None
        if not native:
            # DDP requires the name of the second parameter
            model.register_comm_hook(self, lambda adapter, bucket: adapter.send(bucket))

    def no_sync(self) -> AbstractContextManager[None]:
        return self._model.no_sync()

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
        if self._end is None or self._end() is None:
            self._finish()  # a failed backward may have left transfers
            self._end = after_backward(self._finish)
        exchange = self._exchange_of(bucket)
        engine, clock = self._context.engine, self._context.clock
        rank_step = exchange.rounds.steps.begin(clock)
        bad = self._context.bad_gradients.report_from(bucket, self._names)
        for view, gradient in zip(exchange.views, bucket.gradients(), strict=True):
            scaled_into(view, gradient, 1 / self._context.group.size)
        [chain] = rank_step.chains
        work = exchange.rounds.work(rank_step, chain)
        if bad and exchange.rounds.compressed:  # a compressor would keep them in its state
            work = _refused(NotFinite(bad, f" on rank {engine.rank} at step {clock.step}"))
        sent = engine.submit(work)
        result: torch.futures.Future[Any] = torch.futures.Future()
        sent.add_done_callback(lambda _: result.set_result(exchange.gathered()))
        self._sent.append(sent)
        return result

    def _finish(self) -> None:
        """Raise errors before DDP gets the results, as it would reword them."""
        sent, self._sent = self._sent, []
        self._context.engine.wait(sent)

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
            gradients, bucket.buffer(), self._plan, self._context.group, self._context.engine.rank
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
