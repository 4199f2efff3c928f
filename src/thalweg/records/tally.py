"""What a rank's steps took, added up: for the table at the end of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from thalweg.records.record import Step


@dataclass(slots=True, kw_only=True)
class Tally:
    """Seconds, over all steps but the first, which sets things up. `settled` is waiting at safe
    points and in calls between steps."""

    steps: int = 0
    seconds: float = 0.0
    computing: float = 0.0
    exposed: float = 0.0
    hidden: float = 0.0
    settled: float = 0.0
    encoding: float = 0.0
    nbytes: int = 0  # sent to other hosts

    def add(self, step: Step) -> None:
        self.steps += 1
        self.seconds += step.seconds
        self.computing += step.computing
        self.exposed += step.exposed
        self.hidden += step.hidden
        self.settled += step.settled
        self.encoding += sum(each.ended - each.began for each in step.encodings)
        self.nbytes += sum(flow.nbytes for flow in step.flows)

    def each(self) -> dict[str, float]:
        """A step's, on average; `steps` is their number."""
        number = max(1, self.steps)
        means = {name: value / number for name, value in asdict(self).items()}
        return {**means, "steps": float(self.steps)}

    def entries(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, entries: Mapping[str, Any]) -> Self:
        return cls(**entries)
