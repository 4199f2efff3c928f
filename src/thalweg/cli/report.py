"""`thalweg report RECORDS`: step time breakdown and stragglers of a recorded run."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from thalweg.cli.options import ClusterOption, Output, option, with_bundles, working
from thalweg.errors import UsageError
from thalweg.facts import about, read_cluster
from thalweg.observe.journal import read_records
from thalweg.observe.run_report import RunReport, run_report
from thalweg.observe.timeline import timeline
from thalweg.report import trace as traces
from thalweg.report.run_page import RANK_COLUMNS, run_page
from thalweg.report.tables import table_of
from thalweg.report.tensorboard import write_scalars, writer_class

STEP_RANGE_PATTERN = re.compile(r"(\d*):(\d*)")


@with_bundles
def report(
    *,
    records: Annotated[
        Path, typer.Argument(metavar="RECORDS", help="The folder of a run's records.")
    ],
    steps: Annotated[
        str | None, option("Only steps A to B, both included; or A:, or :B.", "A:B")
    ] = None,
    cluster: ClusterOption = None,
    trace: Annotated[
        Path | None,
        option("Write a trace for ui.perfetto.dev: .json, .json.gz or .pftrace.", "FILE"),
    ] = None,
    tensorboard: Annotated[Path | None, option("Write scalars for TensorBoard.", "DIR")] = None,
    page: Annotated[Path | None, option("Write a page (HTML) with pictures.", "FILE")] = None,
    output: Output,
) -> None:
    """Show each rank's step time breakdown from a run's records, and the stragglers with causes.

    A step is compute time, exposed communication and time blocked between steps; overlapped
    communication and encoding take place meanwhile. `exposed %` is exposed time over step time.
    """
    first, last = _range(steps)
    if trace is not None:
        traces.writer_of(trace)
    if tensorboard is not None:
        writer_class()
    where = None if cluster is None else read_cluster(cluster)
    with working("Reading the records"):
        run = timeline(read_records(records))
    if not run.steps:
        raise UsageError(f"the records in {records} have no step", "train for longer")
    with working("Analysing"):
        overview = run_report(run, first=first, last=last, cluster=where)
    if not overview.timeline.steps:
        raise UsageError(
            f"no step from {steps} is on record",
            f"give steps between {run.steps[0]} and {run.steps[-1]}",
        )
    _print(output, overview)
    if trace is not None:
        with working("Writing the trace"):
            traces.write_trace(trace, traces.trace(overview))
        output.print(f"Trace: {trace} (open it in ui.perfetto.dev)")
    if tensorboard is not None:
        with working("Writing scalars"):
            write_scalars(tensorboard, overview.timeline)
        output.print(f"Scalars: tensorboard --logdir {tensorboard}")
    if page is not None:
        output.write("Page", page, run_page(overview))
    rows = [account.entries() for account in overview.accounts]
    output.write_json("report", rows, **_settings(records, overview))


def _range(text: str | None) -> tuple[int | None, int | None]:
    match = STEP_RANGE_PATTERN.fullmatch(text or ":")
    if match is None:
        raise UsageError(f"{text!r} is no range of steps", "write it like 100:200, 100: or :200")
    first, last = (int(number) if number else None for number in match.groups())
    if first is not None and last is not None and first > last:
        raise UsageError(f"{text!r} has no step in it", "write the smaller one first")
    return first, last


def _settings(records: Path, overview: RunReport) -> dict[str, Any]:
    steps = overview.timeline.steps
    return {
        "records": str(records),
        "steps": [steps[0], steps[-1]],
        "seconds_per_step": overview.seconds,
        "late": [asdict(straggler) for straggler in overview.stragglers],
        "notes": [asdict(event) for event in overview.notes],
        "clocks": [
            {"rank": lane.rank, "aligned_by": lane.aligned.value, "error": lane.error}
            for lane in overview.timeline.rank_timelines.values()
        ],
        "remarks": list(overview.timeline.remarks),
        "assumed": list(overview.cluster.assumed),
    }


def _print(output: Output, overview: RunReport) -> None:
    steps, lanes = overview.timeline.steps, overview.timeline.rank_timelines.values()
    errors = [lane.error for lane in lanes if lane.error is not None]
    output.print(
        f"steps {steps[0]} to {steps[-1]} of {len(overview.accounts)} ranks: "
        f"{about(overview.seconds, 's')} per step",
        table_of(overview.accounts, RANK_COLUMNS),
    )
    output.print(
        *([f"straggler: {straggler}" for straggler in overview.stragglers] or ["no stragglers"]),
        *map(str, overview.notes),
        *([f"clock error at most {about(max(errors), 's')}"] if errors else []),
        *overview.timeline.remarks,
        soft_wrap=True,
    )
