"""The total times of a rank's steps, and their table at the end of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

from thalweg.facts import Cluster, about
from thalweg.observe.records import StepRecord
from thalweg.observe.straggler import Straggler, log_line

MAX_TALLY_ROWS = 16
TALLY_COLUMNS = {  # and the headings of their means
    "seconds": "step time",
    "computing": "compute",
    "exposed": "exposed",
    "hidden": "overlapped",
    "settled": "blocked",
}


@dataclass(slots=True, kw_only=True)
class StepTotals:
    """Totals in seconds over all steps except the first, a warm-up. `settled` is the time blocked
    at safe points and in calls between steps."""

    steps: int = 0
    seconds: float = 0.0
    computing: float = 0.0
    exposed: float = 0.0
    hidden: float = 0.0
    settled: float = 0.0
    encoding: float = 0.0
    nbytes: int = 0  # sent to other hosts

    def add(self, step: StepRecord) -> None:
        self.steps += 1
        self.seconds += step.seconds
        self.computing += step.computing
        self.exposed += step.exposed
        self.hidden += step.hidden
        self.settled += step.settled
        self.encoding += sum(record.ended - record.began for record in step.encodings)
        self.nbytes += sum(flow.nbytes for flow in step.flows)

    def each(self) -> dict[str, float]:
        """The means per step; `steps` is their number."""
        number = max(1, self.steps)
        means = {name: value / number for name, value in asdict(self).items()}
        return {**means, "steps": float(self.steps)}


def summary_text(
    cluster: Cluster,
    tallies: Mapping[int, StepTotals],
    changes: Iterable[tuple[int, Sequence[Straggler]]],
) -> str:
    """The time breakdown of each rank, and the stragglers; of many ranks, the slowest."""
    longest = sorted(tallies, key=lambda rank: -tallies[rank].each()["computing"])
    shown = sorted(longest[:MAX_TALLY_ROWS])
    rows = [["rank", "host", "steps", *TALLY_COLUMNS.values()]]
    for rank in shown:
        means = tallies[rank].each()
        figures = (about(means[name], "s") for name in TALLY_COLUMNS)
        rows.append([str(rank), cluster.host(rank).name, str(tallies[rank].steps), *figures])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.rjust, row, widths)) for row in rows]
    if len(longest) > MAX_TALLY_ROWS:
        lines.append(f"and {len(longest) - MAX_TALLY_ROWS} ranks with shorter compute times")
    for (_, before), (step, stragglers) in pairwise([(0, ()), *changes]):
        lines.append(f"step {step}: {log_line(stragglers, before)}")
    return "\n".join(["step time breakdown per rank:", *lines])
