"""`thalweg bench compress`: what compressing a model's gradients costs, and where it pays."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from thalweg.cli.model import workload_of
from thalweg.cli.output import JsonOption, console, write_file, write_json
from thalweg.cli.progress import progress_bar
from thalweg.errors import UsageError
from thalweg.facts import Duration, Workload, about

if TYPE_CHECKING:
    from thalweg.bench.compress import Found

BACKWARD = Duration.parse("168ms")  # ResNet-50, 64 images a GPU (HKBU-HPML/ddl-benchmarks)
DENSE = "ddp, uncompressed"


def command(
    model: Annotated[
        str, typer.Option("--model", metavar="NAME", help="A model, a job or a workload file.")
    ],
    method: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            metavar="COMPRESSOR",
            help="Like 'powersgd(rank=2)'; may be given several times. All if not given.",
        ),
    ] = None,
    workers: Annotated[
        int, typer.Option("--workers", metavar="N", min=2, help="Whose payloads are decoded.")
    ] = 8,
    repeats: Annotated[
        int, typer.Option("--repeats", min=1, help="How often each is timed; the least counts.")
    ] = 3,
    backward: Annotated[
        str | None,
        typer.Option(
            "--backward",
            metavar="DURATION",
            help=f"Of a step; the workload file's, or {BACKWARD}, if not given.",
        ),
    ] = None,
    svg: Annotated[
        Path | None, typer.Option("--svg", metavar="PATH", help="Draw steps over link speeds.")
    ] = None,
    json_path: JsonOption = None,
) -> None:
    """Time what compressing a model's gradients takes under each method and under those in use
    elsewhere, here and on one thread, and say on which links that pays. No network is used.
    """
    from thalweg.bench.compress_costs import SPEEDS
    from thalweg.bench.compress_methods import all_methods, method_of
    from thalweg.report.compress import FIGURES, table_of

    workload = workload_of(model)
    lasts = _backward(backward, workload)
    methods = [method_of(text) for text in dict.fromkeys(method or ())] or all_methods()

    from thalweg.bench.compress import bench_compress  # torch takes a second: not before mistakes

    with progress_bar("Compressing") as bar:
        found = bench_compress(
            workload,
            methods,
            workers=workers,
            repeats=repeats,
            backward=lasts.seconds,
            progress=bar.show,
        )
    title = (
        f"{workload.name}: {about(workload.nbytes, 'B')} of gradients, {workers} workers, "
        f"backward {about(lasts.seconds, 's')}"
    )
    terminal = console(json_path)
    terminal.print(table_of(title, found.rows))
    uncompressed = f"uncompressed, each worker sends {about(found.dense.wire, 'B')}"
    terminal.print("\n".join([*FIGURES, uncompressed, *found.notes]), markup=False)
    settings = {
        "model": workload.name,
        "bytes": workload.nbytes,
        "methods": [each.text for each in methods],
        "workers": workers,
        "repeats": repeats,
        "backward": lasts.seconds,
        "gbps": [speed / 1e9 for speed in SPEEDS],
        "uncompressed": {
            "wire_bytes": round(found.dense.wire),
            "step_seconds": [found.dense.step(speed) for speed in SPEEDS],
        },
        "notes": found.notes,
    }
    write_json(json_path, "bench compress", settings, found.rows)
    if svg is not None:
        write_file(svg, _picture(title, found))
        terminal.print(f"Picture: {svg}", markup=False)


def _backward(given: str | None, workload: Workload) -> Duration:
    if given is None:
        return workload.costs.backward if workload.costs.backward.seconds else BACKWARD
    lasts = Duration.parse(given)
    if not lasts.seconds:
        raise UsageError("a backward of no time hides nothing", "give --backward like 168ms")
    return lasts


def _picture(title: str, found: Found) -> str:
    from thalweg.bench.compress_costs import SPEEDS
    from thalweg.report.compress_svg import Curve, draw_steps

    dense = [found.dense.step(speed) for speed in SPEEDS]
    curves = [Curve(name=DENSE, kind="dense", seconds=dense)]
    curves += [
        Curve(
            name=row["method"],
            kind="peer" if row["peer"] else "own",
            seconds=row["step_seconds"],
        )
        for row in found.rows
    ]
    return draw_steps(title, SPEEDS, curves)
