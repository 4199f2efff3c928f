"""`thalweg bench`: measured costs of plans."""

from __future__ import annotations

from operator import itemgetter
from typing import Annotated

import typer

from thalweg.cli import bench_compress, bench_stragglers, bench_train
from thalweg.cli.job_options import workload_of
from thalweg.cli.options import PlaceOptions, with_bundles
from thalweg.cli.output import JsonOption, console, progress_bar, write_json
from thalweg.errors import UsageError
from thalweg.facts import Size, Workload, about
from thalweg.report.tables import Columns, seconds_text, table_of

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

app = typer.Typer(help="Measure what plans cost.", no_args_is_help=True)
app.command("compress")(bench_compress.command)
app.command("stragglers")(bench_stragglers.command)
app.command("train")(bench_train.train)
app.command("forecast")(bench_train.forecast)


@app.command("collectives")
@with_bundles
def collectives(
    sync: Annotated[
        list[str], typer.Option("--sync", metavar="PLAN", help="May be given several times.")
    ],
    place: PlaceOptions,
    nbytes: Annotated[
        str | None, typer.Option("--bytes", metavar="SIZE", help="Size of what is synchronised.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A model, a job or a workload file instead of --bytes."),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timings of each plan.")] = 15,
    encryption: Annotated[
        bool,
        typer.Option(
            "--encryption", "--curve", help="Time TCP with and without encryption, in turns."
        ),
    ] = False,
    json_path: JsonOption = None,
) -> None:
    """Time one synchronisation under each plan, and torch's own all_reduce (the row gloo).

    The plans take turns, so that all see the same noise.
    """
    from thalweg.bench.collectives import bench_collectives  # torch takes a second: not at import

    workload = _workload(nbytes, model)
    with place.site() as deployment, progress_bar("Synchronising") as bar:
        rows = bench_collectives(
            deployment, workload, sync, repeats, bar.show, both_ways=encryption
        )
    notes = ["vs gloo: above 1 is faster than torch's all_reduce"]
    notes += [*(COLLECTIVE_FIGURE_NOTES if deployment.cluster else ()), *deployment.notes]
    title = f"{about(workload.nbytes, 'B')} over {deployment.text}"
    table = table_of(rows, COLLECTIVE_COLUMNS, title=title, caption="\n".join(notes))
    console(json_path).print(table)
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
        given = (
            "neither --bytes nor --model is" if model is None else "--bytes and --model are both"
        )
        raise UsageError(f"{given} given", "give one of them")
    if nbytes is not None:
        return Workload.of_size(Size.parse(nbytes))
    return workload_of(model or "")
