"""`thalweg bench stragglers`: CodedReduce's Figure 2, in a lab."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thalweg.cli.options import lab_of
from thalweg.cli.output import JsonOption, console, progress_bar, write_file, write_json
from thalweg.declarations import listed
from thalweg.errors import RunError, UsageError
from thalweg.facts import Duration, Rate, Size

if TYPE_CHECKING:
    from thalweg.studies.stragglers.config import StragglerTrial
    from thalweg.studies.stragglers.tables import StragglerStudy

STRAGGLER_NOTES = (
    "links: what the busiest NIC carries in an iteration, over its rate; at small messages a token "
    "bucket's burst hides part of it, and gc doesn't wait for models to reach the last workers",
    "beyond: iterations with more late workers than the scheme can do without; waits: what these "
    "add to the mean at least",
)


def command(
    tree: Annotated[
        str, typer.Option("--tree", metavar="NxL", help="N children a parent, L layers.")
    ] = "4x3",
    stragglers: Annotated[
        int, typer.Option("--stragglers", min=0, help="Children that a parent can do without.")
    ] = 1,
    nbytes: Annotated[
        str, typer.Option("--bytes", metavar="SIZE", help="Of a gradient, as it is sent.")
    ] = "200KB",
    nic: Annotated[str, typer.Option("--nic", metavar="RATE", help="Of every NIC.")] = "100mbit",
    late: Annotated[
        float, typer.Option("--late", metavar="P", help="How likely a worker is late, 0 to 1.")
    ] = 0.05,
    delay: Annotated[
        str, typer.Option("--delay", metavar="DURATION", help="By how much it is late.")
    ] = "2s",
    compute: Annotated[
        str,
        typer.Option(
            "--compute",
            metavar="DURATION",
            help="What one worker would take for all data; each sleeps for its part of it.",
        ),
    ] = "200ms",
    iterations: Annotated[int, typer.Option("--iterations", min=1, help="At most.")] = 300,
    budget: Annotated[
        str,
        typer.Option(
            "--budget",
            metavar="DURATION",
            help="For each scheme in each setting; then fewer iterations will do, but 10.",
        ),
    ] = "40s",
    tables: Annotated[
        list[str] | None,
        typer.Option(
            "--tables",
            metavar="NAMES",
            help="held, delays, compute, pauses, surface; all but the last if not given.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of who is late when.")] = 0,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="PATH", help="Where the picture goes (SVG).")
    ] = None,
    json_path: JsonOption = None,
) -> None:
    """Time a gradient's aggregation while some workers are late: a master that waits for all (umw),
    gradient coding (gc), torch's ring (rar) and CodedReduce (cr), in a lab of a host for each.

    The same workers are late under every scheme. Every gradient is compared with the true one.
    """
    from thalweg.studies.stragglers.config import STUDY_TABLES, RegularTree, StragglerTrial
    from thalweg.studies.stragglers.report import draw_stragglers, table_of

    chosen = _chosen(tables, STUDY_TABLES)
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
    notes = [*found.errors, *STRAGGLER_NOTES, *notes]
    terminal = console(json_path)
    where = f"{asked.workers} workers in a tree of {asked.tree.text} and a root, NICs {rate}"
    terminal.print(where, style="italic")
    for name, rows in found.tables.items():
        terminal.print(table_of(name, rows))
    terminal.print("\n".join(notes), markup=False)
    settings = {
        **_settings(asked, str(rate)),
        "notes": notes,
        "tables": {name: rows for name, rows in found.tables.items() if name != "held"},
    }
    write_json(json_path, "bench stragglers", settings, found.tables.get("held", []))
    picture = plot or Path("thalweg-bench") / f"stragglers-{asked.tree.text}.svg"
    write_file(picture, draw_stragglers(where, found.tables))
    terminal.print(f"Picture: {picture}", markup=False)
    if found.wrong:
        schemes = listed(list(dict.fromkeys(row["scheme"] for row in found.wrong)))
        raise RunError(f"{schemes} failed, or gave a gradient that isn't exact", "see its rows")


def _measured(
    asked: StragglerTrial, tables: Sequence[str], rate: Rate
) -> tuple[StragglerStudy, list[str]]:
    """In a lab that is there meanwhile; and what is to be said of it."""
    from thalweg.bench.run_everywhere import Deployment  # torch takes a second: not at import
    from thalweg.studies.stragglers.tables import run_straggler_study

    with lab_of(asked.tree.cluster(rate)) as lab, progress_bar("Measuring") as bar:
        return run_straggler_study(asked, tables, Deployment.of_lab(lab), rate, bar.show), lab.notes


def _chosen(given: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    """Names, one by one or with commas between."""
    names = [name.strip() for text in given or () for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise UsageError(f"there is no table {name!r}", f"choose from {', '.join(known)}")
    if given and not names:
        raise UsageError("--tables names none", f"choose from {', '.join(known)}")
    return names or list(known[:-1])


def _elements(text: str) -> int:
    nbytes = Size.parse(text).nbytes
    if nbytes % 4:
        raise UsageError(
            f"{nbytes} bytes aren't a whole number of float32", "give a multiple of 4 bytes"
        )
    return nbytes // 4


def _settings(asked: StragglerTrial, nic: str) -> dict[str, Any]:
    return {
        "tree": asked.tree.text,
        "workers": asked.workers,
        "stragglers": asked.tree.stragglers,
        "bytes": 4 * asked.elements,
        "nic": nic,
        "late": asked.late,
        "delay": asked.delay,
        "compute": asked.compute,
        "iterations": asked.iterations,
        "budget": asked.budget,
        "seed": asked.seed,
    }
