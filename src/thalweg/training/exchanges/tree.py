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
from dataclasses import dataclass, replace
from functools import cache, partial
from math import inf
from time import monotonic, sleep

import numpy as np
import torch
from torch import nn

from thalweg.codes import Allocation
from thalweg.compress import SummableCodec, arrange
from thalweg.engine.arithmetic import Arithmetic, arithmetic_of
from thalweg.engine.arrivals import Arrivals
from thalweg.engine.collectives import RoundCounter
from thalweg.engine.first_k_node import FirstKNode
from thalweg.engine.tree_node import ElementType, Node, Piece
from thalweg.engine.tree_relay import Relay, join_tree
from thalweg.errors import RunError
from thalweg.members.abort import AbortFlag
from thalweg.members.world import World
from thalweg.plan import Plan
from thalweg.redundancy import allocation_of, fastest, is_compensated
from thalweg.schedules import Group, Schedule, check, coded_tree
from thalweg.training.buckets import FlatBucket, Layout
from thalweg.training.data.position import DataPosition
from thalweg.training.exchanges.compressed import CompressedBucket, Compression
from thalweg.training.exchanges.rounds import Fill, StatelessExchange
from thalweg.training.finite import is_finite, not_finite
from thalweg.training.snapshot import Snapshot
from thalweg.training.sources.gradients import GradientSynchronizer, layout_of
from thalweg.transports import Array

DRAIN_POLL_SECONDS = 0.01
TREE_EVICTION_SECONDS = 20.0  # of absence, after which the tree is rebuilt without that rank


class CodedSynchronizer(GradientSynchronizer):
    """Synchronises gradients by a coded tree. `data_position` tells whether the current batch
    belongs to the sum; `snapshot` is this rank's state before the step."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        plan: Plan,
        group: Group,
        clock: RoundCounter,
        world: World,
        abort_flag: AbortFlag,
        *,
        data_position: DataPosition,
        snapshot: Callable[[], Snapshot],
        on_interrupted: Callable[[], None],
        report: Callable[[Sequence[str]], None],
    ) -> None:
        compression = Compression.of(plan)
        arranged = arrange if compression is None else compression.arrange
        layout = layout_of(parameters, plan.settings.bucket, arranged)
        vectors = SummedVectors(layout, compression, world.rank)
        allocation = allocation_of(plan, group)
        relay = _open(plan, group, allocation, vectors, world, abort_flag, clock.step)
        self.tree = TreeMember(relay, allocation, world, snapshot, waits=_beyond(plan) == "wait")
        self._data_position = data_position
        self._relayed = TreeExchange(self.tree, relay, layout, vectors, clock, data_position)
        largest = inf if compression is None else compression.compressor.largest
        super().__init__(parameters, layout, self._relayed, on_interrupted, report, largest)

    def abort(self) -> None:
        super().abort()
        self.tree.close()

    def _is_good(self) -> bool:
        """True if the result is finite. It is the same on all ranks, whichever answers it was
        decoded from."""
        flats = {str(bucket.index): bucket.flat for bucket in self._layout.buckets}
        return all(map(is_finite, flats.values())) or not not_finite(flats)

    def _ready(self, name: str, parameter: torch.Tensor) -> None:
        self._data_position.computed = True
        super()._ready(name, parameter)

    @property
    def approximate(self) -> Mapping[int, float]:
        """The steps whose sum was scaled up from a part of the data, and the size of that part."""
        return self._relayed.approximate


class TreeMember:
    """The place of this rank in a coded tree."""

    def __init__(
        self,
        relay: Relay,
        allocation: Allocation,
        world: World,
        snapshot: Callable[[], Snapshot],
        *,
        waits: bool,
    ) -> None:
        self.allocation = allocation
        self._waits = waits  # if more ranks are absent than the code tolerates
        self._relay = relay
        self._world = world
        self._snapshot = snapshot
        self._diverged = False

    @property
    def is_root(self) -> bool:
        return self._relay.rank == self.allocation.host

    @property
    def arrivals(self) -> Arrivals:
        return self._relay.arrivals

    def needs(self, rank: int, absent: Mapping[int, float]) -> bool:
        """True if the tree must be rebuilt without this rank: it is the root, or absent for long;
        or more ranks are absent than the code tolerates, alone or with the stragglers. `absent` has
        the time since which each is."""
        if (
            rank == self.allocation.host
            or monotonic() - absent.get(rank, monotonic()) > TREE_EVICTION_SECONDS
        ):
            return True
        return self._waits and (len(absent) > self._relay.spare or self._relay.is_overdue)

    def has(self, step: int) -> bool:
        """True if the result of a step is here, so that no rank waits for this rank's part."""
        return self._relay.has(step)

    def left_behind(self, step: int) -> bool:
        """True if a result that this rank needs isn't available any more."""
        return self._diverged or self._relay.result_expired(step)

    @property
    def has_diverged(self) -> bool:
        """True if this rank's state is no other rank's, until it loads a snapshot."""
        return self._diverged

    def mark_diverged(self) -> None:
        """Record that this rank continued without a result, so its state is no other rank's."""
        self._diverged = True

    def serve(self) -> None:
        """Send this rank's snapshot to ranks that requested it: between two steps, or while it
        waits for a result, as its state is that before the step until then."""
        if self._relay.state_requested():
            self._relay.send_state(self._snapshot().in_bytes())

    def request_snapshot(self, after: int = -1) -> Snapshot:
        """The snapshot of another rank past the step `after`; the parent's if it answers."""
        state = Snapshot.of_bytes(
            self._relay.request_state(lambda a: Snapshot.of_bytes(a).step > after)
        )
        self._relay.follow_from(state.step)
        self._diverged = False
        return state

    def leave(self, seconds: float, state: Snapshot) -> bool:
        """Wait until all neighbours have ended as well, or failed, as they may need results and
        this state until then. False after a timeout."""
        self._relay.send_state(state.in_bytes(), from_now_on=True)
        deadline = monotonic() + seconds
        with suppress(RunError):  # the store is lost, and so are the others
            self._world.put(f"through/{self._relay.rank}", "")
            while any(not self._is_through(rank) for rank in self._relay.present()):
                if monotonic() >= deadline:
                    return False
                sleep(DRAIN_POLL_SECONDS)
        return True

    @property
    def is_closed(self) -> bool:
        """True after `close`, also where a rendezvous ended in an error."""
        return self._relay.is_closed

    def close(self) -> None:
        self._relay.close()

    def _is_through(self, rank: int) -> bool:
        return self._world.store_client.call(lambda store: store.check([f"through/{rank}"]))


@dataclass(frozen=True, slots=True)
class SummedVector:
    """One vector of a step that is summed."""

    vector: Array
    arithmetic: Arithmetic


class SummedVectors:
    """All vectors in which the buckets of a layout are sent: each whole, or its payload and its
    uncompressed part. They are summed on their way up a tree, so payloads must be linear, and take
    one round."""

    def __init__(self, layout: Layout, compression: Compression | None, rank: int) -> None:
        self.all: list[SummedVector] = []
        self._layout = layout
        self._compressed: dict[int, CompressedBucket] = {}
        self._under_way: dict[int, Iterator[Array]] = {}
        self._step = -1  # of the payloads under way
        self._of: dict[int, list[int]] = {}
        for bucket in layout.buckets:
            if compression is not None:
                self._compressed[bucket.index] = CompressedBucket(bucket, compression, rank)
            vectors = self._vectors(bucket)
            first = len(self.all)
            self._of[bucket.index] = list(range(first, first + len(vectors)))
            self.all += vectors

    def contribution(self, bucket: FlatBucket, step: int) -> list[tuple[int, Array]]:
        """Copies of this rank's contributions, each with the index of its vector."""
        self._encode(bucket, step)
        return [(number, self.all[number].vector.copy()) for number in self._of[bucket.index]]

    def finish(self, step: int) -> None:
        """Write the step's result, which the vectors hold, into the buckets."""
        for index, payload in list(self._under_way.items()):
            for _ in payload:
                raise AssertionError("a linear codec has one round")
            self._compressed[index].store()
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
        compressed = self._compressed.get(bucket.index)
        if compressed is None or not isinstance(compressed.codec, SummableCodec):
            return
        values = compressed.load()
        payload = compressed.codec.rounds(values, values, step, keep=False)
        next(payload)
        self._step = step
        self._under_way[bucket.index] = payload

    def _vectors(self, bucket: FlatBucket) -> list[SummedVector]:
        compressed = self._compressed.get(bucket.index)
        rest = bucket.vector[bucket.arrangement.length :]
        exact = [SummedVector(rest, bucket.arithmetic)] if len(rest) else []
        if compressed is None or not isinstance(compressed.codec, SummableCodec):
            return exact
        values = compressed.load()
        payload = next(compressed.codec.rounds(values, values, 0, keep=False))
        return [SummedVector(payload, arithmetic_of(compressed.carries)), *exact]


class TreeExchange(StatelessExchange):
    """The exchange of buckets through a relay."""

    def __init__(
        self,
        tree: TreeMember,
        relay: Relay,
        layout: Layout,
        vectors: SummedVectors,
        clock: RoundCounter,
        data_position: DataPosition,
    ) -> None:
        self.approximate: dict[int, float] = {}
        self._tree = tree
        self._relay = relay
        self._presence = float(tree.allocation.cell_weights(relay.rank).sum())
        self._layout = layout
        self._vectors = vectors
        self._clock = clock
        self._data_position = data_position
        self._begun = -1  # the last step with a contribution
        self._last = -1  # the last step with a result

    def begin(self) -> None:
        if self._last == self._clock.step:
            raise RunError(
                "two backwards in one step: a code would add the sums of the first again",
                "wrap all but the last in run.no_sync(), and don't use reentrant checkpoints",
            )
        self._data_position.refuse_second_step()
        self._data_position.refuse_skipped_batch()

    def send(self, bucket: FlatBucket, fill: Fill) -> None:
        if self._data_position.counts:
            is_finite = fill(1.0, self._presence)
            for index, vector in self._vectors.contribution(bucket, self._clock.step):
                if not is_finite:  # all nan: each piece may be decoded from other answers
                    vector.view(np.uint8).fill(0xFF)
                self._relay.contribute(self._clock.step, index, vector)
            self._begun = self._clock.step

    def finish(self) -> None:
        step = self._clock.step
        results = self._relay.result(step, when_asked=self._tree.serve)
        self._last = step
        if results is None:  # the result has expired: the next safe point loads a snapshot
            self._tree.mark_diverged()
            for bucket in self._layout.buckets:
                bucket.vector.fill(0)
            return
        if results.covered:
            self.approximate[step] = results.covered / self._tree.allocation.cells
        self._vectors.open(step)
        for piece, array in zip(self._relay.pieces, results.arrays, strict=True):
            self._vectors.all[piece.round].vector[piece.start : piece.stop] = array
        self._vectors.finish(step)

    def release(self) -> None:
        self._layout = replace(self._layout, buckets=())

    def drop(self) -> None:
        """Nothing has to be waited for, as copies are sent. But a contribution can't be
        withdrawn."""
        if self._begun == self._clock.step != self._last:
            raise RunError(
                "a backward failed after a part of its gradients was sent",
                "let this worker end: the others continue without it, and it may rejoin",
            )


def _open(
    plan: Plan,
    group: Group,
    allocation: Allocation,
    vectors: SummedVectors,
    world: World,
    abort_flag: AbortFlag,
    first: int,
) -> Relay:
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
        abort_flag,
        allocation,
        [schedule(len(one.vector), one.vector.itemsize) for one in vectors.all],
        [ElementType(one.vector.dtype, one.arithmetic) for one in vectors.all],
        beyond=_beyond(plan),
        make=make,
        first=first,
    )


def _beyond(plan: Plan) -> str:
    """The plan's choice for steps with more stragglers than the code tolerates."""
    assert plan.redundancy is not None
    return str(plan.redundancy.arguments.get("beyond", "wait"))
