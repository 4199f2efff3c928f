"""`thalweg explain PLAN`: who sends what to whom, what it promises, what it costs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from thalweg.catalog import default_catalog
from thalweg.cli.output import JsonOption, console, working, write_file, write_json
from thalweg.cli.place import (
    ClusterOption,
    LabOption,
    NicOption,
    OrderOption,
    UplinkOption,
    WorkersOption,
    cluster_at,
)
from thalweg.errors import UsageError
from thalweg.facts import Size, Workload, read_workload
from thalweg.report import (
    MOST_WORKERS_DRAWN,
    Explanation,
    draw,
    explain,
    first_step,
    heading,
    render,
)
from thalweg.schedules import Group

DATA = "25MB"


def command(
    plan: Annotated[str, typer.Argument(help="A plan, like 'ring' or 'hierarchical+fp16'.")],
    workers: WorkersOption = None,
    cluster: ClusterOption = None,
    lab: LabOption = None,
    nic: NicOption = None,
    uplink: UplinkOption = None,
    rank_order: OrderOption = None,
    nbytes: Annotated[
        str | None,
        typer.Option("--bytes", metavar="SIZE", help=f"Size of the model; {DATA} if absent."),
    ] = None,
    model: Annotated[
        Path | None, typer.Option("--model", metavar="FILE", help="A workload file (TOML) instead.")
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(min=0, help="Training step; the first at which anything travels if absent."),
    ] = None,
    most_beats: Annotated[
        int, typer.Option("--beats", min=0, help="How many to draw in the terminal; 0: all.")
    ] = 16,
    svg: Annotated[
        Path | None, typer.Option("--svg", metavar="PATH", help="Draw the moves into a file.")
    ] = None,
    json_path: JsonOption = None,
) -> None:
    """Draw who sends what to whom under a plan, with its promise and its cost.

    Nothing is run: the schedule that would run is built, checked and drawn.
    `thalweg plans` lists what there is.
    """
    catalog = default_catalog()
    settled = catalog.plan(plan)
    group = Group.everybody(
        cluster_at(
            workers=workers,
            cluster=cluster,
            lab=lab,
            nic=nic,
            uplink=uplink,
            rank_order=rank_order,
        )
    )
    if svg is not None:
        _can_be_drawn(svg, group)
    workload = _workload(nbytes, model)
    at = first_step(settled) if step is None else step
    terminal = console(json_path)
    terminal.print(heading(settled, catalog.guarantee(settled), group, workload, at))
    with working(f"Checking {plan} for {group.size} workers"):
        explanation = explain(settled, group, workload, at, catalog)
    for piece in render(explanation, most_beats, terminal.width):
        terminal.print(piece)
    if svg is not None and explanation.scenes:
        write_file(svg, draw(explanation))
        terminal.print(f"Drawn into {svg}.")
    write_json(json_path, "explain", _settings(explanation), _rows(explanation))


def _can_be_drawn(svg: Path, group: Group) -> None:
    if str(svg) == "-":
        raise UsageError("--svg needs a file, not standard output", "give it a path")
    if group.size > MOST_WORKERS_DRAWN:
        raise UsageError(
            f"{group.size} workers are too many for a drawing",
            f"draw up to {MOST_WORKERS_DRAWN}, or leave out --svg",
        )


def _workload(nbytes: str | None, model: Path | None) -> Workload:
    if nbytes is not None and model is not None:
        raise UsageError("--bytes and --model are both given", "give one")
    if model is not None:
        return read_workload(model)
    return Workload.of_size(Size.parse(DATA if nbytes is None else nbytes))


def _settings(explanation: Explanation) -> dict[str, Any]:
    plan, guarantee = explanation.plan, explanation.guarantee
    slowest = explanation.slowest_link()
    return {
        "sync": str(plan),
        "workers": explanation.group.size,
        "racks": [list(rack) for rack in explanation.group.racks],
        "bytes": explanation.workload.nbytes,
        "step": explanation.step,
        "choices": {
            "topology": str(plan.topology),
            "what": plan.what.value,
            "cadence": str(plan.cadence),
            "redundancy": str(plan.redundancy) if plan.redundancy else None,
            "precision": str(plan.precision) if plan.precision else None,
        },
        "promise": guarantee.promise.value,
        "result": guarantee.result,
        "late": guarantee.late,
        "dead": guarantee.dead,
        "period": explanation.period,
        "turns": [[list(ranks) for ranks in groups] for groups in explanation.turns],
        "sequential_moves": explanation.sequential_moves,
        "sent": explanation.traffic.sent,
        "received": explanation.traffic.received,
        "links": {str(link): n for link, n in sorted(explanation.traffic.links.items())},
        "slowest_link": str(slowest[0]) if slowest else None,
        "slowest_link_seconds": slowest[1] if slowest else None,
        "uncompressed_seconds": explanation.uncompressed_seconds,
    }


def _rows(explanation: Explanation) -> list[dict[str, Any]]:
    """One for each round: who, how much, and every message with its beat."""
    rows = []
    for scene in explanation.scenes:
        for round_ in scene.rounds:
            members = set(round_.group.ranks)
            rows.append(
                {
                    "step": round_.step,
                    "when": round_.when.value,
                    "bucket": round_.bucket,
                    "payload": round_.payload.name,
                    "bytes": round_.payload.nbytes,
                    "group": list(round_.group.order),
                    "schedule": round_.schedule.name,
                    "postcondition": round_.schedule.after.text,
                    "chunks": len(round_.schedule.sizes),
                    "sequential_moves": scene.sequential_moves,
                    "beats": len(scene.beats),
                    "moves": [
                        {
                            "beat": beat,
                            "from": message.source,
                            "to": message.target,
                            "chunks": [message.start, message.stop],
                            "then": kind.value,
                        }
                        for beat, arrows in enumerate(scene.beats, start=1)
                        for message, kind in arrows
                        if message.source in members
                    ],
                }
            )
    return rows
