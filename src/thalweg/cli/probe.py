"""`thalweg probe`: measure the cluster, and write its file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from thalweg.cli.options import (
    ClusterOption,
    PlaceOptions,
    SvgOption,
    TimeoutOption,
    with_bundles,
)
from thalweg.cli.output import JsonOption, console, progress_bar, write_file, write_json
from thalweg.facts import Duration, read_cluster
from thalweg.launch.rank_assignment import read_rank_assignment
from thalweg.plan import TRANSPORT

PROBE_TIMEOUT_SECONDS = 3600.0  # for all measurements together


@with_bundles
def command(
    place: PlaceOptions,
    cluster: ClusterOption = None,
    transport: Annotated[str, typer.Option(hidden=True)] = TRANSPORT,
    out: Annotated[
        Path,
        typer.Option(metavar="FILE", help="The cluster file; the picture is beside it by default."),
    ] = Path("cluster.toml"),
    svg: SvgOption = None,
    timeout: TimeoutOption = "30s",
    json_path: JsonOption = None,
) -> None:
    """Measure latency, racks, NICs and uplinks between workers, and write the cluster file.

    In a lab, on local workers, or as one of torchrun's. Racks that --cluster declares are kept, and
    measurements that contradict them are reported.
    """
    from thalweg.bench.site import run_on_all
    from thalweg.bench.train_job import launched  # torch takes a second: not at import
    from thalweg.probing import ProbeResult, measure, refuse_other_transports
    from thalweg.report.probe_result import draw_cluster, outcome_text, tables

    def work(rank: int, report: Callable[..., None]) -> dict[str, Any]:
        found = measure(declared, timeout=timeout, progress=report)
        return found.packed() if rank == 0 else {}

    Duration.parse(timeout)
    refuse_other_transports(transport)
    declared = None if cluster is None else read_cluster(cluster)
    if launched():
        place.leave_to_the_launcher()
        with progress_bar("Probing") as bar:
            found = measure(declared, timeout=timeout, progress=bar.show)
        notes = list[str]()
        if read_rank_assignment(os.environ).rank != 0:
            return  # rank 0 reports
    else:
        with place.site() as deployment, progress_bar("Probing") as bar:
            found = ProbeResult.unpacked(
                run_on_all(deployment, work, bar.show, limit=PROBE_TIMEOUT_SECONDS)[0]
            )
        notes = deployment.notes
    picture = svg or out.with_suffix(".svg")
    write_file(out, found.file())
    write_file(picture, draw_cluster(found))
    terminal = console(json_path)
    for table in tables(found):
        terminal.print(table)
    terminal.print(outcome_text(found, out, picture), soft_wrap=True)
    settings = {
        "workers": found.cluster.workers,
        "transport": found.transport,
        **place.settings,
        "declared": None if cluster is None else str(cluster),
        "file": str(out),
        "picture": str(picture),
        "confidence": {"racks": found.sureness, "reason": found.reason},
        "outliers": list(found.outliers),
        "contradictions": list(found.contradictions),
        "notes": [*found.notes, *notes],
        "probes": found.measurements,
        "seconds": found.seconds,
    }
    write_json(json_path, "probe", settings, found.rows())
