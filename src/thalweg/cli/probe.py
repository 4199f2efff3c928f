"""`thalweg probe`: measure the cluster, and write its file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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

if TYPE_CHECKING:
    from thalweg.bench.site import Site
    from thalweg.facts import Cluster
    from thalweg.probing import Probed

LIMIT = 3600.0  # seconds for all of it


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
    from thalweg.report.cluster import outcome_text, tables
    from thalweg.report.cluster_svg import draw_cluster

    Duration.parse(timeout)
    declared = None if cluster is None else read_cluster(cluster)
    if launched():
        if (workers, lab) != (None, None):
            raise UsageError("the launcher has started the workers", "don't say where they are")
        found = _here(declared, transport, timeout)
        notes: list[str] = []
    else:
        place = site_at(workers=workers, lab=lab, nic=nic, uplink=uplink, rank_order=rank_order)
        with place as site:
            found = _at(site, declared, transport, timeout)
        notes = site.notes
    if found is None:
        return  # rank 0 tells
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


def _here(declared: Cluster | None, transport: str, timeout: str) -> Probed | None:
    """As one worker of a launcher's; None on all ranks but the first."""
    import os

    from thalweg.probing import measure
    from thalweg.runtime.launch import find_seat

    first = find_seat(os.environ).rank == 0
    with progress_bar("Probing") as bar:
        found = measure(declared, transport=transport, timeout=timeout, progress=bar.show)
    return found if first else None


def _at(site: Site, declared: Cluster | None, transport: str, timeout: str) -> Probed:
    """By forks of this process at that site."""
    from thalweg.probing import Probed, measure
    from thalweg.runtime.supervisor import run_workers

    def work(rank: int, report: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        def progress(done: int, total: int) -> None:
            report({"done": done, "total": total})

        found = measure(declared, transport=transport, timeout=timeout, progress=progress)
        return found.packed() if rank == 0 else {}

    with progress_bar("Probing") as bar:

        def heard(rank: int, message: dict[str, Any]) -> None:
            bar.show(message["done"], message["total"])

        results = run_workers(site.workers, work, timeout=LIMIT, on_message=heard, place=site.place)
    return Probed.unpacked(results[0])
