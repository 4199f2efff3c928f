"""A rank's clock beside the run's: what the common one showed at any moment of the rank's own.

    run's time = t + offset(t)

The offset is known at a few moments, straight between two of them, and constant before the first
and after the last. Where two of them are further apart than clocks drift, somebody has set the
clock, and the earlier holds until the later.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Self

from thalweg.records.record import Moment

DRIFT = 1e-3  # seconds a second, at most: a kernel slews a clock by half of it


@dataclass(frozen=True, slots=True)
class Clock:
    """The moments at which it is known, in order; at least one."""

    moments: tuple[Moment, ...]
    _at: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_at", tuple(moment.at for moment in self.moments))

    @classmethod
    def of(cls, moments: Iterable[Moment]) -> Self:
        """Of two at the same moment, the later counts."""
        found = {moment.at: moment for moment in moments}
        return cls(tuple(found[at] for at in sorted(found)))

    @classmethod
    def shifted(cls, offset: float) -> Self:
        """One that is off by so much, always."""
        return cls((Moment(at=0.0, offset=offset, error=0.0),))

    def __call__(self, at: float) -> float:
        """The run's time."""
        after = bisect_right(self._at, at)
        if after == 0:
            return at + self.moments[0].offset
        before = self.moments[after - 1]
        if after == len(self.moments):
            return at + before.offset
        then = self.moments[after]
        passed, grown = then.at - before.at, then.offset - before.offset
        if abs(grown) > DRIFT * passed + before.error + then.error:
            return at + before.offset
        return at + before.offset + grown * (at - before.at) / passed

    @property
    def error(self) -> float:
        """Seconds, usually."""
        return median(moment.error for moment in self.moments)
