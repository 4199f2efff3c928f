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
from thalweg.report import Explanation, draw, explain, render
from thalweg.schedules import Group

DATA = "25MB"


def command(
    plan: Annotated[str, typer.Argument(help="A plan, like 'ring' or 'hierarchical+fp16'.")],
    workers: WorkersOption = None,
    cluster: ClusterOption = None,
    lab: LabOption = None,
    nic: NicOption = None,
    uplink: UplinkOption = None,
    rank_order: OrderOption = "rack",
    nbytes: Annotated[
        str | None, typer.Option("--bytes", metavar="SIZE", help=f"Of the model; {DATA} if absent.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option("--model", metavar="FILE", help="A workload file instead.")
    ] = None,
    step: Annotated[int, typer.Option(min=0, help="Of training; some plans take turns.")] = 0,
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
    """
    catalog = default_catalog()
    settled = catalog.plan(plan)
    group = Group.everybody(cluster_at(workers, cluster, lab, nic, uplink, rank_order))
    workload = _workload(nbytes, model)
    terminal = console(json_path)
    with working(f"Checking {plan} for {group.size} workers"):
        explanation = explain(settled, group, workload, step, catalog)
    for piece in render(explanation, most_beats):
        terminal.print(piece)
    if svg is not None:
        write_file(svg, draw(explanation))
        terminal.print(f"Drawn into {svg}.")
    write_json(json_path, "explain", _settings(explanation), _rows(explanation))


def _workload(nbytes: str | None, model: Path | None) -> Workload:
    if nbytes is not None and model is not None:
        raise UsageError("--bytes and --model are both given", "give one")
    return read_workload(model) if model else Workload.of_size(Size.parse(nbytes or DATA))


def _settings(explanation: Explanation) -> dict[str, Any]:
    plan, guarantee = explanation.plan, explanation.guarantee
    slowest = explanation.slowest_link()
    return {
        "plan": str(plan),
        "workers": explanation.group.size,
        "racks": [list(rack) for rack in explanation.group.racks],
        "bytes": explanation.data_bytes,
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
        "turns": [[list(ranks) for ranks in groups] for groups in explanation.turns],
        "sequential_moves": explanation.sequential_moves,
        "sent": explanation.traffic.sent,
        "received": explanation.traffic.received,
        "links": {str(link): n for link, n in sorted(explanation.traffic.links.items())},
        "seconds_at_least": slowest[1] if slowest else None,
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
