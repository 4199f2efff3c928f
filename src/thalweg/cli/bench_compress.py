"""`thalweg bench compress`: what compressing a model's gradients costs, and where it pays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from thalweg.cli.job_options import DEFAULT_BATCH_SAMPLES, DEFAULT_GPU, workload_of
from thalweg.cli.output import JsonOption, console, progress_bar, write_file, write_json
from thalweg.errors import UsageError
from thalweg.facts import MODELS, Duration, Workload, about
from thalweg.predict.assumptions import costs_of
from thalweg.report.tables import table_of

if TYPE_CHECKING:
    from thalweg.bench.compress import CompressBenchResult

DENSE_CURVE_NAME = "ddp, uncompressed"
Row = Mapping[str, Any]
COMPRESS_COLUMNS = (
    "encode",
    "decode",
    "payload",
    "ratio",
    "sent",
    "break-even",
    "ddp beaten below",
)
COMPRESS_FIGURE_NOTES = (
    "encode, decode: processor time of one thread; payload: what a worker has to tell; sent: by "
    "each worker",
    "break-even: it pays on slower links than this if nothing is hidden behind backward; ddp "
    "beaten below: the same where ddp hides what it can",
)


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
            help="Of a step; if not given, the workload file's, a known model's on "
            f"{DEFAULT_GPU.upper()} with {DEFAULT_BATCH_SAMPLES} samples, or what a job's takes "
            "here.",
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
    from thalweg.bench.compress_costs import (
        SWEPT_BITS_PER_SECOND,
        all_methods,
        at_all_speeds,
        dense_wire,
        method_of,
    )

    workload = workload_of(model)
    lasts = _backward(backward, model.strip(), workload, workers)
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
    terminal.print(_table(title, found.rows))
    wire = dense_wire(found.dense)
    uncompressed = f"uncompressed, each worker sends {about(wire, 'B')}"
    terminal.print("\n".join([*COMPRESS_FIGURE_NOTES, uncompressed, *found.notes]), markup=False)
    settings = {
        "model": workload.name,
        "bytes": workload.nbytes,
        "methods": [each.text for each in methods],
        "workers": workers,
        "repeats": repeats,
        "backward": lasts.seconds,
        "gbps": [speed / 1e9 for speed in SWEPT_BITS_PER_SECOND],
        "uncompressed": {
            "wire_bytes": round(wire),
            "step_seconds": at_all_speeds(found.dense),
        },
        "notes": found.notes,
    }
    write_json(json_path, "bench compress", settings, found.rows)
    if svg is not None:
        write_file(svg, _picture(title, found))
        terminal.print(f"Picture: {svg}", markup=False)


def _backward(given: str | None, model: str, workload: Workload, workers: int) -> Duration:
    if given is None and model in MODELS:
        return costs_of(model, DEFAULT_GPU, DEFAULT_BATCH_SAMPLES).backward
    if given is None and not model.endswith(".toml"):
        from thalweg.bench.compress import backward_seconds  # torch takes a second
        from thalweg.workloads import find_job

        return Duration(backward_seconds(find_job(model), workers))
    lasts = workload.costs.backward if given is None else Duration.parse(given)
    if not lasts.seconds:
        raise UsageError("a backward of no time hides nothing", "give --backward like 168ms")
    return lasts


def _picture(title: str, found: CompressBenchResult) -> str:
    from thalweg.bench.compress_costs import SWEPT_BITS_PER_SECOND, at_all_speeds
    from thalweg.report.compress import Curve, draw_steps

    curves = [Curve(name=DENSE_CURVE_NAME, kind="dense", seconds=at_all_speeds(found.dense))]
    curves += [
        Curve(
            name=row["method"],
            kind="peer" if row["peer"] else "own",
            seconds=row["step_seconds"],
        )
        for row in found.rows
    ]
    return draw_steps(title, SWEPT_BITS_PER_SECOND, curves)


def _table(title: str, rows: Sequence[Row]) -> Table:
    """Our methods, and then those that others use."""
    table = table_of(
        "method", "exchange", *(f">{heading}" for heading in COMPRESS_COLUMNS), title=title
    )
    own = [row for row in rows if not row["peer"]]
    peers = [row for row in rows if row["peer"]]
    for row in own:
        table.add_row(*_cells(row))
    if own and peers:
        table.add_row()
    for row in peers:
        table.add_row(*_cells(row), style="dim")
    return table


def _cells(row: Row) -> list[str]:
    together = row["decode_ms"] is None
    return [
        row["method"],
        row["exchange"],
        _milliseconds(row["encode_ms"]),
        "with it" if together else _milliseconds(row["decode_ms"]),
        about(row["payload_bytes"], "B"),
        f"{row['ratio']:.3g}x",
        about(row["wire_bytes"], "B"),
        "" if row["breakeven_gbps"] is None else _speed(row["breakeven_gbps"]),
        _speed(row["pays_below_gbps"]) if row["pays"] == "below" else row["pays"],
    ]


def _milliseconds(value: float) -> str:
    return about(value / 1e3, "s")


def _speed(gbps: float) -> str:
    return about(1e9 * gbps, "bit/s")
