"""`thalweg probe`: measure the cluster, and write its file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from thalweg.cli.output import JsonOption, console, write_file, write_json
from thalweg.cli.place import (
    ClusterOption,
    LabOption,
    NicOption,
    OrderOption,
    UplinkOption,
    WorkersOption,
    site_at,
)
from thalweg.cli.progress import progress_bar
from thalweg.errors import UsageError
from thalweg.facts import Duration, read_cluster


def command(
    workers: WorkersOption = None,
    lab: LabOption = None,
    nic: NicOption = None,
    uplink: UplinkOption = None,
    rank_order: OrderOption = None,
    cluster: ClusterOption = None,
    transport: Annotated[
        str, typer.Option(metavar="zeromq|c10d", help="The one that training will use.")
    ] = "zeromq",
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="Where to write the cluster file.")
    ] = Path("cluster.toml"),
    svg: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Where to draw it; beside the file by default."),
    ] = None,
    timeout: Annotated[
        str, typer.Option(metavar="DURATION", help="How long a worker waits for another.")
    ] = "30s",
    json_path: JsonOption = None,
) -> None:
    """Measure latency, racks, NICs and uplinks between workers, and write the cluster file.

    In a lab, on local workers, or as one of torchrun's. Racks that --cluster declares are kept, and
    what contradicts them is told.
    """
    from thalweg.bench.jobs import launched  # torch takes a second: not at import
    from thalweg.bench.probes import probe_at, probe_here
    from thalweg.report.cluster import outcome_text, tables
    from thalweg.report.cluster_svg import draw_cluster

    Duration.parse(timeout)
    declared = None if cluster is None else read_cluster(cluster)
    if launched():
        if (workers, lab) != (None, None):
            raise UsageError("the launcher has started the workers", "don't say where they are")
        with progress_bar("Probing") as bar:
            here = probe_here(declared, transport, timeout, bar.show)
        if here is None:
            return  # rank 0 tells
        found, notes = here, list[str]()
    else:
        place = site_at(workers=workers, lab=lab, nic=nic, uplink=uplink, rank_order=rank_order)
        with place as site, progress_bar("Probing") as bar:
            found = probe_at(site, declared, transport, timeout, bar.show)
        notes = site.notes
    picture = svg or out.with_suffix(".svg")
    write_file(out, found.file())
    write_file(picture, draw_cluster(found))
    terminal = console(json_path)
    for table in tables(found):
        terminal.print(table)
    terminal.print(outcome_text(found, out, picture), soft_wrap=True)
    settings = {
        "workers": found.cluster.workers,
        "transport": transport,
        "lab": lab,
        "nic": nic,
        "uplink": uplink,
        "rank_order": rank_order or "rack",
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
