"""The interface of exchanges: the ways in which the buckets of a step are synchronised.

A source (`sources/`) fills the buckets and takes the results; the exchange transfers them. An
exchange needs no run: its members are enough.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from thalweg.codes import Allocation
from thalweg.engine.arrivals import Arrivals
from thalweg.training.buckets import FlatBucket
from thalweg.training.compression_overlap import Timing
from thalweg.training.plan_state import PlanState

if TYPE_CHECKING:
    from thalweg.training.exchanges.compressed import CompressedBucket
    from thalweg.training.snapshot import Snapshot


class Exchange:
    """Synchronises the buckets of a step; the base class does nothing, which is right for a source
    that transfers its buckets by other means. Gradients are multiplied by `factor`, and each one
    that took part is marked with `presence`. `is_awaited` is False in a step in which this rank has
    nothing to contribute. The second half is for exchanges that wait for no rank."""

    factor = 1.0
    presence = 1.0
    compressed: Collection[CompressedBucket] = ()  # the buckets with kept state
    kept_before: PlanState = MappingProxyType({})  # before the current step
    timings: Collection[Timing] = ()  # of the last steps on this rank
    arrivals: Arrivals | None = None  # those of its own, if the engine doesn't have them
    returns_gradients = True  # False: the exchange takes the step, and applies the result itself

    @property
    def is_awaited(self) -> bool:
        return True

    def begin(self) -> None:
        """The first gradient of a step is ready."""

    def repeat(self) -> None:
        """The step that begins next was interrupted, and is repeated with the same gradients."""

    def send(self, bucket: FlatBucket, *, is_finite: bool) -> None:
        """The bucket has the gradients; those that are not finite are zero in it."""

    def finish(self) -> None:
        """Wait until the buckets, all of which were sent, hold the plan's result."""

    def drop(self) -> None:
        """Wait until the buckets of a failed step are free again."""

    def restore_state(self) -> None:
        """Restore the kept state from before the step, which is skipped."""

    def is_good(self, flags: torch.Tensor) -> bool:
        """True if the plan's result, with these flags, is finite."""
        return not flags[-1]

    def apply(self) -> None:
        """The optimizer has stepped: put in place a result that isn't a gradient."""

    def make_equal(self) -> None:
        """Make the replicas equal, where the exchange lets them differ."""

    def close(self) -> None:
        """Free the memory and the connections; the exchange isn't used any more."""

    # Of exchanges that wait for no rank

    waits_for_all = True
    allocation: Allocation | None = None  # of the samples, if ranks compute the same ones
    has_diverged = False  # this rank continued without a result, and must load a snapshot
    warns = False  # this rank warns of layers that make replicas differ

    def has_result(self, step: int) -> bool:
        """True if the result of this step is here already, without this rank's part."""
        return False

    def serve(self) -> None:
        """Send this rank's snapshot to the ranks that requested it."""

    def missed_snapshot(self, step: int) -> Snapshot | None:
        """Another rank's snapshot, if this rank can't continue with `step` without one."""
        return None

    def take_skipped_steps(self) -> int:
        """The number of steps that the others took while this rank was absent; 0 afterwards."""
        return 0

    def needs(self, rank: int, absent: Mapping[int, float]) -> bool:
        """True if the others can't continue without this absent rank. `absent` has all members that
        are suspected to have failed, and since when."""
        return True

    def leave(self, seconds: float, last: Callable[[], Snapshot | None]) -> bool | None:
        """Wait until the other ranks can do without this one, and without its `last` snapshot.
        False after this many seconds; None if all members leave together."""
        return None
