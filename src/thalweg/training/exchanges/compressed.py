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
    Elementwise,
    Feedback,
    Gathered,
    Summed,
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
from thalweg.steps import BACK, INSIDE
from thalweg.training.buckets import FlatBucket
from thalweg.training.compiled_steps import Stop
from thalweg.training.compressor_state import RESIDUAL, VOTE, Slots
from thalweg.transports import Array

EXACT = "exact"  # the payload of tensors that go as they are


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
    def slots(self) -> Slots:
        """Windows into it, to be read and written between two steps."""
        if self.codec is None:
            return {}
        slots = dict(self.codec.slots)
        if self._feedback is None:
            slots.pop(VOTE, None)
        else:
            residual = self._feedback.residual
            slots[RESIDUAL] = {s.name: residual[s.place] for s in self.codec.segments}
        return slots

    def chain(self, stops: Sequence[Stop], step: int, first_round: int) -> Chain:
        """The rounds that make the bucket, which holds contributions, their sum."""

        def whole(stop: Stop) -> list[Task]:
            return [stop.task(self._bucket, step, first_round)]

        inside = {stop.round.payload.name: stop for stop in stops}
        between = [stop for stop in stops if stop.round.payload.name not in (INSIDE, BACK)]
        if INSIDE in inside:
            if not between and self.has_more:
                self._give_away()
            yield whole(inside[INSIDE])
        if any(not stop.round.payload.exact for stop in between):
            yield from self._compressed(between, step, first_round)
        elif between:  # nothing is compressed in this bucket, or not yet
            yield whole(between[0])
        if BACK in inside:
            yield whole(inside[BACK])

    def _compressed(self, stops: Sequence[Stop], step: int, first_round: int) -> Chain:
        assert self.codec is not None
        out = self.load()
        try:
            trip = _Trip(
                bucket=self._bucket,
                rank=self._rank,
                stops=stops,
                step=step,
                first_round=first_round,
                values=self.to_encode(out),
                out=out,
                carries=self.carries,
            )
            yield from _exchange(self.codec, trip, self._buffers)
        except NotFinite as error:
            raise NotFinite(error.names, f" on rank {self._rank} at step {step}") from None
        if self._left_out is not None:
            self._left_out *= stops[0].divisor
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
class _Trip:
    """One bucket at one step. `values` are encoded, `out` is to hold the result; they are one
    vector if nobody asks what is left out."""

    bucket: FlatBucket
    rank: int
    stops: Sequence[Stop]
    step: int
    first_round: int
    values: Array
    out: Array
    carries: torch.dtype

    @property
    def keep(self) -> bool:
        return self.values is not self.out

    @property
    def ways(self) -> list[Stop]:
        """The rounds of payloads, without what goes beside them."""
        return [stop for stop in self.stops if not stop.round.payload.exact]

    def beside(self, scales: Array | None) -> list[Task]:
        rest = self.bucket.vector[self.bucket.arrangement.length :]
        vectors = {EXACT: (rest, self.bucket.flat.dtype), "scales": (scales, torch.float32)}
        tasks = []
        for stop in self.stops:
            if stop.round.payload.exact:
                vector, dtype = vectors[stop.round.payload.name]
                assert vector is not None
                tasks.append(self.task(stop, vector, dtype))
        return tasks

    def task(self, stop: Stop, vector: Array, dtype: torch.dtype, view: View | None = None) -> Task:
        return Task(
            part=stop.part,
            vector=vector,
            step=self.step,
            round_number=self.first_round + stop.round.number,
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


def _exchange(codec: Codec, trip: _Trip, buffers: _Buffers) -> Chain:
    if isinstance(codec, Summed):
        yield from _added_up(codec, trip)
    elif isinstance(codec, Elementwise) and len(trip.ways) > 1:
        yield from _in_two_shots(codec, trip, buffers)
    else:
        assert isinstance(codec, Gathered)
        yield from _gathered(codec, trip, buffers)


def _added_up(codec: Summed, trip: _Trip) -> Chain:
    payloads = codec.rounds(trip.values, trip.out, trip.step, keep=trip.keep)
    beside = trip.beside(None)
    for stop, payload in zip(trip.ways, payloads, strict=False):
        yield [trip.task(stop, payload, trip.carries), *beside]
        beside = []
    for _ in payloads:  # what follows the last round
        raise AssertionError("the codec has more rounds than it declares")


def _gathered(codec: Gathered, trip: _Trip, buffers: _Buffers) -> Chain:
    [stop] = trip.ways
    order = stop.round.group.order
    everything = buffers.of("everybody's", codec.nbytes * len(order))
    rows = everything.reshape(len(order), -1)
    codec.encode(trip.values, rows[order.index(trip.rank)], trip.step, trip.rank, keep=trip.keep)
    whole = trip.task(stop, _items(everything, stop), torch.uint8)
    yield [whole, *trip.beside(codec.scales)]
    if trip.keep:
        codec.settle(trip.values, len(order))
    codec.add_up(list(rows), trip.out)


def _in_two_shots(codec: Elementwise, trip: _Trip, buffers: _Buffers) -> Chain:
    first, second = trip.ways
    order = first.round.group.order
    position = order.index(trip.rank)
    own = buffers.of("own", codec.nbytes)
    codec.encode(trip.values, own, trip.step, trip.rank, keep=trip.keep)
    shots = _Shots(own, first, position, buffers)
    yield [
        trip.task(first, shots.inbox, torch.uint8, shots.view),
        *trip.beside(codec.scales),
    ]
    if trip.keep:
        codec.settle(trip.values, len(order))
    result = buffers.of("result", codec.nbytes)
    start, stop = shots.bounds[position]
    codec.reduce(
        shots.arrived(),
        result[start:stop],
        start // first.round.payload.itemsize,
        trip.step,
        trip.rank,
    )
    yield [trip.task(second, _items(result, second), torch.uint8)]
    codec.decode(result, trip.out)


class _Shots:
    """Where the shards of the first shot are: chunk i N + j is the j-th of the i-th member."""

    def __init__(self, own: Array, stop: Stop, position: int, buffers: _Buffers) -> None:
        self._members = stop.round.group.size
        self._position = position
        self._own = own
        payload = stop.round.payload
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


def _items(buffer: Array, stop: Stop) -> Array:
    """The same bytes, counted in the payload's units."""
    itemsize = stop.round.payload.itemsize
    items: Array = buffer if itemsize == 1 else buffer.view(np.dtype((np.void, itemsize)))
    return items
