"""`thalweg explain PLAN`: the messages of a plan, its promise and its cost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from thalweg.catalog import default_catalog
from thalweg.cli.options import ClusterOptions, SvgOption, with_bundles
from thalweg.cli.output import JsonOption, console, working, write_file, write_json
from thalweg.errors import UsageError
from thalweg.facts import Size, Workload, counted, read_workload
from thalweg.report import (
    MAX_DRAWN_WORKERS,
    draw,
    explain,
    first_step,
    plan_title,
    render,
    rows,
    settings,
)
from thalweg.schedules import Group
from thalweg.steps import without_groups

DEFAULT_MODEL_SIZE = "25MB"


@with_bundles
def command(
    plan: Annotated[str, typer.Argument(help="A plan, like 'ring' or 'hierarchical+fp16'.")],
    place: ClusterOptions,
    nbytes: Annotated[
        str | None,
        typer.Option(
            "--bytes", metavar="SIZE", help=f"Size of the model; {DEFAULT_MODEL_SIZE} if absent."
        ),
    ] = None,
    model: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A workload file (TOML) instead.")
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(min=0, help="Training step; by default the first one with communication."),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Samples of a step, to number those of each worker of a code."
        ),
    ] = None,
    most_slots: Annotated[
        int,
        typer.Option("--beats", "--slots", min=0, help="Time slots in the terminal; 0: all."),
    ] = 16,
    svg: SvgOption = None,
    json_path: JsonOption = None,
) -> None:
    """Draw the messages of a plan, with its promise and its cost.

    Under a code: which samples each worker computes, with which weight, and how many stragglers are
    tolerated. Where parameters are averaged in groups: the groups of one period, contended members,
    and the expected drift of the replicas.

    Nothing is run: the schedule that would run is built, checked and drawn.
    `thalweg plans` lists all plans.
    """
    catalog = default_catalog()
    settled = catalog.plan(plan)
    group = Group.everybody(place.described())
    if svg is not None:
        _can_be_drawn(svg, group)
    workload = _workload(nbytes, model)
    at = first_step(settled) if step is None else step
    terminal = console(json_path)
    with working(f"Checking {plan} for {counted(group.size, 'worker')}"):
        explanation = explain(settled, group, workload, at, catalog, batch)
    terminal.print(plan_title(settled, catalog.guarantee(settled), group, workload, at))
    if remark := without_groups(settled, group, catalog):
        terminal.print(remark, markup=False)
    for piece in render(explanation, most_slots, terminal.width):
        terminal.print(piece)
    if svg is not None and (explanation.scenes or explanation.async_plan or explanation.groups):
        write_file(svg, draw(explanation))
        terminal.print(f"Drawn into {svg}.")
    write_json(json_path, "explain", settings(explanation), rows(explanation))


def _can_be_drawn(svg: Path, group: Group) -> None:
    if str(svg) == "-":
        raise UsageError("--svg needs a file, not standard output", "give it a path")
    if group.size > MAX_DRAWN_WORKERS:
        raise UsageError(
            f"{group.size} workers are too many for a drawing",
            f"draw up to {MAX_DRAWN_WORKERS}, or leave out --svg",
        )


def _workload(nbytes: str | None, model: Path | None) -> Workload:
    if nbytes is not None and model is not None:
        raise UsageError("--bytes and --model are both given", "give one")
    if model is not None:
        return read_workload(model)
    return Workload.of_size(Size.parse(DEFAULT_MODEL_SIZE if nbytes is None else nbytes))
