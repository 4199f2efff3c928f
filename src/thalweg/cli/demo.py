"""`thalweg demo`: the exact plans side by side on a small cluster with thin uplinks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.progress import track
from rich.table import Table

from thalweg.catalog import default_catalog
from thalweg.cli.output import JsonOption, console, write_file, write_json
from thalweg.declarations import listed
from thalweg.errors import ScheduleError
from thalweg.facts import Cluster, Size, Workload, about
from thalweg.report import Explanation, draw, explain
from thalweg.runtime import Part, execute, flat, run_threads
from thalweg.schedules import Group, Schedule
from thalweg.transports import Array, Transport

PLANS = (
    "ddp",
    "ring",
    "ps",
    "star",
    "tree",
    "double_tree",
    "halving_doubling",
    "hierarchical",
    "hierarchical(form=leader)",
)
TIMEOUT = 60.0  # seconds


def command(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the drawings go.")] = Path(
        "thalweg-demo"
    ),
    json_path: JsonOption = None,
) -> None:
    """Build, check, run and draw every exact plan on two racks of four hosts.

    The hosts have 200 Mbit/s NICs, the racks 50 Mbit/s uplinks, and the ranks are numbered round
    the racks, as a scheduler that spreads a job does. Workers are threads of this process.
    """
    catalog = default_catalog()
    cluster = Cluster.regular([4, 4], nic="200mbit", uplink="50mbit", interleaved=True)
    group, workload = Group.everybody(cluster), Workload.of_size(Size.parse("10MB"))
    terminal = console(json_path)
    rows = []
    for text in track(PLANS, "Trying plans", console=terminal, disable=not terminal.is_terminal):
        explanation = explain(catalog.plan(text), group, workload, 0, catalog)
        rows.append(_row(explanation))
        write_file(out / f"{_file_name(text)}.svg", draw(explanation))
    terminal.print(_table(rows))
    terminal.print(
        "\nEvery plan was checked move by move, then run on real threads: "
        f"{sum(row['right_on_all_ranks'] for row in rows)} of {len(rows)} gave all ranks the right "
        "sum.\nThe bound is the slowest link's bytes at its full rate, without latency.\n"
        f"Drawings: {out}/*.svg\n"
        "Try: thalweg explain hierarchical --lab 2x4 --nic 200mbit --uplink 50mbit"
    )
    settings = {"nic": "200mbit", "uplink": "50mbit", "bytes": workload.nbytes}
    write_json(json_path, "demo", settings, rows)
    wrong = [row["sync"] for row in rows if not row["right_on_all_ranks"]]
    if wrong:
        raise ScheduleError(f"{listed(wrong)} gave a wrong sum", "please report this")


def _row(explanation: Explanation) -> dict[str, Any]:
    slowest = explanation.slowest_link()
    schedule = explanation.scenes[0].rounds[0].schedule
    return {
        "sync": str(explanation.plan),
        "promise": explanation.guarantee.promise.value,
        "nic_bytes": explanation.traffic.busiest("nic"),
        "uplink_bytes": explanation.traffic.busiest("uplink"),
        "sequential_moves": explanation.sequential_moves,
        "bound_seconds": slowest[1] if slowest else 0.0,
        "bottleneck": str(slowest[0]) if slowest else "",
        "right_on_all_ranks": _runs_right(schedule),
    }


def _runs_right(schedule: Schedule) -> bool:
    """Run it on threads with whole numbers, whose sum has no rounding; whether all got it."""
    rng = np.random.default_rng(0)
    inputs = {
        rank: rng.integers(-1000, 1000, schedule.elements).astype(np.float32)
        for rank in schedule.ranks
    }

    def work(transport: Transport) -> Array:
        vector = inputs[transport.rank].copy()
        execute(
            Part.of(schedule, transport.rank), transport, flat(schedule, vector), timeout=TIMEOUT
        )
        return vector

    results = run_threads(schedule.ranks, work)
    expected = sum(inputs.values())
    return all(np.array_equal(result, expected) for result in results.values())


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="10 MB over 2 racks x 4 hosts, 200mbit NICs, 50mbit uplinks", box=None)
    table.add_column("plan")
    for heading in ("busiest NIC", "busiest uplink", "sequential moves", "bound"):
        table.add_column(heading, justify="right")
    for row in sorted(rows, key=lambda row: row["bound_seconds"]):
        table.add_row(
            row["sync"],
            about(row["nic_bytes"], "B"),
            about(row["uplink_bytes"], "B"),
            str(row["sequential_moves"]),
            f"{row['bound_seconds']:.2f} s",
        )
    return table


def _file_name(text: str) -> str:
    return "".join(c if c.isalnum() or c in "_-" else "-" for c in text).strip("-")
