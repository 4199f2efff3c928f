"""`thalweg probe`: measure the cluster, and write its file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

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
    from thalweg.bench.run_everywhere import Report, Result, run_everywhere  # imports torch
    from thalweg.probing import ProbeResult, measure, refuse_other_transports
    from thalweg.report.probe_result import draw_cluster, outcome_text, tables

    def work(rank: int, report: Report) -> Result:
        found = measure(declared, timeout=timeout, progress=report)
        return found.packed() if rank == 0 else {}

    Duration.parse(timeout)
    refuse_other_transports(transport)
    declared = None if cluster is None else read_cluster(cluster)
    with place.site(under_launcher=True) as deployment, progress_bar("Probing") as bar:
        packed = run_everywhere(deployment, work, bar.show, timeout=PROBE_TIMEOUT_SECONDS)[0]
    if not packed:
        return  # rank 0 reports
    found = ProbeResult.unpacked(packed)
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
        "notes": [*found.notes, *deployment.notes],
        "probes": found.measurements,
        "seconds": found.seconds,
    }
    write_json(json_path, "probe", settings, found.rows())
