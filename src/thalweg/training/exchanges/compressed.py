"""Compression of buckets: each is encoded, exchanged and decoded.

Each contribution is divided by the number of contributions first, so sums are means. Under gradient
plans the residual of a biased codec is kept for the next step (`compress.codec`). Where
parameters are averaged it is added back at once: mean Q + x - Q(x) keeps the mean over the ranks.

Payloads are summed by the plan's own schedules, gathered whole, or sent in two shots: each rank
sends each member its shard of the payload, the member reduces the shards that it received to one,
and the reduced shards are gathered. Each rank sends 2 (N-1)/N of a payload then, however many ranks
there are; gathering whole payloads takes N-1 of them. Uncompressed tensors, and the scales of
payloads, are sent along with the first round.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, pairwise
from math import inf

import numpy as np
import torch

from thalweg.catalog import default_catalog
from thalweg.compress import (
    Arrangement,
    Codec,
    Compressor,
    Feedback,
    GatheredCodec,
    ShardableCodec,
    SummableCodec,
    arrange,
)
from thalweg.compress.compressor import own_arguments
from thalweg.declarations import Value
from thalweg.engine.arithmetic import NUMPY, TORCH_KERNELS, Arithmetic, arithmetic_of
from thalweg.engine.engine import ChainTasks
from thalweg.engine.execute import View
from thalweg.errors import NotFinite, PlanError, RunError
from thalweg.facts import Tensor
from thalweg.plan import Plan
from thalweg.redundancy import is_relayed
from thalweg.schedules.chunks import split
from thalweg.steps import Chain, Round, Work
from thalweg.training.buckets import FlatBucket, Layout
from thalweg.training.compiled_steps import RankStep
from thalweg.training.plan_state import PlanState
from thalweg.transports import Array

_Sent = tuple[Array, Arithmetic, View | None]  # by one round


@dataclass(frozen=True, slots=True, kw_only=True)
class Compression:
    """The compressor of a plan, None without one, with its arguments and the use of residuals."""

    compressor: Compressor | None = None
    arguments: Mapping[str, Value] = field(default_factory=dict)
    keeps: bool = False  # the residual is kept for the next step
    restores: bool = False  # the residual is added back at once

    @classmethod
    def of(cls, plan: Plan) -> Compression:
        if plan.precision is None:
            return cls()
        compressor = default_catalog().compressors.get(plan.precision.name)
        if compressor is None:
            raise PlanError(
                f"the workers have no compressor {plan.precision.name}",
                "install the package that brings it on every host",
            )
        arguments = plan.precision.arguments
        sound = not (plan.averages_parameters or is_relayed(plan))
        return cls(
            compressor=compressor,
            arguments=arguments,
            keeps=sound and compressor.keeps(arguments),
            restores=plan.averages_parameters,
        )

    @property
    def largest(self) -> float:
        """The largest magnitude that a payload can hold."""
        return inf if self.compressor is None else self.compressor.largest

    def arrange(self, tensors: Sequence[Tensor]) -> Arrangement:
        return arrange(tensors, self.compressor, self.arguments)

    def buckets(self, layout: Layout, rank: int) -> dict[int, CompressedBucket]:
        """The buckets of a layout with their codecs on this rank; none without a compressor."""
        if self.compressor is None:
            return {}
        return {b.index: CompressedBucket(b, self, self.compressor, rank) for b in layout.buckets}


class CompressedBucket:
    """A bucket with its codec (None if nothing in it is compressed) and, between steps, its state.
    `rank` is this rank."""

    def __init__(
        self, bucket: FlatBucket, compression: Compression, compressor: Compressor, rank: int
    ) -> None:
        self.codec: Codec | None = None
        length = bucket.arrangement.length
        if bucket.arrangement.compressed:
            arguments = own_arguments(compression.arguments)
            self.codec = compressor.codec(
                bucket.arrangement.compressed, length, TORCH_KERNELS, **arguments
            )
        self._bucket = bucket
        self._rank = rank
        self._compressor_name = compressor.name
        self.sum_arithmetic = arithmetic_of(getattr(torch, compressor.carries))
        self._values = bucket.flat[:length]
        is_float = bucket.flat.dtype is torch.float32
        self._out: Array = bucket.vector[:length] if is_float else np.empty(length, np.float32)
        keeps = self.codec is not None and compression.keeps
        self._feedback = Feedback(self.codec) if keeps and self.codec is not None else None
        self._residual = np.empty(length, np.float32) if compression.restores else None
        # Payloads are allocated on first use: groups may differ from step to step.
        self._buffer = cache(lambda purpose, nbytes: np.empty(nbytes, np.uint8))
        self.has_more = False  # it also holds residuals of an earlier plan

    @property
    def state(self) -> PlanState:
        """Views of the state, to be read and written between two steps."""
        if self.codec is None:
            return {}
        if self._feedback is None:  # a residual of the codec alone is not used
            return {kind: kept for kind, kept in self.codec.state.items() if not kept.residual}
        return {**self.codec.state, **self._feedback.state}

    def tasks(self, rank_step: RankStep, chain: Chain) -> ChainTasks:
        """The rounds that turn the bucket's contribution into the sum of all. The whole bucket is
        sent where the codec has no payload."""
        whole: list[_Sent] = [(self._bucket.vector, self._bucket.arithmetic, None)]
        payloads: Iterator[list[_Sent]] = iter(())
        if not chain.encoded and len(chain.stages) > 1:  # another rank of the rack encodes
            self._add_residual()
        for stage in chain.stages:
            if stage.work is Work.ENCODE:
                payloads = self._payloads(chain, rank_step.step)
            sent = next(payloads, whole)
            if (sent is whole) is (stage.work in (Work.ENCODE, Work.REDUCE)):
                raise self._other_payloads(f"not the {len(chain.encoded)}")
            if stage.rounds:
                pairs = zip(stage.rounds, sent, strict=True)
                yield [rank_step.task(chain, round_, *parts) for round_, parts in pairs]

    def _payloads(self, chain: Chain, step: int) -> Iterator[list[_Sent]]:
        """The vectors of each stage in which something is encoded. In the end the bucket has the
        sum of all."""
        out = self.load()
        values = self._to_encode(out)
        first, *more = chain.encoded
        try:
            if isinstance(self.codec, SummableCodec):
                yield from self._summed(self.codec, values, out, step, chain.encoded)
            elif isinstance(self.codec, ShardableCodec) and more:
                yield from self._in_two_shots(self.codec, values, out, step, first)
            else:
                assert isinstance(self.codec, GatheredCodec)
                yield from self._gathered(self.codec, values, out, step, first)
        except NotFinite as error:
            raise NotFinite(error.names, f" on rank {self._rank} at step {step}") from None
        if self._residual is not None:
            self._residual *= first.contributions(self._rank)
            out += self._residual
        self.store()

    def _other_payloads(self, found: str) -> RunError:
        return RunError(
            f"the codec of {self._compressor_name} has other payloads than its compressor's sizes "
            f"say: {found} that are declared",
            "make sizes(tensors, step) return what the codec sends, in the same order",
        )

    def _uncompressed(self, scales: Array | None = None) -> list[_Sent]:
        """The vectors that are sent with the first payload."""
        sent: list[_Sent] = [] if scales is None else [(scales, NUMPY, None)]
        rest = self._bucket.vector[self._bucket.arrangement.length :]
        return [*sent, (rest, self._bucket.arithmetic, None)] if len(rest) else sent

    def _summed(
        self, codec: SummableCodec, values: Array, out: Array, step: int, encoded: Sequence[Round]
    ) -> Iterator[list[_Sent]]:
        others = self._uncompressed()
        for number, payload in enumerate(codec.rounds(values, out, step, keep=values is not out)):
            if number == len(encoded):
                raise self._other_payloads(f"more than the {number}")
            nbytes = encoded[number].payload.nbytes
            if payload.nbytes != nbytes:
                raise self._other_payloads(f"{payload.nbytes} bytes instead of the {nbytes}")
            yield [(payload, self.sum_arithmetic, None), *others]
            others = []

    def _gathered(
        self, codec: GatheredCodec, values: Array, out: Array, step: int, round_: Round
    ) -> Iterator[list[_Sent]]:
        order, keep = round_.group.order, values is not out
        everything = self._buffer("all", codec.nbytes * len(order))
        rows = everything.reshape(len(order), -1)
        codec.encode(values, rows[order.index(self._rank)], step, self._rank, keep=keep)
        items = _items(everything, round_.payload.itemsize)
        yield [(items, NUMPY, None), *self._uncompressed(codec.scales)]
        if keep:
            codec.keep_residual(values, len(order))
        codec.add_up(list(rows), out)

    def _in_two_shots(
        self, codec: ShardableCodec, values: Array, out: Array, step: int, round_: Round
    ) -> Iterator[list[_Sent]]:
        order, itemsize, keep = round_.group.order, round_.payload.itemsize, values is not out
        members, position = len(order), order.index(self._rank)
        encoded = self._buffer("own", codec.nbytes)
        codec.encode(values, encoded, step, self._rank, keep=keep)
        sizes = [units * itemsize for units in split(round_.payload.elements, members)]
        places = [slice(*ends) for ends in pairwise(accumulate(sizes, initial=0))]
        inbox = self._buffer("inbox", members * sizes[position])
        shards: list[Array] = list(inbox.reshape(members, -1))  # of all members, for this rank
        shards[position] = encoded[places[position]]

        def view(start: int, stop: int) -> Array:
            """The j-th shard of the i-th member, which is chunk i N + j."""
            sender, receiver = divmod(start, members)
            return encoded[places[receiver]] if sender == position else shards[sender]

        yield [(inbox, NUMPY, view), *self._uncompressed(codec.scales)]
        if keep:
            codec.keep_residual(values, members)
        result = self._buffer("result", codec.nbytes)
        own = places[position]
        codec.reduce(shards, result[own], own.start // itemsize, step, self._rank)
        yield [(_items(result, itemsize), NUMPY, None)]
        codec.decode(result, out)

    def _add_residual(self) -> None:
        """Add the residual of an earlier plan to the bucket, for the rank that encodes for the
        rack."""
        if self.has_more and self._feedback is not None:
            self.has_more = False
            out = self.load()
            out += self._feedback.residual
            self._feedback.residual[:] = 0
            self.store()

    def load(self) -> Array:
        """The compressed tensors of the bucket in float32, to be changed in place."""
        if self._out.base is None:
            torch.from_numpy(self._out).copy_(self._values)
        return self._out

    def store(self) -> None:
        """Write the loaded values back into the bucket."""
        if self._out.base is None:
            self._values.copy_(torch.from_numpy(self._out))

    def _to_encode(self, out: Array) -> Array:
        """The vector to encode: a copy where the residual is needed."""
        if self._feedback is not None:
            return self._feedback.add(out)
        if self._residual is not None:
            self._residual[:] = out
            return self._residual
        return out


def refuse_second_momentum(plan: Plan, optimizer: torch.optim.Optimizer) -> None:
    """Raise PlanError if compressor and optimizer both have a momentum."""
    own = plan.precision.arguments.get("momentum") if plan.precision is not None else None
    if own and any(group.get("momentum") for group in optimizer.param_groups):
        assert plan.precision is not None
        name = plan.precision.name
        raise PlanError(
            f"{name} has a momentum of {own}, and the optimizer has its own",
            f"give the optimizer momentum=0, or use {name}(momentum=0)",
        )


def _items(buffer: Array, itemsize: int) -> Array:
    """The buffer with the payload's unit as its item type."""
    items: Array = buffer if itemsize == 1 else buffer.view(np.dtype((np.void, itemsize)))
    return items
