"""Gradient plans: averaged while backward runs, and in place when it returns.

A bucket leaves as soon as backward has finished its last gradient and the buckets before it have
left; all ranks therefore send in the same order. What travels is a scaled copy: a step that fails
leaves the local gradients as they were. When backward ends, the averages of all buckets are
written into the gradients together. How a bucket travels is its carrier's business.

Parameters that took no part keep no gradient, as without Thalweg, unless they took part on another
rank, or a compressor had kept some of an earlier one: a flag for each travels at the end of the
last bucket. One flag more says that a gradient is not finite; what travels in its place is zero, so
that neither sums nor residuals have inf or nan in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import inf, nan

import torch
from torch import nn

from thalweg.compress import arrange
from thalweg.errors import Interrupted, RunError, StoreLost
from thalweg.facts import Size
from thalweg.training.backward_hooks import AfterBackward, after_gradient
from thalweg.training.buckets import Arrange, FlatBucket, Layout, scaled_into
from thalweg.training.compression_overlap import Timing
from thalweg.training.compressor_state import CompressorState, restore_state, state_views
from thalweg.training.exchanges.rounds import Exchange, RoundsExchange
from thalweg.training.finite import is_finite, not_finite
from thalweg.transports import Array

PARTICIPATION_FLAGS = "thalweg: who took part"  # not a name that a parameter can have


class GradientSynchronizer:
    """`layout` is the one that `layout_of` made of these parameters; `broken_off` is called at the
    end of a backward whose averages won't come, as the members of the run meet anew. `tell` is
    called with the names of parameters whose gradient here is not finite, or has an element beyond
    `largest`, before it is sent. After a backward `is_good` says whether the averages can be used
    (if not, all of them are nan), and `bad` whose gradients here could not."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        layout: Layout,
        exchange: Exchange,
        broken_off: Callable[[], None],
        tell: Callable[[Sequence[str]], None] = lambda names: None,
        largest: float = inf,
    ) -> None:
        self.is_good = True
        self.bad: list[str] = []
        self._report = tell
        self._largest = largest
        self._on_interrupted = broken_off
        self._parameters = parameters
        self._layout = layout
        self._exchange = exchange
        self._home = {name: b.index for b in layout.buckets for name in b.views}
        self._on = True
        self._backward: _Backward | None = None
        self._hooks = [
            after_gradient(p, partial(self._ready, name)) for name, p in parameters.items()
        ]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients add up here; they travel with the next backward outside."""
        was, self._on = self._on, False
        try:
            yield
        finally:
            self._on = was

    @property
    def compressor_state(self) -> CompressorState:
        return state_views(self._exchange.compressed)

    @property
    def compressor_state_before(self) -> CompressorState:
        return self._exchange.compressor_state_before

    def load_compressor_state(self, held: CompressorState) -> Mapping[str, Array]:
        return restore_state(held, self._exchange.compressed)

    def after_step(self) -> None:
        """Nothing is left to do once the optimizer has stepped."""

    def wait_and_apply(self) -> None:
        """Nothing is on its way between two steps."""

    def detach(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._drop()

    def abort(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._exchange.release()
        self._layout = replace(self._layout, buckets=())  # memory that the next one needs

    def repeat(self) -> None:
        """Average the gradients that are there, as at the end of a backward."""
        self._begin()
        self._end(self._layout.buckets)

    def _ready(self, name: str, parameter: torch.Tensor) -> None:
        if not self._on:
            return
        if self._backward is None or not self._backward.end.is_to_come():
            self._drop()
            self._begin()
            self._backward = _Backward(self._layout, AfterBackward(self._finish))
        index = self._home[name]
        if not self._backward.missing[index]:
            raise RunError(
                f"the gradient of {name} was ready twice in one backward",
                "use a layer once in each checkpointed part, or checkpoint with "
                "use_reentrant=False",
            )
        self._backward.missing[index].discard(name)
        while (bucket := self._backward.next_complete()) is not None:
            self._send(bucket)

    def _begin(self) -> None:
        self.bad = []
        self._exchange.begin()

    def _drop(self) -> None:
        """Forget a backward that failed, once the buckets that had left are free again."""
        failed, self._backward = self._backward, None
        if failed is not None:
            self._exchange.drop()

    def _send(self, bucket: FlatBucket) -> None:
        self._exchange.send(bucket, partial(self._fill, bucket))

    @torch.no_grad()
    def _fill(self, bucket: FlatBucket, factor: float, presence: float = 1.0) -> bool:
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
            self._report(bad)
            torch._foreach_zero_([bucket.views[name] for name in bad])
        if PARTICIPATION_FLAGS in bucket.views and self.bad:
            bucket.views[PARTICIPATION_FLAGS][-1] = presence
        return not bad

    def _finish(self) -> None:
        """At the end of backward: send what is left, wait, put the averages in place."""
        backward, self._backward = self._backward, None
        assert backward is not None
        self._end(backward.left())

    def _end(self, left: Iterable[FlatBucket]) -> None:
        if self._came(left):
            self._commit()
        else:
            self._on_interrupted()

    def _came(self, left: Iterable[FlatBucket]) -> bool:
        """Whether the averages did."""
        try:
            for bucket in left:
                self._send(bucket)
            self._exchange.finish()
        except (Interrupted, StoreLost):
            return False
        return True

    def _is_good(self) -> bool:
        """Whether no rank has found a gradient that is not finite."""
        return not self._layout.buckets[self._home[PARTICIPATION_FLAGS]].views[PARTICIPATION_FLAGS][
            -1
        ]

    @torch.no_grad()
    def _commit(self) -> None:
        flags = self._layout.buckets[self._home[PARTICIPATION_FLAGS]].views[PARTICIPATION_FLAGS]
        took_part = dict(zip(self._parameters, (flags != 0)[:-1].tolist(), strict=True))
        self.is_good = self._is_good()
        if not self.is_good:
            self._exchange.restore_state()
        for bucket in self._layout.buckets:
            if not self.is_good:
                bucket.flat.zero_()  # also between the views, where codecs count on zeros
            for name, view in bucket.views.items():
                if name == PARTICIPATION_FLAGS:
                    continue
                parameter = self._parameters[name]
                if not took_part[name] and not view.any():  # in the result, whatever it did here
                    parameter.grad = None
                    continue
                if parameter.grad is None:
                    parameter.grad = view.to(parameter.device, copy=True)
                elif self.is_good:
                    parameter.grad.copy_(view)
                if not self.is_good:
                    parameter.grad.fill_(nan)  # which a GradScaler looks for, on every rank


class SteppedSynchronizer(GradientSynchronizer):
    """All ranks are at the same step."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        layout: Layout,
        exchange: RoundsExchange,
        broken_off: Callable[[], None],
        tell: Callable[[Sequence[str]], None],
        largest: float,
    ) -> None:
        super().__init__(parameters, layout, exchange, broken_off, tell, largest)
        self._overlap = exchange.overlap

    @property
    def timings(self) -> Sequence[Timing]:
        return tuple(self._overlap.timings)


class _Backward:
    """How far one backward is, those inside it (of reentrant checkpoints) included."""

    def __init__(self, layout: Layout, end: AfterBackward) -> None:
        self.end = end
        self.missing = {b.index: set(b.views) for b in layout.buckets}
        self._unsent = list(reversed(layout.buckets))

    def next_complete(self) -> FlatBucket | None:
        """The next bucket in line, if nothing is missing in it."""
        if self._unsent and not self.missing[self._unsent[-1].index]:
            return self._unsent.pop()
        return None

    def left(self) -> Iterator[FlatBucket]:
        while self._unsent:
            yield self._unsent.pop()


def layout_of(
    parameters: Mapping[str, nn.Parameter], limit: Size, arranged: Arrange = arrange
) -> Layout:
    """The parameters' buckets, with the flags first in the model and so last in backward."""
    first = next(iter(parameters.values()))
    flags = torch.empty(len(parameters) + 1, dtype=first.dtype)
    tensors: dict[str, torch.Tensor] = {PARTICIPATION_FLAGS: flags, **parameters}
    return Layout.of(tensors, limit, arranged)
