"""`thalweg calibrate`: measure what predictions need, and write it to files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from thalweg.cli.options import with_bundles
from thalweg.cli.output import JsonOption, console, progress_bar, write_file, write_json
from thalweg.cli.place import ClusterOption, Place
from thalweg.facts import (
    format_cluster,
    format_machine,
    format_workload,
    machine_path,
    read_cluster,
)


@with_bundles
def command(
    workload: Annotated[
        str,
        typer.Option(
            metavar="WORKLOAD",
            help="The job whose steps are profiled: digits, synthetic(params=2.5M), or a .py file.",
        ),
    ],
    place: Place,
    cluster: ClusterOption = None,
    compressor: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only these, like powersgd(rank=4); all if absent."),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where to write the files.")] = Path(),
    json_path: JsonOption = None,
) -> None:
    """Measure links, messages, compressors and a job's steps, all workers together, in seconds.

    In a lab, on local workers, or as one of torchrun's. Writes cluster.toml, cluster.machine.toml
    and the workload's file. Racks that --cluster declares are kept, and so are those of a lab.
    """
    from thalweg.bench.calibrations import calibrate_at, calibrate_job  # torch takes a second
    from thalweg.bench.compress_methods import all_methods, method_of
    from thalweg.bench.jobs import launched
    from thalweg.plan import Choice
    from thalweg.report.calibration import rows, tables
    from thalweg.runtime.launch import find_seat
    from thalweg.workloads import find_job

    job = find_job(workload)
    methods = all_methods() if compressor is None else [method_of(text) for text in compressor]
    codecs = [Choice.of(each.compressor.name, each.arguments) for each in methods]
    declared = None if cluster is None else read_cluster(cluster)
    notes: list[str] = []
    if launched():
        place.leave_to_the_launcher()
        with progress_bar("Calibrating") as bar:
            found = calibrate_job(
                job, declared, codecs, lambda what, done, total: bar.show(done, total or done, what)
            )
        if find_seat(os.environ).rank:
            return  # rank 0 tells
    else:
        with place.site() as site, progress_bar("Calibrating") as bar:
            found = calibrate_at(
                site,
                job,
                declared or site.cluster,
                codecs,
                lambda what, done, total: bar.show(done, total or done + 1, what),
            )
        notes = site.notes
    file = out / "cluster.toml"
    files = {
        file: format_cluster(found.cluster, [f"Calibrated in {found.seconds:.0f} s."]),
        machine_path(file): format_machine(found.machine),
        out / f"{found.workload.name}.toml": format_workload(found.workload),
    }
    for path, text in files.items():
        write_file(path, text)
    terminal = console(json_path)
    for table in tables(found.cluster, found.machine, found.workload):
        terminal.print(table)
    terminal.print(
        f"Wrote {', '.join(str(path) for path in files)}, after {found.seconds:.0f} s.",
        soft_wrap=True,
    )
    settings = {
        "workload": workload,
        "workers": found.cluster.workers,
        **place.settings,
        "declared": None if cluster is None else str(cluster),
        "files": [str(path) for path in files],
        "spread": found.spread,
        "seconds": found.seconds,
        "notes": notes,
    }
    write_json(json_path, "calibrate", settings, rows(found.cluster, found.machine, found.workload))
