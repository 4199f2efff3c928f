"""Gradient plans: averaged while backward runs, and in place when it returns.

A bucket is sent as soon as backward has finished its last gradient and the buckets before it were
sent; so all ranks send in the same order. The data sent is a scaled copy: a step that fails leaves
the local gradients unchanged. When backward ends, the averages of all buckets are written into the
gradients together. The exchange (`exchanges/`) transfers the buckets.

Parameters that took no part keep no gradient, as without Thalweg, unless they took part on another
rank, or a compressor had a residual of theirs: a flag for each is sent at the end of the last
bucket. One more flag marks gradients that are not finite; zeros are sent in their place, so that
neither sums nor residuals have inf or nan in them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import inf, nan

import torch
from torch import nn

from thalweg.compress import arrange
from thalweg.errors import Interrupted, RunError, StoreLost
from thalweg.facts import Size
from thalweg.training.backward_hooks import after_backward
from thalweg.training.buckets import DTYPES, Arrange, FlatBucket, Layout, scaled_into
from thalweg.training.exchanges.exchange import Exchange
from thalweg.training.finite import is_finite, not_finite
from thalweg.training.plan_context import PlanContext
from thalweg.training.sources.source import Source

PARTICIPATION_FLAGS = "thalweg: who took part"  # no parameter can have this name


class GradientSource(Source):
    """Averages gradients. `layout` is that of `layout_of` for these parameters. Parameters whose
    gradient on this rank is not finite, or has an element beyond `largest`, are reported before it
    is sent. If the averages of a backward can't be used, all of them are nan."""

    sends_own_gradients = True

    def __init__(
        self,
        context: PlanContext,
        parameters: Mapping[str, nn.Parameter],
        layout: Layout,
        exchange: Exchange,
        largest: float = inf,
    ) -> None:
        self.bad: list[str] = []
        self._is_good = True  # the averages of the last backward can be used
        self._largest = largest
        self._parameters = parameters
        self._on = True
        self._in_backward = False  # also after a backward that failed
        self._missing: dict[int, set[str]] = {}  # gradients by bucket
        self._unsent: deque[FlatBucket] = deque()
        self.open(context, layout, exchange)

    def open(self, context: PlanContext, layout: Layout, exchange: Exchange) -> None:
        """Average by this exchange from now on; also again, after `abort`."""
        self.exchange = exchange
        self._context = context
        self._layout = layout
        self._bucket_of = {name: b.index for b in layout.buckets for name in b.views}

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        was, self._on = self._on, False
        try:
            yield
        finally:
            self._on = was

    def spoilt(self, gradients: Mapping[str, torch.Tensor]) -> Sequence[str] | None:
        was_good, self._is_good = self._is_good, True
        return None if was_good else self.bad

    def after_step(self) -> None:
        self.exchange.apply()

    def wait_and_apply(self) -> None:
        self.exchange.make_equal()

    def detach(self) -> None:
        self._drop()

    def abort(self) -> None:
        self._in_backward = False
        self.exchange.close()  # frees its buffers, and so does the layout
        self._layout = replace(self._layout, buckets=())

    def begin_backward(self) -> None:
        if self._on and self._layout.buckets:
            self._drop()
            self._begin()
            self._missing = {b.index: set(b.views) for b in self._layout.buckets}
            self._in_backward = True
            after_backward(self._finish)

    def gradient_ready(self, name: str) -> None:
        if not (self._on and self._in_backward):
            return
        index = self._bucket_of[name]
        if not self._missing[index]:
            raise RunError(
                f"the gradient of {name} was ready twice in one backward",
                "use a layer once in each checkpointed part, or checkpoint with "
                "use_reentrant=False",
            )
        self._missing[index].discard(name)
        while self._unsent and not self._missing[self._unsent[0].index]:
            self._send(self._unsent.popleft())

    def _begin(self) -> None:
        self.bad = []
        self.exchange.begin()
        self._unsent = deque(self._layout.buckets if self.exchange.is_awaited else ())

    def _drop(self) -> None:
        """Discard a failed backward, once the buckets that were sent are free again."""
        failed, self._in_backward = self._in_backward, False
        if failed:
            self.exchange.drop()

    @torch.no_grad()
    def _send(self, bucket: FlatBucket) -> None:
        """Write the gradients into the bucket, zero for those that are not finite, and send it."""
        factor, presence = self.exchange.factor, self.exchange.presence
        for name, view in bucket.views.items():
            if name == PARTICIPATION_FLAGS:
                took_part = [p.grad is not None for p in self._parameters.values()]
                view.copy_(presence * torch.tensor([*took_part, False]))
            elif (gradient := self._parameters[name].grad) is None:
                view.zero_()
            elif gradient.is_sparse:
                raise RunError(f"the gradient of {name} is sparse", "make it dense (sparse=False)")
            else:
                scaled_into(view, gradient, factor)
        bad: list[str] = []
        if not is_finite(bucket.flat, self._largest * factor):
            bad = not_finite(bucket.views, self._largest * factor)
        if bad:
            self.bad += bad
            if self.exchange.returns_gradients:  # otherwise no other rank skips its step
                self._context.bad_gradients.report(bad)
            torch._foreach_zero_([bucket.views[name] for name in bad])
        if PARTICIPATION_FLAGS in bucket.views and self.bad:
            bucket.views[PARTICIPATION_FLAGS][-1] = presence
        self.exchange.send(bucket, is_finite=not bad)

    def _finish(self) -> None:
        """Send the remaining buckets at the end of backward, and put the averages in place. If
        members change meanwhile, average the same gradients among the new ones; or leave that to
        the repetition of the step."""
        self._in_backward = False
        while True:
            try:
                while self._unsent:
                    self._send(self._unsent.popleft())
                self.exchange.finish()
                break
            except (Interrupted, StoreLost) as error:
                if not self._context.on_interrupted(error):
                    return
            self.exchange.repeat()
            self._begin()
        self._commit()

    @torch.no_grad()
    def _commit(self) -> None:
        if not self.exchange.returns_gradients:
            self._is_good = not self.bad
            for parameter in self._parameters.values():
                parameter.grad = None
            return
        index = self._bucket_of[PARTICIPATION_FLAGS]
        flags = self._layout.buckets[index].views[PARTICIPATION_FLAGS]
        took_part = dict(zip(self._parameters, (flags != 0)[:-1].tolist(), strict=True))
        self._is_good = self.exchange.is_good(flags)
        if not self._is_good:
            self.exchange.restore_state()
        for bucket in self._layout.buckets:
            if not self._is_good:
                bucket.flat.zero_()  # also between the views, where codecs need zeros
            for name, view in bucket.views.items():
                if name == PARTICIPATION_FLAGS:
                    continue
                parameter = self._parameters[name]
                if not took_part[name] and not view.any():  # on any rank
                    parameter.grad = None
                    continue
                if parameter.grad is None:
                    parameter.grad = view.to(parameter.device, copy=True)
                elif self._is_good:
                    parameter.grad.copy_(view)
                if not self._is_good:
                    parameter.grad.fill_(nan)  # which a GradScaler detects, on every rank


def layout_of(
    parameters: Mapping[str, nn.Parameter], limit: Size, arranged: Arrange = arrange
) -> Layout:
    """The parameters' buckets, with the flags first in the model and so last in backward."""
    dtypes = (p.dtype for p in parameters.values() if p.dtype in DTYPES)  # others are refused below
    flags = torch.empty(len(parameters) + 1, dtype=next(dtypes, None))
    tensors: dict[str, torch.Tensor] = {PARTICIPATION_FLAGS: flags, **parameters}
    return Layout.of(tensors, limit, arranged)
