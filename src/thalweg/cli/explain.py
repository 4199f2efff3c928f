"""`thalweg explain PLAN` draws the messages of a plan, with its promise and its cost.

`thalweg plans` lists the choices of which plans are made.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from thalweg import report
from thalweg.catalog import PACKAGE_NAME, SETTING_PARAMETERS, default_catalog
from thalweg.cli.options import (
    ClusterOptions,
    Output,
    SvgOption,
    option,
    with_bundles,
    working,
    write_file,
)
from thalweg.declarations import Parameter, Value
from thalweg.errors import UsageError
from thalweg.facts import Size, Workload, counted, read_workload
from thalweg.report.tables import blank_table
from thalweg.schedules import Group
from thalweg.steps import without_groups

DEFAULT_MODEL_SIZE = "25MB"


@with_bundles
def explain(
    *,
    plan: Annotated[str, typer.Argument(help="A plan, like 'ring' or 'hierarchical+fp16'.")],
    place: ClusterOptions,
    nbytes: Annotated[
        str | None, option(f"Size of the model; {DEFAULT_MODEL_SIZE} if absent.", "SIZE", "--bytes")
    ] = None,
    model: Annotated[Path | None, option("A workload file (TOML) instead.", "FILE")] = None,
    step: Annotated[
        int | None, option("Training step; by default the first one with communication.", min=0)
    ] = None,
    batch: Annotated[
        int | None,
        option("Samples of a step, to number those of each worker of a code.", "N", min=1),
    ] = None,
    most_slots: Annotated[
        int, option("Time slots in the terminal; 0: all.", None, "--beats", "--slots", min=0)
    ] = 16,
    svg: SvgOption = None,
    output: Output,
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
    at = report.first_step(settled) if step is None else step
    with working(f"Checking {plan} for {counted(group.size, 'worker')}"):
        explanation = report.explain(settled, group, workload, at, catalog, batch)
    output.print(report.plan_title(settled, catalog.guarantee(settled), group, workload, at))
    if remark := without_groups(settled, group, catalog):
        output.print(remark)
    output.print(*report.render(explanation, most_slots, output.console.width))
    if svg is not None and (explanation.scenes or explanation.async_plan or explanation.groups):
        write_file(svg, report.draw(explanation))
        output.print(f"Drawn into {svg}.")
    output.write_json("explain", report.rows(explanation), **report.settings(explanation))


def _can_be_drawn(svg: Path, group: Group) -> None:
    if str(svg) == "-":
        raise UsageError("--svg needs a file, not standard output", "give it a path")
    if group.size > report.MAX_DRAWN_WORKERS:
        raise UsageError(
            f"{group.size} workers are too many for a drawing",
            f"draw up to {report.MAX_DRAWN_WORKERS}, or leave out --svg",
        )


def _workload(nbytes: str | None, model: Path | None) -> Workload:
    if nbytes is not None and model is not None:
        raise UsageError("--bytes and --model are both given", "give one")
    if model is not None:
        return read_workload(model)
    return Workload.of_size(Size.parse(DEFAULT_MODEL_SIZE if nbytes is None else nbytes))


@with_bundles
def plans(output: Output) -> None:
    """List the plans, compressors, codes and settings, with their arguments."""
    catalog = default_catalog()
    rows = [
        *(
            _plan_row(kind, part.name, part.summary, part.parameters, catalog.origin(kind, name))
            for kind, parts in (("plan", catalog.presets), ("compressor", catalog.compressors))
            for name, part in parts.items()
        ),
        *(
            _plan_row("code", name, code.summary, {}, catalog.origin("code", name))
            for name, code in catalog.codes.items()
        ),
        *(
            _plan_row("setting", name, part.help, {name: part})
            for name, part in SETTING_PARAMETERS.items()
        ),
    ]
    for kind, title in (
        ("plan", "Plans"),
        ("compressor", "Compressors, after +"),
        ("code", "Codes, as code= of gc and codedreduce"),
        ("setting", "Settings, after @"),
    ):
        output.print(_plans_table(title, [row for row in rows if row["kind"] == kind]), "")
    output.print("thalweg explain 'hierarchical+fp16' --workers 8 draws one.")
    output.write_json("plans", rows)


def _plan_row(
    kind: str,
    name: str,
    summary: str,
    parameters: Mapping[str, Parameter],
    origin: str = PACKAGE_NAME,
) -> dict[str, Any]:
    return {
        "kind": kind,
        "name": name,
        "summary": summary,
        "origin": origin,
        "arguments": [
            {
                "name": argument,
                "default": _written(parameter.default),
                "choices": list(parameter.choices),
                "help": parameter.help,
            }
            for argument, parameter in parameters.items()
        ],
    }


def _plans_table(title: str, rows: list[dict[str, Any]]) -> Table:
    table = blank_table("name", "description", "argument", "default", "meaning", title=title)
    for row in sorted(rows, key=lambda row: str(row["name"])):
        lines = [
            (a["name"], a["default"] or "", _meaning(a["help"], a["choices"]))
            for a in row["arguments"]
        ] or [("", "", "")]
        foreign = "" if row["origin"] == PACKAGE_NAME else f" (from {row['origin']})"
        table.add_row(row["name"], row["summary"] + foreign, *lines[0])
        for line in lines[1:]:
            table.add_row("", "", *line)
    return table


def _meaning(text: str, choices: list[str]) -> str:
    return f"{text} ({', '.join(choices)})" if choices and choices[0] not in text else text


def _written(value: Value) -> str | None:
    if value is None:
        return None
    return str(value).lower() if isinstance(value, bool) else str(value)
