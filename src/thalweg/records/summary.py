"""The table at the end of a run: where each rank's time went, and who was late."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from thalweg.facts import Cluster, about
from thalweg.records.late import Late, told
from thalweg.records.tally import Tally

MOST_ROWS = 16
COLUMNS = ("rank", "host", "steps", "a step", "computing", "exposed", "hidden", "between")


def summary_text(
    cluster: Cluster,
    tallies: Mapping[int, Tally],
    changes: Iterable[tuple[int, Sequence[Late]]],
) -> str:
    """Of many ranks, those that compute longest."""
    longest = sorted(tallies, key=lambda rank: -tallies[rank].each()["computing"])
    shown = sorted(longest[:MOST_ROWS])
    rows = [COLUMNS, *(_row(cluster, rank, tallies[rank]) for rank in shown)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = ["  ".join(map(str.rjust, row, widths)) for row in rows]
    if len(longest) > MOST_ROWS:
        lines.append(f"and {len(longest) - MOST_ROWS} ranks that compute for less long")
    before: Sequence[Late] = ()
    for step, late in changes:
        lines.append(f"step {step}: {told(late, before)}")
        before = late
    return "\n".join(["where the time of a step went, exposed and hidden communication:", *lines])


def _row(cluster: Cluster, rank: int, tally: Tally) -> tuple[str, ...]:
    each = tally.each()
    names = ("seconds", "computing", "exposed", "hidden", "settled")
    figures = (about(each[name], "s") for name in names)
    return (str(rank), cluster.host(rank).name, str(tally.steps), *figures)
