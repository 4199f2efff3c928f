"""`thalweg bench`: what things cost, measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from thalweg.cli import bench_compress, bench_forecast, bench_stragglers, bench_train
from thalweg.cli.job_options import workload_of
from thalweg.cli.options import PlaceOptions, with_bundles
from thalweg.cli.output import JsonOption, console, progress_bar, write_json
from thalweg.errors import UsageError
from thalweg.facts import Size, Workload, about
from thalweg.report.tables import table_of

if TYPE_CHECKING:
    from thalweg.bench.run_everywhere import Deployment

COLLECTIVE_FIGURE_NOTES = (
    "predicted: by the plan's closed form",
    "of bound: of the speed that the links allow",
)

app = typer.Typer(help="Measure what plans cost.", no_args_is_help=True)
app.command("compress")(bench_compress.command)
app.command("stragglers")(bench_stragglers.command)
app.command("train")(bench_train.command)
app.command("forecast")(bench_forecast.command)


@app.command("collectives")
@with_bundles
def collectives(
    sync: Annotated[
        list[str], typer.Option("--sync", metavar="PLAN", help="May be given several times.")
    ],
    place: PlaceOptions,
    nbytes: Annotated[
        str | None, typer.Option("--bytes", metavar="SIZE", help="How much is synchronised.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A model, a job or a workload file instead of --bytes."),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="How often each is timed.")] = 15,
    encryption: Annotated[
        bool,
        typer.Option(
            "--encryption", "--curve", help="Time TCP with encryption and without, taking turns."
        ),
    ] = False,
    json_path: JsonOption = None,
) -> None:
    """Time one synchronisation under each plan, beside torch's own all_reduce (the row gloo).

    The plans take turns, so that all see the same noise.
    """
    from thalweg.bench.collectives import bench_collectives  # torch takes a second: not at import

    workload = _workload(nbytes, model)
    with place.site() as deployment, progress_bar("Synchronising") as bar:
        rows = bench_collectives(
            deployment, workload, sync, repeats, bar.show, both_ways=encryption
        )
    terminal = console(json_path)
    terminal.print(_table(deployment, workload, rows))
    settings = {
        "workers": deployment.workers,
        "bytes": workload.nbytes,
        "repeats": repeats,
        "sync": sync,
        **place.settings,
        "notes": deployment.notes,
    }
    write_json(json_path, "bench collectives", settings, rows)


def _workload(nbytes: str | None, model: str | None) -> Workload:
    if (nbytes is None) == (model is None):
        said = (
            "neither --bytes nor --model says" if model is None else "both --bytes and --model say"
        )
        raise UsageError(f"{said} how much is sent", "give one of them")
    if nbytes is not None:
        return Workload.of_size(Size.parse(nbytes))
    return workload_of(model or "")


def _table(deployment: Deployment, workload: Workload, rows: list[dict[str, Any]]) -> Table:
    title = f"{about(workload.nbytes, 'B')} over {deployment.text}"
    figures = (">median", ">fastest", ">slowest", ">predicted", ">of bound", ">vs gloo")
    table = table_of("plan", "transport", *figures, title=title)
    for row in rows:
        table.add_row(
            row["sync"],
            row["transport"],
            about(row["median"], "s"),
            about(min(row["seconds"]), "s"),
            about(max(row["seconds"]), "s"),
            "" if row["predicted"] is None else about(row["predicted"], "s"),
            "" if row["bound"] is None else f"{row['fraction_of_bound']:.0%}",
            f"{row['vs_gloo']:.2f}x",
        )
    table.caption = "\n".join(
        [
            "vs gloo: above 1 is faster than torch's all_reduce",
            *(COLLECTIVE_FIGURE_NOTES if deployment.cluster else []),
            *deployment.notes,
        ]
    )
    return table
