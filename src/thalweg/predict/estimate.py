"""What a step is predicted to take, and what of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Seconds of a step, which add up to all of it."""

    compute: float = 0.0  # forward, backward, optimizer
    encode: float = 0.0
    decode: float = 0.0
    transfer: float = 0.0  # that nothing hides
    waiting: float = 0.0  # for late workers

    @property
    def seconds(self) -> float:
        return self.compute + self.encode + self.decode + self.transfer + self.waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Of one plan: the mean of a step's seconds, and an interval that it is in four times of five.
    `form` says how it was reckoned: by replay, or in closed form."""

    sync: str
    workers: int
    parts: Breakdown
    low: float
    high: float
    form: str
    assumed: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """The mean of a step."""
        return self.parts.seconds
