"""Coded plans: a rank contributes its part of the sum, and gets the result of a step when it is
ready, with or without that part.

The relay's thread runs independently, so a straggler finds the results of the steps that it missed.
It passes them at its next safe points, on a few samples each, and applies the others' gradients
instead of its own. If it is so far behind that these aren't kept any more, it loads another rank's
snapshot instead (`snapshot.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from time import monotonic, sleep

import numpy as np
import torch

from thalweg.codes import Allocation
from thalweg.compress import SummableCodec
from thalweg.engine.arithmetic import Arithmetic
from thalweg.engine.first_k_node import FirstKNode
from thalweg.engine.tree_node import ElementType, Node, Piece
from thalweg.engine.tree_relay import Relay, join_tree
from thalweg.errors import RunError
from thalweg.members.world import World
from thalweg.plan import Plan
from thalweg.redundancy import allocation_of, fastest, is_compensated
from thalweg.schedules import Schedule, check, coded_tree
from thalweg.training.buckets import FlatBucket, Layout
from thalweg.training.exchanges.compressed import CompressedBucket, Compression
from thalweg.training.exchanges.rounds import Exchange
from thalweg.training.finite import is_finite, not_finite
from thalweg.training.plan_context import PlanContext
from thalweg.training.snapshot import Snapshot
from thalweg.transports import Array

DRAIN_POLL_SECONDS = 0.01
TREE_EVICTION_SECONDS = 20.0  # of absence, after which the tree is rebuilt without that rank


class TreeExchange(Exchange):
    """The exchange of buckets through a relay, and the place of this rank in the coded tree."""

    def __init__(self, context: PlanContext, plan: Plan, layout: Layout) -> None:
        self._clock = context.clock
        self._world = world = context.world.namespace(f"tree/{context.clock.step}")
        self.allocation = allocation_of(plan, context.group)
        self.presence = float(self.allocation.cell_weights(world.rank).sum())
        self._data_position = context.data_position
        # The steps whose sum was scaled up from a part of the data, and the size of that part.
        self.approximate: dict[int, float] = {}
        # This rank continued without a result: its state is no other rank's until it loads one.
        self.has_diverged = False
        self._waits = _beyond(plan) == "wait"  # if more ranks are absent than the code tolerates
        self._layout = layout
        self._vectors = SummedVectors(layout, Compression.of(plan), world.rank)
        self.relay = _open(context, plan, world, self.allocation, self._vectors)
        self._snapshot = context.snapshot
        self._begun = -1  # the last step with a contribution
        self._last = -1  # the last step with a result

    @property
    def is_root(self) -> bool:
        return self.relay.rank == self.allocation.host

    def needs(self, rank: int, absent: Mapping[int, float]) -> bool:
        """True if the tree must be rebuilt without this rank: it is the root, or absent for long;
        or more ranks are absent than the code tolerates, alone or with the stragglers. `absent` has
        the time since which each is."""
        if (
            rank == self.allocation.host
            or monotonic() - absent.get(rank, monotonic()) > TREE_EVICTION_SECONDS
        ):
            return True
        return self._waits and (len(absent) > self.relay.spare or self.relay.is_overdue)

    def left_behind(self, step: int) -> bool:
        """True if a result that this rank needs isn't available any more."""
        return self.has_diverged or self.relay.result_expired(step)

    def serve(self) -> None:
        """Send this rank's snapshot to ranks that requested it: between two steps, or while it
        waits for a result, as its state is that before the step until then."""
        if self.relay.state_requested():
            self.relay.send_state(self._snapshot().in_bytes())

    def request_snapshot(self, after: int = -1) -> Snapshot:
        """The snapshot of another rank past the step `after`; the parent's if it answers."""
        state = Snapshot.of_bytes(
            self.relay.request_state(lambda a: Snapshot.of_bytes(a).step > after)
        )
        self.relay.follow_from(state.step)
        self.has_diverged = False
        return state

    def leave(self, seconds: float, state: Snapshot) -> bool:
        """Wait until all neighbours have ended as well, or failed, as they may need results and
        this state until then. False after a timeout."""
        self.relay.send_state(state.in_bytes(), from_now_on=True)
        deadline = monotonic() + seconds
        with suppress(RunError):  # the store is lost, and so are the others
            self._world.put(f"through/{self.relay.rank}", "")
            while any(not self._is_through(rank) for rank in self.relay.present()):
                if monotonic() >= deadline:
                    return False
                sleep(DRAIN_POLL_SECONDS)
        return True

    def close(self) -> None:
        self._layout = replace(self._layout, buckets=())
        self.relay.close()

    def _is_through(self, rank: int) -> bool:
        return self._world.store_client.call(lambda store: store.check([f"through/{rank}"]))

    # The exchange

    @property
    def is_awaited(self) -> bool:
        return self._data_position.counts

    def begin(self) -> None:
        if self._last == self._clock.step:
            raise RunError(
                "two backwards in one step: a code would add the sums of the first again",
                "wrap all but the last in run.no_sync(), and don't use reentrant checkpoints",
            )
        self._data_position.refuse_second_step()
        self._data_position.refuse_skipped_batch()

    def send(self, bucket: FlatBucket, *, is_finite: bool) -> None:
        step = self._clock.step
        for index, vector in self._vectors.contribution(bucket, step):
            if not is_finite:  # all nan: each piece may be decoded from other answers
                vector.view(np.uint8).fill(0xFF)
            self.relay.contribute(step, index, vector)
        self._begun = step

    def finish(self) -> None:
        step = self._clock.step
        results = self.relay.result(step, when_asked=self.serve)
        self._last = step
        if results is None:  # the result has expired: the next safe point loads a snapshot
            self.has_diverged = True
            for bucket in self._layout.buckets:
                bucket.vector.fill(0)
            return
        if results.covered:
            self.approximate[step] = results.covered / self.allocation.cells
        self._vectors.open(step)
        for piece, array in zip(self.relay.pieces, results.arrays, strict=True):
            self._vectors.all[piece.round][piece.start : piece.stop] = array
        self._vectors.finish(step)

    def is_good(self, flags: torch.Tensor) -> bool:
        """True if the result is finite. It is the same on all ranks, whichever answers it was
        decoded from."""
        flats = {str(bucket.index): bucket.flat for bucket in self._layout.buckets}
        return all(map(is_finite, flats.values())) or not not_finite(flats)

    def drop(self) -> None:
        """Nothing has to be waited for, as copies are sent. But a contribution can't be
        withdrawn."""
        if self._begun == self._clock.step != self._last:
            raise RunError(
                "a backward failed after a part of its gradients was sent",
                "let this worker end: the others continue without it, and it may rejoin",
            )


class SummedVectors:
    """All vectors in which the buckets of a layout are sent: each whole, or its payload and its
    uncompressed part. They are summed on their way up a tree, so payloads must be linear, and take
    one round."""

    def __init__(self, layout: Layout, compression: Compression, rank: int) -> None:
        self.all: list[Array] = []
        self.types: list[ElementType] = []
        self._layout = layout
        self._compressed: dict[int, tuple[CompressedBucket, SummableCodec]] = {}
        self._under_way: dict[int, Iterator[Array]] = {}
        self._step = -1  # of the payloads under way
        self._of: dict[int, range] = {}
        compressed = compression.buckets(layout, rank)
        for bucket in layout.buckets:
            first = len(self.all)
            own = compressed.get(bucket.index)
            if own is not None and isinstance(own.codec, SummableCodec):
                self._compressed[bucket.index] = own, own.codec
                self._add(next(self._payload(bucket, 0)), own.sum_arithmetic)
            rest = bucket.vector[bucket.arrangement.length :]
            if len(rest):
                self._add(rest, bucket.arithmetic)
            self._of[bucket.index] = range(first, len(self.all))

    def _add(self, vector: Array, arithmetic: Arithmetic) -> None:
        self.all.append(vector)
        self.types.append(ElementType(vector.dtype, arithmetic))

    def _payload(self, bucket: FlatBucket, step: int) -> Iterator[Array]:
        """The encoded bucket; its iterator decodes the sum."""
        compressed, codec = self._compressed[bucket.index]
        values = compressed.load()
        return codec.rounds(values, values, step, keep=False)

    def contribution(self, bucket: FlatBucket, step: int) -> list[tuple[int, Array]]:
        """Copies of this rank's contributions, each with the index of its vector."""
        self._encode(bucket, step)
        return [(number, self.all[number].copy()) for number in self._of[bucket.index]]

    def finish(self, step: int) -> None:
        """Write the step's result, which the vectors hold, into the buckets."""
        for index, payload in list(self._under_way.items()):
            for _ in payload:
                raise AssertionError("a linear codec has one round")
            self._compressed[index][0].store()
        self._under_way.clear()

    def open(self, step: int) -> None:
        """Prepare the vectors for a step's result, also those without a contribution of this
        rank."""
        if self._step != step:
            self._under_way.clear()  # of a step without a result
        for bucket in self._layout.buckets:
            if bucket.index not in self._under_way:
                self._encode(bucket, step)

    def _encode(self, bucket: FlatBucket, step: int) -> None:
        if bucket.index in self._compressed:
            payload = self._payload(bucket, step)
            next(payload)
            self._step = step
            self._under_way[bucket.index] = payload


def _open(
    context: PlanContext, plan: Plan, world: World, allocation: Allocation, vectors: SummedVectors
) -> Relay:
    group = context.group

    @cache
    def schedule(elements: int, itemsize: int) -> Schedule:
        built = coded_tree(group, elements, itemsize, allocation)
        check(built)
        return built

    make: Callable[[int, Sequence[Piece], Allocation], Node] = Node
    if is_compensated(plan):
        make = partial(FirstKNode, k=fastest(plan, group.size))
    return join_tree(
        world,
        context.abort_flag,
        allocation,
        [schedule(len(vector), vector.itemsize) for vector in vectors.all],
        vectors.types,
        beyond=_beyond(plan),
        make=make,
        first=context.clock.step,
    )


def _beyond(plan: Plan) -> str:
    """The plan's choice for steps with more stragglers than the code tolerates."""
    assert plan.redundancy is not None
    return str(plan.redundancy.arguments.get("beyond", "wait"))
