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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

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
from thalweg.engine.arithmetic import TORCH_KERNELS, arithmetic_of
from thalweg.engine.engine import Chain
from thalweg.engine.execute import Task, View
from thalweg.errors import NotFinite, PlanError
from thalweg.facts import Tensor
from thalweg.plan import Plan
from thalweg.redundancy import is_relayed
from thalweg.schedules.chunks import split
from thalweg.steps import RACK_SUM_PAYLOAD, RESULT_PAYLOAD
from thalweg.training.buckets import FlatBucket
from thalweg.training.compiled_steps import RankRound
from thalweg.training.compressor_state import RESIDUAL, VOTE, CompressorState
from thalweg.transports import Array

EXACT_PAYLOAD = "exact"  # the payload of uncompressed tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Compression:
    """The compressor of a plan, with its arguments and the use of residuals."""

    compressor: Compressor
    arguments: Mapping[str, Value]
    keeps: bool  # the residual is kept for the next step
    restores: bool  # the residual is added back at once

    @classmethod
    def of(cls, plan: Plan) -> Compression | None:
        if plan.precision is None:
            return None
        compressor = default_catalog().compressors.get(plan.precision.name)
        if compressor is None:
            raise PlanError(
                f"the workers have no compressor {plan.precision.name}",
                "put its file into thalweg/compress on all of them",
            )
        arguments = plan.precision.arguments
        sound = not (plan.averages_parameters or is_relayed(plan))
        return cls(
            compressor=compressor,
            arguments=arguments,
            keeps=sound and compressor.keeps(arguments),
            restores=plan.averages_parameters,
        )

    def arrange(self, tensors: Sequence[Tensor]) -> Arrangement:
        return arrange(tensors, self.compressor, self.arguments)

    def codec(self, arrangement: Arrangement) -> Codec | None:
        """The codec of a bucket; None if nothing in it is compressed."""
        if not arrangement.compressed:
            return None
        codec: Codec = self.compressor.codec(
            arrangement.compressed,
            arrangement.length,
            TORCH_KERNELS,
            **own_arguments(self.arguments),
        )
        return codec


class CompressedBucket:
    """A bucket with its codec and, between steps, its state. `rank` is this rank."""

    def __init__(self, bucket: FlatBucket, compression: Compression, rank: int) -> None:
        self.codec = compression.codec(bucket.arrangement)
        self._bucket = bucket
        self._rank = rank
        self.carries = getattr(torch, compression.compressor.carries)
        length = bucket.arrangement.length
        self._values = bucket.flat[:length]
        is_float = bucket.flat.dtype is torch.float32
        self._out: Array = bucket.vector[:length] if is_float else np.empty(length, np.float32)
        keeps = self.codec is not None and compression.keeps
        self._feedback = Feedback(self.codec) if keeps and self.codec is not None else None
        self._residual = np.empty(length, np.float32) if compression.restores else None
        self._buffers = _Buffers()
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

        def whole(rank_round: RankRound) -> list[Task]:
            return [rank_round.task(self._bucket, step, first_round)]

        inside = {one.round.payload.name: one for one in rank_rounds}
        in_rack = (RACK_SUM_PAYLOAD, RESULT_PAYLOAD)
        between = [one for one in rank_rounds if one.round.payload.name not in in_rack]
        if RACK_SUM_PAYLOAD in inside:
            if not between and self.has_more:
                self._add_residual()
            yield whole(inside[RACK_SUM_PAYLOAD])
        if any(not one.round.payload.exact for one in between):
            yield from self._compressed(between, step, first_round)
        elif between:  # nothing in this bucket is compressed, at least not yet
            yield whole(between[0])
        if RESULT_PAYLOAD in inside:
            yield whole(inside[RESULT_PAYLOAD])

    def _compressed(self, rank_rounds: Sequence[RankRound], step: int, first_round: int) -> Chain:
        assert self.codec is not None
        out = self.load()
        try:
            transfer = _BucketTransfer(
                bucket=self._bucket,
                rank=self._rank,
                rounds=rank_rounds,
                step=step,
                first_round=first_round,
                values=self.to_encode(out),
                out=out,
                carries=self.carries,
            )
            yield from _exchange(self.codec, transfer, self._buffers)
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

    def to_encode(self, out: Array) -> Array:
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
    vector if no residual is kept."""

    bucket: FlatBucket
    rank: int
    rounds: Sequence[RankRound]
    step: int
    first_round: int
    values: Array
    out: Array
    carries: torch.dtype

    @property
    def keep(self) -> bool:
        return self.values is not self.out

    @property
    def payload_rounds(self) -> list[RankRound]:
        """The rounds of payloads, without those of uncompressed tensors."""
        return [rank_round for rank_round in self.rounds if not rank_round.round.payload.exact]

    def uncompressed_tasks(self, scales: Array | None) -> list[Task]:
        rest = self.bucket.vector[self.bucket.arrangement.length :]
        vectors = {EXACT_PAYLOAD: (rest, self.bucket.flat.dtype), "scales": (scales, torch.float32)}
        tasks = []
        for rank_round in self.rounds:
            if rank_round.round.payload.exact:
                vector, dtype = vectors[rank_round.round.payload.name]
                assert vector is not None
                tasks.append(self.task(rank_round, vector, dtype))
        return tasks

    def task(
        self, rank_round: RankRound, vector: Array, dtype: torch.dtype, view: View | None = None
    ) -> Task:
        return Task(
            program=rank_round.program,
            vector=vector,
            step=self.step,
            round_number=self.first_round + rank_round.round.number,
            bucket=self.bucket.index,
            arithmetic=arithmetic_of(dtype),
            view=view,
        )


class _Buffers:
    """Buffers for payloads, allocated on first use: groups may differ from step to step."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int], Array] = {}

    def of(self, purpose: str, nbytes: int) -> Array:
        key = purpose, nbytes
        if key not in self._kept:
            self._kept[key] = np.empty(nbytes, np.uint8)
        return self._kept[key]


def _exchange(codec: Codec, transfer: _BucketTransfer, buffers: _Buffers) -> Chain:
    if isinstance(codec, SummableCodec):
        yield from _summed(codec, transfer)
    elif isinstance(codec, ShardableCodec) and len(transfer.payload_rounds) > 1:
        yield from _in_two_shots(codec, transfer, buffers)
    else:
        assert isinstance(codec, GatheredCodec)
        yield from _gathered(codec, transfer, buffers)


def _summed(codec: SummableCodec, transfer: _BucketTransfer) -> Chain:
    payloads = codec.rounds(transfer.values, transfer.out, transfer.step, keep=transfer.keep)
    others = transfer.uncompressed_tasks(None)
    for rank_round, payload in zip(transfer.payload_rounds, payloads, strict=False):
        yield [transfer.task(rank_round, payload, transfer.carries), *others]
        others = []
    for _ in payloads:  # the codec continues after the last round
        raise AssertionError("the codec has more rounds than it declares")


def _gathered(codec: GatheredCodec, transfer: _BucketTransfer, buffers: _Buffers) -> Chain:
    [rank_round] = transfer.payload_rounds
    order = rank_round.round.group.order
    everything = buffers.of("all", codec.nbytes * len(order))
    rows = everything.reshape(len(order), -1)
    codec.encode(
        transfer.values,
        rows[order.index(transfer.rank)],
        transfer.step,
        transfer.rank,
        keep=transfer.keep,
    )
    whole = transfer.task(rank_round, _items(everything, rank_round), torch.uint8)
    yield [whole, *transfer.uncompressed_tasks(codec.scales)]
    if transfer.keep:
        codec.keep_residual(transfer.values, len(order))
    codec.add_up(list(rows), transfer.out)


def _in_two_shots(codec: ShardableCodec, transfer: _BucketTransfer, buffers: _Buffers) -> Chain:
    first, second = transfer.payload_rounds
    order = first.round.group.order
    position = order.index(transfer.rank)
    own = buffers.of("own", codec.nbytes)
    codec.encode(transfer.values, own, transfer.step, transfer.rank, keep=transfer.keep)
    shots = _Shots(own, first, position, buffers)
    yield [
        transfer.task(first, shots.inbox, torch.uint8, shots.view),
        *transfer.uncompressed_tasks(codec.scales),
    ]
    if transfer.keep:
        codec.keep_residual(transfer.values, len(order))
    result = buffers.of("result", codec.nbytes)
    start, stop = shots.bounds[position]
    codec.reduce(
        shots.arrived(),
        result[start:stop],
        start // first.round.payload.itemsize,
        transfer.step,
        transfer.rank,
    )
    yield [transfer.task(second, _items(result, second), torch.uint8)]
    codec.decode(result, transfer.out)


class _Shots:
    """The shards of the first shot: chunk i N + j is the j-th of the i-th member."""

    def __init__(self, own: Array, rank_round: RankRound, position: int, buffers: _Buffers) -> None:
        self._members = rank_round.round.group.size
        self._position = position
        self._own = own
        payload = rank_round.round.payload
        sizes = [units * payload.itemsize for units in split(payload.elements, self._members)]
        self.bounds = list(pairwise(accumulate(sizes, initial=0)))
        start, end = self.bounds[position]
        self.inbox = buffers.of("inbox", self._members * (end - start))
        self._rows = self.inbox.reshape(self._members, -1)

    def view(self, start: int, stop: int) -> Array:
        sender, receiver = divmod(start, self._members)
        if sender == self._position:
            return self._own[slice(*self.bounds[receiver])]
        row: Array = self._rows[sender]
        return row

    def arrived(self) -> list[Array]:
        """The shards of all members for this rank, including its own."""
        own = self._own[slice(*self.bounds[self._position])]
        return [own if i == self._position else row for i, row in enumerate(self._rows)]


def _items(buffer: Array, rank_round: RankRound) -> Array:
    """The buffer with the payload's unit as its item type."""
    itemsize = rank_round.round.payload.itemsize
    items: Array = buffer if itemsize == 1 else buffer.view(np.dtype((np.void, itemsize)))
    return items
