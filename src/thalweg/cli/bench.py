"""`thalweg bench`: measured costs of plans, and of compressing a model's gradients."""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Annotated

import typer

from thalweg.bench.compress_costs import (
    SWEPT_BITS_PER_SECOND,
    at_all_speeds,
    dense_wire,
    method_of,
)
from thalweg.catalog import default_catalog
from thalweg.cli import bench_train, studies
from thalweg.cli.job_options import DEFAULT_BATCH_SAMPLES, DEFAULT_GPU, workload_of
from thalweg.cli.options import (
    ModelOption,
    Output,
    PlaceOptions,
    SvgOption,
    option,
    progress_bar,
    with_bundles,
)
from thalweg.errors import UsageError
from thalweg.facts import MODELS, Duration, Size, Workload, about
from thalweg.predict.assumptions import costs_of
from thalweg.report.plots import Curve, draw_steps
from thalweg.report.tables import Columns, bits_text, seconds_text, table_of

if TYPE_CHECKING:
    from thalweg.bench.compress import CompressBenchResult

COLLECTIVE_FIGURE_NOTES = (
    "predicted: by the plan's closed form",
    "of bound: fraction of the speed that the links allow",
)
COLLECTIVE_COLUMNS: Columns = {
    "plan": itemgetter("sync"),
    "transport": itemgetter("transport"),
    ">median": lambda row: about(row["median"], "s"),
    ">fastest": lambda row: about(min(row["seconds"]), "s"),
    ">slowest": lambda row: about(max(row["seconds"]), "s"),
    ">predicted": lambda row: seconds_text(row["predicted"]),
    ">of bound": lambda row: "" if row["bound"] is None else f"{row['fraction_of_bound']:.0%}",
    ">vs gloo": lambda row: f"{row['vs_gloo']:.2f}x",
}

DENSE_CURVE_NAME = "ddp, uncompressed"
COMPRESS_COLUMNS: Columns = {
    "method": itemgetter("method"),
    "exchange": itemgetter("exchange"),
    ">encode": lambda row: about(row["encode_ms"] / 1e3, "s"),
    ">decode": lambda row: (
        "included in encode" if row["decode_ms"] is None else about(row["decode_ms"] / 1e3, "s")
    ),
    ">payload": lambda row: about(row["payload_bytes"], "B"),
    ">ratio": lambda row: f"{row['ratio']:.3g}x",
    ">sent": lambda row: about(row["wire_bytes"], "B"),
    ">break-even": lambda row: (
        "" if row["breakeven_gbps"] is None else bits_text(1e9 * row["breakeven_gbps"])
    ),
    ">faster than DDP below": lambda row: (
        bits_text(1e9 * row["pays_below_gbps"]) if row["pays"] == "below" else row["pays"]
    ),
}
COMPRESS_FIGURE_NOTES = (
    "encode, decode: CPU time of one thread; payload: bytes that a worker contributes; sent: by "
    "each worker",
    "break-even: compression pays on slower links than this without overlap with backward; faster "
    "than DDP below: the same where DDP overlaps what it can",
)


@with_bundles
def collectives(
    *,
    sync: Annotated[list[str], option("May be given several times.", "PLAN", "--sync")],
    place: PlaceOptions,
    nbytes: Annotated[
        str | None, option("Size of what is synchronised.", "SIZE", "--bytes")
    ] = None,
    model: Annotated[
        str | None, option("A model, a job or a workload file instead of --bytes.", "NAME")
    ] = None,
    repeats: Annotated[int, option("Timings of each plan.", min=1)] = 15,
    encryption: Annotated[
        bool,
        option("Time TCP with and without encryption, in turns.", None, "--encryption", "--curve"),
    ] = False,
    output: Output,
) -> None:
    """Time one synchronisation under each plan, and torch's own all_reduce (the row gloo).

    The plans take turns, so that all see the same noise.
    """
    from thalweg.bench.collectives import bench_collectives  # torch takes a second: not at import

    workload = _workload(nbytes, model)
    with place.site() as deployment, progress_bar("Synchronising") as show:
        rows = bench_collectives(deployment, workload, sync, repeats, show, both_ways=encryption)
    notes = [
        "vs gloo: above 1 is faster than torch's all_reduce",
        *(COLLECTIVE_FIGURE_NOTES if deployment.cluster else ()),
        *deployment.notes,
    ]
    title = f"{about(workload.nbytes, 'B')} over {deployment.text}"
    output.print(table_of(rows, COLLECTIVE_COLUMNS, title=title, caption="\n".join(notes)))
    output.write_json(
        "bench collectives",
        rows,
        workers=deployment.workers,
        bytes=workload.nbytes,
        repeats=repeats,
        sync=sync,
        **place.settings,
        notes=deployment.notes,
    )


def _workload(nbytes: str | None, model: str | None) -> Workload:
    if (nbytes is None) == (model is None):
        given = (
            "neither --bytes nor --model is" if model is None else "--bytes and --model are both"
        )
        raise UsageError(f"{given} given", "give one of them")
    if nbytes is not None:
        return Workload.of_size(Size.parse(nbytes))
    return workload_of(model or "")


@with_bundles
def compress(
    *,
    model: ModelOption,
    method: Annotated[
        list[str] | None,
        option(
            "Like 'powersgd(rank=2)'; may be given several times. All if not given.", "COMPRESSOR"
        ),
    ] = None,
    workers: Annotated[
        int, option("Number of workers whose payloads are decoded.", "N", min=2)
    ] = 8,
    repeats: Annotated[int, option("Timings of each; the least counts.", min=1)] = 3,
    backward: Annotated[
        str | None,
        option(
            "Time of a backward pass; if not given, the workload file's, a known model's on "
            f"{DEFAULT_GPU.upper()} with {DEFAULT_BATCH_SAMPLES} samples, or a job's, timed here.",
            "DURATION",
        ),
    ] = None,
    svg: SvgOption = None,
    output: Output,
) -> None:
    """Time the compression of a model's gradients on one thread, under each method and under those
    in use elsewhere, and show on which links it pays. No network is used.
    """
    workload = workload_of(model)
    lasts = _backward(backward, model.strip(), workload, workers)
    texts = method or default_catalog().compressors
    methods = {text.strip(): method_of(text) for text in texts}

    from thalweg.bench.compress import bench_compress  # torch takes a second: not before mistakes

    with progress_bar("Compressing") as show:
        result = bench_compress(
            workload,
            methods,
            workers=workers,
            repeats=repeats,
            backward=lasts.seconds,
            progress=show,
        )
    title = (
        f"{workload.name}: {about(workload.nbytes, 'B')} of gradients, {workers} workers, "
        f"backward {about(lasts.seconds, 's')}"
    )
    own = [row for row in result.rows if not row["peer"]]
    table = table_of(own, COMPRESS_COLUMNS, title=title)
    peers = [row for row in result.rows if row["peer"]]
    if own and peers:
        table.add_row()
    for row in peers:
        table.add_row(*(cell(row) for cell in COMPRESS_COLUMNS.values()), style="dim")
    wire = dense_wire(result.dense)
    output.print(
        table,
        *COMPRESS_FIGURE_NOTES,
        f"uncompressed, each worker sends {about(wire, 'B')}",
        *result.notes,
    )
    output.write_json(
        "bench compress",
        result.rows,
        model=workload.name,
        bytes=workload.nbytes,
        methods=list(methods),
        workers=workers,
        repeats=repeats,
        backward=lasts.seconds,
        gbps=[speed / 1e9 for speed in SWEPT_BITS_PER_SECOND],
        uncompressed={
            "wire_bytes": round(wire),
            "step_seconds": at_all_speeds(result.dense),
        },
        notes=result.notes,
    )
    if svg is not None:
        output.write("Picture", svg, _picture(title, result))


def _backward(given: str | None, model: str, workload: Workload, workers: int) -> Duration:
    if given is None and model in MODELS:
        return costs_of(model, DEFAULT_GPU, DEFAULT_BATCH_SAMPLES).backward
    if given is None and not model.endswith(".toml"):
        from thalweg.bench.compress import backward_seconds  # torch takes a second
        from thalweg.workloads import find_job

        return Duration(backward_seconds(find_job(model), workers))
    lasts = workload.costs.backward if given is None else Duration.parse(given)
    if not lasts.seconds:
        raise UsageError(f"{workload.name} has no time of backward", "give --backward like 168ms")
    return lasts


def _picture(title: str, result: CompressBenchResult) -> str:
    curves = [
        Curve(name=DENSE_CURVE_NAME, kind="dense", seconds=at_all_speeds(result.dense)),
        *(
            Curve(
                name=row["method"],
                kind="peer" if row["peer"] else "own",
                seconds=row["step_seconds"],
            )
            for row in result.rows
        ),
    ]
    return draw_steps(title, SWEPT_BITS_PER_SECOND, curves)


app = typer.Typer(help="Measure what plans cost.", no_args_is_help=True)
app.command()(compress)
app.command("stragglers")(studies.bench_stragglers)
app.command()(bench_train.train)
app.command()(bench_train.forecast)
app.command()(collectives)
