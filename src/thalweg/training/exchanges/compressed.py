"""A plan's precision at work: a bucket is encoded, exchanged and decoded.

What a rank contributes is divided by the number of contributions first, so sums are means. Under
gradient plans what a biased codec leaves out is kept for the next step (`compress.feedback`). Where
parameters are averaged it is put back at once: mean Q + x - Q(x) keeps the mean over the ranks.

Payloads are added up by the plan's own schedules, gathered whole, or go in two shots: everybody
sends each member its shard of the payload, the member reduces the shards that it got to one, and
the reduced shards are gathered. Each rank sends 2 (N-1)/N of a payload then, however many ranks
there are; gathering whole payloads takes N-1 of them. Tensors that go as they are, and scales that
belong to payloads, travel beside the first round.
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
from thalweg.engine.engine import Chain, Task
from thalweg.engine.execute import View
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

EXACT_PAYLOAD = "exact"  # the payload of tensors that go as they are


@dataclass(frozen=True, slots=True, kw_only=True)
class Compression:
    """The compressor of a plan, and how it is used there."""

    compressor: Compressor
    arguments: Mapping[str, Value]
    keeps: bool  # what is left out, for the next step
    restores: bool  # what is left out, at once

    @classmethod
    def of(cls, plan: Plan) -> Compression | None:
        if plan.precision is None:
            return None
        compressor = default_catalog().compressors.get(plan.precision.name)
        if compressor is None:
            raise PlanError(
                f"the workers don't know the compressor {plan.precision.name}",
                "put its file into thalweg/compress, where all of them find it",
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
        """None if nothing is compressed."""
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
    """`rank` is this one's. What it holds between steps is in `slots`."""

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
        self._left_out = np.empty(length, np.float32) if compression.restores else None
        self._buffers = _Buffers()
        self.has_more = False  # than it left out itself

    @property
    def state(self) -> CompressorState:
        """Windows into it, to be read and written between two steps."""
        if self.codec is None:
            return {}
        slots = dict(self.codec.state)
        if self._feedback is None:
            slots.pop(VOTE, None)
        else:
            residual = self._feedback.residual
            slots[RESIDUAL] = {s.name: residual[s.place] for s in self.codec.segments}
        return slots

    def chain(self, rank_rounds: Sequence[RankRound], step: int, first_round: int) -> Chain:
        """The rounds that make the bucket, which holds contributions, their sum."""

        def whole(rank_round: RankRound) -> list[Task]:
            return [rank_round.task(self._bucket, step, first_round)]

        inside = {rank_round.round.payload.name: rank_round for rank_round in rank_rounds}
        between = [
            rank_round
            for rank_round in rank_rounds
            if rank_round.round.payload.name not in (RACK_SUM_PAYLOAD, RESULT_PAYLOAD)
        ]
        if RACK_SUM_PAYLOAD in inside:
            if not between and self.has_more:
                self._give_away()
            yield whole(inside[RACK_SUM_PAYLOAD])
        if any(not rank_round.round.payload.exact for rank_round in between):
            yield from self._compressed(between, step, first_round)
        elif between:  # nothing is compressed in this bucket, or not yet
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
        if self._left_out is not None:
            self._left_out *= rank_rounds[0].divisor
            out += self._left_out
        self.store()

    def _give_away(self) -> None:
        """What an earlier plan left out here goes to the first of the rack, who encodes for all."""
        self.has_more = False
        if self._feedback is not None:
            out = self.load()
            out += self._feedback.residual
            self._feedback.residual[:] = 0
            self.store()

    def load(self) -> Array:
        """What the bucket holds of compressed tensors, in float32: to be worked on in place."""
        if self._out.base is None:
            torch.from_numpy(self._out).copy_(self._values)
        return self._out

    def store(self) -> None:
        """What was made of it goes back into the bucket."""
        if self._out.base is None:
            self._values.copy_(torch.from_numpy(self._out))

    def to_encode(self, out: Array) -> Array:
        """A vector of its own where what is left out is to be known."""
        if self._feedback is not None:
            return self._feedback.add(out)
        if self._left_out is not None:
            self._left_out[:] = out
            return self._left_out
        return out


def refuse_second_momentum(plan: Plan, optimizer: torch.optim.Optimizer) -> None:
    """A compressor with momentum of its own takes the optimizer's part."""
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
    vector if nobody asks what is left out."""

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
        """The rounds of payloads, without what goes beside them."""
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
    """For payloads, made when they are first needed: groups may differ from step to step."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int], Array] = {}

    def of(self, purpose: str, nbytes: int) -> Array:
        key = purpose, nbytes
        if key not in self._kept:
            self._kept[key] = np.empty(nbytes, np.uint8)
        return self._kept[key]


def _exchange(codec: Codec, transfer: _BucketTransfer, buffers: _Buffers) -> Chain:
    if isinstance(codec, SummableCodec):
        yield from _added_up(codec, transfer)
    elif isinstance(codec, ShardableCodec) and len(transfer.payload_rounds) > 1:
        yield from _in_two_shots(codec, transfer, buffers)
    else:
        assert isinstance(codec, GatheredCodec)
        yield from _gathered(codec, transfer, buffers)


def _added_up(codec: SummableCodec, transfer: _BucketTransfer) -> Chain:
    payloads = codec.rounds(transfer.values, transfer.out, transfer.step, keep=transfer.keep)
    beside = transfer.uncompressed_tasks(None)
    for rank_round, payload in zip(transfer.payload_rounds, payloads, strict=False):
        yield [transfer.task(rank_round, payload, transfer.carries), *beside]
        beside = []
    for _ in payloads:  # what follows the last round
        raise AssertionError("the codec has more rounds than it declares")


def _gathered(codec: GatheredCodec, transfer: _BucketTransfer, buffers: _Buffers) -> Chain:
    [rank_round] = transfer.payload_rounds
    order = rank_round.round.group.order
    everything = buffers.of("everybody's", codec.nbytes * len(order))
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
    """Where the shards of the first shot are: chunk i N + j is the j-th of the i-th member."""

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
        """Everybody's shard for this rank, its own included."""
        own = self._own[slice(*self.bounds[self._position])]
        return [own if i == self._position else row for i, row in enumerate(self._rows)]


def _items(buffer: Array, rank_round: RankRound) -> Array:
    """The same bytes, counted in the payload's units."""
    itemsize = rank_round.round.payload.itemsize
    items: Array = buffer if itemsize == 1 else buffer.view(np.dtype((np.void, itemsize)))
    return items
