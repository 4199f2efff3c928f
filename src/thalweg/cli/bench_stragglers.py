"""`thalweg bench stragglers`: CodedReduce's Figure 2, in a lab."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thalweg.cli.options import lab_of
from thalweg.cli.output import (
    JsonOption,
    console,
    names_among,
    progress_bar,
    write_file,
    write_json,
)
from thalweg.declarations import listed
from thalweg.errors import RunError, UsageError
from thalweg.facts import Duration, Rate, Size

if TYPE_CHECKING:
    from thalweg.studies.stragglers.config import StragglerTrial

STRAGGLER_NOTES = (
    "links: bytes of the busiest NIC in an iteration, over its rate; at small messages a token "
    "bucket's burst hides part of it, and gc doesn't wait for models to reach the last workers",
    "beyond: iterations with more stragglers than the scheme tolerates; waits: what these add to "
    "the mean at least",
)


def command(
    tree: Annotated[
        str, typer.Option(metavar="NxL", help="N children a parent, L layers.")
    ] = "4x3",
    stragglers: Annotated[
        int, typer.Option(min=0, help="Stragglers that a parent tolerates among its children.")
    ] = 1,
    nbytes: Annotated[
        str, typer.Option("--bytes", metavar="SIZE", help="Size of a gradient, as it is sent.")
    ] = "200KB",
    nic: Annotated[str, typer.Option(metavar="RATE", help="Rate of every NIC.")] = "100mbit",
    late: Annotated[
        float, typer.Option(metavar="P", help="Probability that a worker straggles, 0 to 1.")
    ] = 0.05,
    delay: Annotated[str, typer.Option(metavar="DURATION", help="Delay of a straggler.")] = "2s",
    compute: Annotated[
        str,
        typer.Option(
            metavar="DURATION",
            help="Compute time of one worker for all data; each sleeps for its part of it.",
        ),
    ] = "200ms",
    iterations: Annotated[int, typer.Option(min=1, help="Maximum number of iterations.")] = 300,
    budget: Annotated[
        str,
        typer.Option(
            metavar="DURATION",
            help="Time for each scheme in each setting, after which 10 iterations are enough.",
        ),
    ] = "40s",
    tables: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAMES",
            help="held, delays, compute, pauses, surface; all but the last if not given.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the stragglers.")] = 0,
    plot: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Path of the picture (SVG).")
    ] = None,
    json_path: JsonOption = None,
) -> None:
    """Time the aggregation of a gradient while some workers straggle: a master that waits for all
    (umw), gradient coding (gc), torch's ring (rar) and CodedReduce (cr), in a lab with a host for
    each worker.

    The same workers straggle under every scheme. Every gradient is compared with the true one.
    """
    from thalweg.studies.stragglers.config import STUDY_TABLES, RegularTree, StragglerTrial
    from thalweg.studies.stragglers.report import draw_stragglers, table_of

    *most, _ = STUDY_TABLES
    chosen = names_among(STUDY_TABLES, tables, "--tables", "table") if tables else most
    rate = Rate.parse(nic)
    asked = StragglerTrial(
        scheme="cr",
        tree=RegularTree.parse(tree, stragglers),
        elements=_elements(nbytes),
        late=late,
        delay=Duration.parse(delay).seconds,
        compute=Duration.parse(compute).seconds,
        iterations=iterations,
        budget=Duration.parse(budget).seconds,
        seed=seed,
    )
    found, notes = _measured(asked, chosen, rate)
    wrong = [row for rows in found.values() for row in rows if not row["exact"]]
    errors = dict.fromkeys(f"{row['scheme']}: {row['error']}" for row in wrong if row["error"])
    notes = [*errors, *STRAGGLER_NOTES, *notes]
    terminal = console(json_path)
    where = f"{asked.workers} workers in a tree of {asked.tree.text} and a root, NICs {rate}"
    terminal.print(where, style="italic")
    for name, rows in found.items():
        terminal.print(table_of(name, rows))
    terminal.print("\n".join(notes))
    settings = {
        "tree": asked.tree.text,
        "workers": asked.workers,
        "stragglers": stragglers,
        "bytes": 4 * asked.elements,
        "nic": str(rate),
        "late": late,
        "delay": asked.delay,
        "compute": asked.compute,
        "iterations": iterations,
        "budget": asked.budget,
        "seed": seed,
        "notes": notes,
        "tables": {name: rows for name, rows in found.items() if name != "held"},
    }
    write_json(json_path, "bench stragglers", settings, found.get("held", []))
    picture = plot or Path("thalweg-bench") / f"stragglers-{asked.tree.text}.svg"
    write_file(picture, draw_stragglers(where, found))
    terminal.print(f"Picture: {picture}")
    if wrong:
        schemes = listed(dict.fromkeys(row["scheme"] for row in wrong))
        raise RunError(f"{schemes} failed, or gave a gradient that isn't exact", "see its rows")


def _measured(
    asked: StragglerTrial, tables: Sequence[str], rate: Rate
) -> tuple[dict[str, list[dict[str, Any]]], list[str]]:
    """The rows of each table, measured in a lab, and the lab's notes."""
    from thalweg.bench.run_everywhere import Deployment  # torch takes a second: not at import
    from thalweg.studies.stragglers.tables import run_straggler_study

    with lab_of(asked.tree.cluster(rate)) as lab, progress_bar("Measuring") as bar:
        return run_straggler_study(asked, tables, Deployment.of_lab(lab), rate, bar.show), lab.notes


def _elements(text: str) -> int:
    nbytes = Size.parse(text).nbytes
    if nbytes % 4:
        raise UsageError(
            f"{nbytes} bytes aren't a whole number of float32", "give a multiple of 4 bytes"
        )
    return nbytes // 4
