"""The exchange of coded plans, whose ranks form a tree: a rank contributes its part of the sum, and
receives the result of a step when it is ready, with or without that part.

The allocation divides each batch into cells, and says which cells each rank computes, and with
which weights. The relay is a thread of each rank that forwards contributions up the tree and
results down it, independently of the training thread. So a straggler finds the results of the steps
that it missed. At its next safe points, between two batches, it catches up: for each missed step it
computes a few samples only, and applies the result of the other ranks instead of its own gradients.
If its relay doesn't keep these results any more, it loads another rank's snapshot (`snapshot.py`).
"""

from __future__ import annotations

import logging
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
from thalweg.training.exchanges.exchange import Exchange
from thalweg.training.finite import is_finite, not_finite
from thalweg.training.plan_context import PlanContext
from thalweg.training.snapshot import Snapshot
from thalweg.transports import Array

DRAIN_POLL_SECONDS = 0.01
TREE_EVICTION_SECONDS = 20.0  # the tree is rebuilt without a rank that is absent for longer
log = logging.getLogger("thalweg")


class TreeExchange(Exchange):
    """The exchange of one rank's buckets through its relay in the coded tree."""

    waits_for_all = False

    def __init__(self, context: PlanContext, plan: Plan, layout: Layout) -> None:
        self._context = context
        self._world = world = context.world.namespace(f"tree/{context.clock.step}")
        self.allocation: Allocation = allocation_of(plan, context.group)
        # A participation flag is 1 in every cell, and is summed with the weights of the cells.
        self.presence = float(self.allocation.cell_weights(world.rank).sum())
        # True if a step with more stragglers than the code tolerates waits for them.
        self._waits = _beyond(plan) == "wait"
        self._layout = layout
        self._vectors = SummedVectors(layout, Compression.of(plan), world.rank)
        self.relay = _open(context, plan, world, self.allocation, self._vectors)
        self.arrivals = self.relay.arrivals
        self.warns = world.rank == self.allocation.host
        self._contributed_step = -1  # the last step to which this rank contributed
        self._finished_step = -1  # the last step whose result was received, or had expired

    def needs(self, rank: int, absent: Mapping[int, float]) -> bool:
        """True if the rank hosts the root, or is absent for more than `TREE_EVICTION_SECONDS`;
        under a plan that waits for stragglers also if more ranks are absent than the code
        tolerates, or if the current step is overdue."""
        if (
            rank == self.allocation.host
            or monotonic() - absent.get(rank, monotonic()) > TREE_EVICTION_SECONDS
        ):
            return True
        return self._waits and (len(absent) > self.relay.spare or self.relay.is_overdue)

    def has_result(self, step: int) -> bool:
        return self.relay.has(step)

    def missed_snapshot(self, step: int) -> Snapshot | None:
        """The snapshot of a rank that is past this step, the parent's if it answers, if this rank
        has diverged or the result of `step` isn't kept any more. One that can't be read is
        requested from another rank."""
        if not self.has_diverged and not self.relay.result_expired(step):
            return None

        def suits(state: Array) -> bool:
            try:
                return Snapshot.of_bytes(state).step > step
            except RunError as error:
                log.warning("rank %d asks another: %s", self.relay.rank, error.problem)
                return False

        snapshot = Snapshot.of_bytes(self.relay.request_state(suits))
        self.relay.follow_from(snapshot.step)
        self.has_diverged = False
        return snapshot

    def serve(self) -> None:
        """Send this rank's snapshot to the ranks that requested it. It may be called between two
        steps, and while this rank waits for a result, before which its state doesn't change."""
        if self.relay.state_requested():
            self.relay.send_state(self._context.snapshot().in_bytes(self.relay.rank))

    def leave(self, seconds: float, last: Callable[[], Snapshot | None]) -> bool:
        """Wait until all neighbours in the tree have ended too, or failed: until then they may
        request results and this snapshot. False after this many seconds."""
        if self.relay.is_closed or (snapshot := last()) is None:
            return True
        self.relay.send_state(snapshot.in_bytes(self.relay.rank), from_now_on=True)
        deadline = monotonic() + seconds
        with suppress(RunError):  # a lost store: no neighbour can be waited for
            self._world.put(f"through/{self.relay.rank}", "")
            while any(not self._has_ended(rank) for rank in self.relay.present()):
                if monotonic() >= deadline:
                    return False
                sleep(DRAIN_POLL_SECONDS)
        return True

    def close(self) -> None:
        self._layout = replace(self._layout, buckets=())  # the vectors still refer to them
        self.relay.close()

    def _has_ended(self, rank: int) -> bool:
        return self._world.store_client.call(lambda store: store.check([f"through/{rank}"]))

    # The exchange

    @property
    def is_awaited(self) -> bool:
        return self._context.data_position.counts

    def begin(self) -> None:
        if self._finished_step == self._context.clock.step:
            raise RunError(
                "two backwards in one step: a code would add the sums of the first again",
                "step after each backward, or wrap all but the last in run.no_sync(); for an "
                "optimizer that evaluates several times, such as LBFGS, use another plan",
            )
        self._context.data_position.refuse_other_batch()

    def send(self, bucket: FlatBucket, *, is_finite: bool) -> None:
        step = self._context.clock.step
        for index, vector in self._vectors.contribution(bucket, step):
            if not is_finite:  # every piece is NaN, as pieces may be decoded from different ranks
                vector.view(np.uint8).fill(0xFF)
            self.relay.contribute(step, index, vector)
        self._contributed_step = step

    def finish(self) -> None:
        step = self._context.clock.step
        results = self.relay.result(step, when_asked=self.serve)
        self._finished_step = step
        if results is None:  # the result has expired: the next safe point loads a snapshot
            self.has_diverged = True
            for bucket in self._layout.buckets:
                bucket.vector.fill(0)
            return
        if results.covered:  # the number of cells in the sum, if not all are
            part = results.covered / self.allocation.cells
            self._context.notify("approximate", step, f"gradient of {part:.3g} of the batch", part)
        self._vectors.prepare(step)
        for piece, array in zip(self.relay.pieces, results.arrays, strict=True):
            vector = self._vectors.all[piece.round]  # the n-th round sums the n-th vector
            vector[piece.start : piece.stop] = array
        self._vectors.finish(step)

    def is_good(self, flags: torch.Tensor) -> bool:
        """True if the result is finite. It is the same on all ranks, whichever answers it was
        decoded from."""
        flats = {str(bucket.index): bucket.flat for bucket in self._layout.buckets}
        return all(map(is_finite, flats.values())) or not not_finite(flats)

    def drop(self) -> None:
        """The buckets are free at once, as copies of them were sent. RunError if this rank has
        contributed to the step, as a contribution can't be withdrawn."""
        if self._contributed_step == self._context.clock.step != self._finished_step:
            raise RunError(
                "a backward failed after a part of its gradients was sent",
                "let this worker end: the others continue without it, and it may rejoin",
            )


class SummedVectors:
    """The vectors in which the buckets of a layout are sent: of a compressed bucket its payload and
    its uncompressed part, of another the whole bucket. The relays sum vectors on their way up the
    tree, so a codec must be linear, and need one round only."""

    def __init__(self, layout: Layout, compression: Compression, rank: int) -> None:
        # A codec encodes into the same array in every step, so these stay valid.
        self.all: list[Array] = []
        self.types: list[ElementType] = []
        self._layout = layout
        self._compressed: dict[int, tuple[CompressedBucket, SummableCodec]] = {}
        # Iterators of `_payload` by bucket: encoded for the step `_encoded_step`, not yet decoded.
        self._encoded: dict[int, Iterator[Array]] = {}
        self._encoded_step = -1
        self._indices: dict[int, range] = {}  # of each bucket's vectors in `all`
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
            self._indices[bucket.index] = range(first, len(self.all))

    def _add(self, vector: Array, arithmetic: Arithmetic) -> None:
        self.all.append(vector)
        self.types.append(ElementType(vector.dtype, arithmetic))

    def _payload(self, bucket: FlatBucket, step: int) -> Iterator[Array]:
        """An iterator over the only payload of the bucket. Its first `next` encodes the bucket into
        the vector; exhausting it decodes the sum that the vector then has."""
        compressed, codec = self._compressed[bucket.index]
        values = compressed.load()
        return codec.rounds(values, values, step, keep=False)

    def contribution(self, bucket: FlatBucket, step: int) -> list[tuple[int, Array]]:
        """Copies of this rank's contributions, each with the index of its vector."""
        self._encode(bucket, step)
        return [(index, self.all[index].copy()) for index in self._indices[bucket.index]]

    def finish(self, step: int) -> None:
        """Decode the step's result, which the vectors have, into the buckets."""
        for index, payload in list(self._encoded.items()):
            for _ in payload:
                raise AssertionError("a linear codec has one round")
            self._compressed[index][0].store()
        self._encoded.clear()

    def prepare(self, step: int) -> None:
        """Prepare the vectors for a step's result. If this rank didn't contribute to the step, that
        encodes its buckets, since only an encoded payload can be decoded."""
        if self._encoded_step != step:
            self._encoded.clear()  # payloads of a step without a result
        for bucket in self._layout.buckets:
            if bucket.index not in self._encoded:
                self._encode(bucket, step)

    def _encode(self, bucket: FlatBucket, step: int) -> None:
        if bucket.index in self._compressed:
            payload = self._payload(bucket, step)
            next(payload)  # its value is the vector in `all`
            self._encoded_step = step
            self._encoded[bucket.index] = payload


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
