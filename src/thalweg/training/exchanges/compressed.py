"""Compression of buckets: each is encoded, exchanged and decoded.

Each contribution is divided by the number of contributions first, so sums are means. Under gradient
plans the residual of a biased codec is kept for the next step (`compress.feedback`). Where
parameters are averaged it is added back at once: mean Q + x - Q(x) keeps the mean over the ranks.

Payloads are summed by the plan's own schedules, gathered whole, or sent in two shots: each rank
sends each member its shard of the payload, the member reduces the shards that it received to one,
and the reduced shards are gathered. Each rank sends 2 (N-1)/N of a payload then, however many ranks
there are; gathering whole payloads takes N-1 of them. Uncompressed tensors, and the scales of
payloads, are sent along with the first round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from thalweg.engine.engine import Chain
from thalweg.engine.execute import Task, View
from thalweg.errors import NotFinite, PlanError
from thalweg.facts import Tensor
from thalweg.plan import Plan
from thalweg.redundancy import is_relayed
from thalweg.schedules.chunks import split
from thalweg.steps import RACK_SUM_PAYLOAD, RESULT_PAYLOAD
from thalweg.training.buckets import FlatBucket, Layout
from thalweg.training.compiled_steps import RankRound
from thalweg.training.compressor_state import RESIDUAL, VOTE, CompressorState
from thalweg.transports import Array

EXACT_PAYLOAD = "exact"  # the payload of uncompressed tensors


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
    def state(self) -> CompressorState:
        """Views of the state, to be read and written between two steps."""
        if self.codec is None:
            return {}
        state = dict(self.codec.state)
        if self._feedback is None:
            state.pop(VOTE, None)
        else:
            residual = self._feedback.residual
            state[RESIDUAL] = {s.name: residual[s.place] for s in self.codec.segments}
        return state

    def chain(self, rank_rounds: Sequence[RankRound], step: int, first_round: int) -> Chain:
        """The rounds that turn the bucket's contribution into the sum of all."""
        by_name = {r.round.payload.name: r for r in rank_rounds}
        before, after = by_name.pop(RACK_SUM_PAYLOAD, None), by_name.pop(RESULT_PAYLOAD, None)
        between = [r for r in rank_rounds if r.round.payload.name in by_name]
        if before is not None:
            if not between and self.has_more:
                self._add_residual()
            yield [before.task(self._bucket, step, first_round)]
        if any(not r.round.payload.exact for r in between):
            yield from self._compressed(between, step, first_round)
        elif between:  # nothing in this bucket is compressed, at least not yet
            yield [between[0].task(self._bucket, step, first_round)]
        if after is not None:
            yield [after.task(self._bucket, step, first_round)]

    def _compressed(self, rank_rounds: Sequence[RankRound], step: int, first_round: int) -> Chain:
        out = self.load()
        try:
            transfer = _BucketTransfer(
                bucket=self._bucket,
                rank=self._rank,
                rounds=[r for r in rank_rounds if not r.round.payload.exact],
                uncompressed=[r for r in rank_rounds if r.round.payload.exact],
                step=step,
                first_round=first_round,
                values=self._to_encode(out),
                out=out,
                buffer=self._buffer,
            )
            if isinstance(self.codec, SummableCodec):
                yield from transfer.summed(self.codec, self.sum_arithmetic)
            elif isinstance(self.codec, ShardableCodec) and len(transfer.rounds) > 1:
                yield from transfer.in_two_shots(self.codec)
            else:
                assert isinstance(self.codec, GatheredCodec)
                yield from transfer.gathered(self.codec)
        except NotFinite as error:
            raise NotFinite(error.names, f" on rank {self._rank} at step {step}") from None
        if self._residual is not None:
            self._residual *= rank_rounds[0].divisor
            out += self._residual
        self.store()

    def _add_residual(self) -> None:
        """Add the residual of an earlier plan to the bucket, for the rank that encodes for the
        rack."""
        self.has_more = False
        if self._feedback is not None:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _BucketTransfer:
    """One bucket at one step. `values` are encoded, `out` is to hold the result; they are one
    vector if no residual is kept. `buffer` gives buffers by purpose and size."""

    bucket: FlatBucket
    rank: int
    rounds: Sequence[RankRound]  # of payloads
    uncompressed: Sequence[RankRound]
    step: int
    first_round: int
    values: Array
    out: Array
    buffer: Callable[[str, int], Array]

    @property
    def keep(self) -> bool:
        return self.values is not self.out

    def task(
        self,
        rank_round: RankRound,
        vector: Array,
        arithmetic: Arithmetic = NUMPY,
        view: View | None = None,
    ) -> Task:
        return rank_round.task(self.bucket, self.step, self.first_round, vector, arithmetic, view)

    def uncompressed_tasks(self, scales: Array | None) -> list[Task]:
        tasks = []
        for rank_round in self.uncompressed:
            if rank_round.round.payload.name == EXACT_PAYLOAD:
                rest = self.bucket.vector[self.bucket.arrangement.length :]
                tasks.append(self.task(rank_round, rest, self.bucket.arithmetic))
            else:
                assert scales is not None
                tasks.append(self.task(rank_round, scales))
        return tasks

    def summed(self, codec: SummableCodec, arithmetic: Arithmetic) -> Chain:
        payloads = codec.rounds(self.values, self.out, self.step, keep=self.keep)
        others = self.uncompressed_tasks(None)
        for rank_round, payload in zip(self.rounds, payloads, strict=False):
            yield [self.task(rank_round, payload, arithmetic), *others]
            others = []
        for _ in payloads:  # the codec continues after the last round
            raise AssertionError("the codec has more rounds than it declares")

    def gathered(self, codec: GatheredCodec) -> Chain:
        [rank_round] = self.rounds
        order = rank_round.round.group.order
        everything = self.buffer("all", codec.nbytes * len(order))
        rows = everything.reshape(len(order), -1)
        self._encode(codec, rows[order.index(self.rank)])
        whole = self.task(rank_round, _items(everything, rank_round))
        yield [whole, *self.uncompressed_tasks(codec.scales)]
        if self.keep:
            codec.keep_residual(self.values, len(order))
        codec.add_up(list(rows), self.out)

    def in_two_shots(self, codec: ShardableCodec) -> Chain:
        first, second = self.rounds
        order, itemsize = first.round.group.order, first.round.payload.itemsize
        members, position = len(order), order.index(self.rank)
        encoded = self.buffer("own", codec.nbytes)
        self._encode(codec, encoded)
        sizes = [units * itemsize for units in split(first.round.payload.elements, members)]
        places = [slice(*ends) for ends in pairwise(accumulate(sizes, initial=0))]
        inbox = self.buffer("inbox", members * sizes[position])
        shards: list[Array] = list(inbox.reshape(members, -1))  # of all members, for this rank
        shards[position] = encoded[places[position]]

        def view(start: int, stop: int) -> Array:
            """The j-th shard of the i-th member, which is chunk i N + j."""
            sender, receiver = divmod(start, members)
            return encoded[places[receiver]] if sender == position else shards[sender]

        yield [self.task(first, inbox, view=view), *self.uncompressed_tasks(codec.scales)]
        if self.keep:
            codec.keep_residual(self.values, members)
        result = self.buffer("result", codec.nbytes)
        own = places[position]
        codec.reduce(shards, result[own], own.start // itemsize, self.step, self.rank)
        yield [self.task(second, _items(result, second))]
        codec.decode(result, self.out)

    def _encode(self, codec: GatheredCodec, payload: Array) -> None:
        codec.encode(self.values, payload, self.step, self.rank, keep=self.keep)


def _items(buffer: Array, rank_round: RankRound) -> Array:
    """The buffer with the payload's unit as its item type."""
    itemsize = rank_round.round.payload.itemsize
    items: Array = buffer if itemsize == 1 else buffer.view(np.dtype((np.void, itemsize)))
    return items
