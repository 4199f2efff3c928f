"""A plan's precision at work: a bucket is encoded, exchanged and decoded.

What a rank contributes is divided by the number of contributions first, so sums are means. Under
gradient plans what a biased codec leaves out is kept for the next step (`compress.feedback`). Where
parameters are averaged it is put back at once: mean Q + x - Q(x) keeps the mean over the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from thalweg.catalog import default_catalog
from thalweg.coding import is_relayed
from thalweg.compress import Arrangement, Codec, Compressor, Feedback, arrange
from thalweg.compress.compressor import own_arguments
from thalweg.declarations import Value
from thalweg.errors import NotFinite, PlanError
from thalweg.facts import Tensor
from thalweg.plan import Plan
from thalweg.rounds import BACK, INSIDE
from thalweg.runtime import Chain, Task
from thalweg.runtime.kernels import TORCH_KERNELS
from thalweg.training.exchange import Buffers, Trip, exchange
from thalweg.training.held import RESIDUAL, VOTE, Slots
from thalweg.training.itinerary import Stop
from thalweg.training.layout import FlatBucket
from thalweg.transports import Array


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
        self._buffers = Buffers()
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
            trip = Trip(
                bucket=self._bucket,
                rank=self._rank,
                stops=stops,
                step=step,
                first_round=first_round,
                values=self.to_encode(out),
                out=out,
                carries=self.carries,
            )
            yield from exchange(self.codec, trip, self._buffers)
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
