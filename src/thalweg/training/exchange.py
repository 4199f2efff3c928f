"""How payloads go round: added up by the plan's own schedules, gathered whole, or in two shots.

Two shots: everybody sends each member its shard of the payload, the member reduces the shards that
it got to one, and the reduced shards are gathered. Each rank sends 2 (N-1)/N of a payload then,
however many ranks there are; gathering whole payloads takes N-1 of them.

Tensors that go as they are, and scales that belong to payloads, travel beside the first round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch

from thalweg.compress import Codec, Elementwise, Gathered, Summed
from thalweg.runtime import Chain, Task, View, arithmetic_of
from thalweg.schedules.chunks import split
from thalweg.training.itinerary import Stop
from thalweg.training.layout import FlatBucket
from thalweg.transports import Array

EXACT = "exact"  # the payload of tensors that go as they are


@dataclass(frozen=True, slots=True, kw_only=True)
class Trip:
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


class Buffers:
    """For payloads, made when they are first needed: groups may differ from step to step."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int], Array] = {}

    def of(self, purpose: str, nbytes: int) -> Array:
        key = purpose, nbytes
        if key not in self._kept:
            self._kept[key] = np.empty(nbytes, np.uint8)
        return self._kept[key]


def exchange(codec: Codec, trip: Trip, buffers: Buffers) -> Chain:
    if isinstance(codec, Summed):
        yield from _added_up(codec, trip)
    elif isinstance(codec, Elementwise) and len(trip.ways) > 1:
        yield from _in_two_shots(codec, trip, buffers)
    else:
        assert isinstance(codec, Gathered)
        yield from _gathered(codec, trip, buffers)


def _added_up(codec: Summed, trip: Trip) -> Chain:
    payloads = codec.rounds(trip.values, trip.out, trip.step, keep=trip.keep)
    beside = trip.beside(None)
    for stop, payload in zip(trip.ways, payloads, strict=False):
        yield [trip.task(stop, payload, trip.carries), *beside]
        beside = []
    for _ in payloads:  # what follows the last round
        raise AssertionError("the codec has more rounds than it declares")


def _gathered(codec: Gathered, trip: Trip, buffers: Buffers) -> Chain:
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


def _in_two_shots(codec: Elementwise, trip: Trip, buffers: Buffers) -> Chain:
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

    def __init__(self, own: Array, stop: Stop, position: int, buffers: Buffers) -> None:
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
