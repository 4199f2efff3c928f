"""`thalweg doctor`: what is wrong with this set-up?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from thalweg.cli.output import JsonOption, console, write_json
from thalweg.cli.place import (
    LabOption,
    NicOption,
    OrderOption,
    UplinkOption,
    WorkersOption,
    site_at,
)
from thalweg.cli.progress import progress_bar
from thalweg.errors import UsageError
from thalweg.facts import Duration

if TYPE_CHECKING:
    from thalweg.doctor.examine import Diagnosis

FAILED = 1


def command(
    workers: WorkersOption = None,
    lab: LabOption = None,
    nic: NicOption = None,
    uplink: UplinkOption = None,
    rank_order: OrderOption = None,
    paste: Annotated[
        bool, typer.Option("--paste", help="A block to paste into an issue; no secrets in it.")
    ] = False,
    timeout: Annotated[
        str, typer.Option(metavar="DURATION", help="How long to wait for a worker to come.")
    ] = "30s",
    json_path: JsonOption = None,
) -> int:
    """Look for what breaks or slows training: interfaces, names, who reaches whom and how fast,
    clocks, versions, limits.

    Alone on this host; with --workers or --lab; or started like your training, as one of torchrun's
    or srun's workers. Exit code 1 if a check fails.
    """
    from thalweg.bench.jobs import launched  # torch takes a second: not at import
    from thalweg.doctor.environment import paste as environment_lines
    from thalweg.doctor.finding import failed
    from thalweg.report.doctor import outcome_text, paste_text, table

    seconds = Duration.parse(timeout).seconds
    found, where, notes = _diagnosis(launched(), workers, lab, nic, uplink, rank_order, seconds)
    if not found.tells:
        return 0  # rank 0 does, and its exit code counts
    terminal = console(json_path)
    if paste:
        block = paste_text(environment_lines(found.environment), found.findings)
        terminal.print(block, soft_wrap=True, markup=False)
    else:
        terminal.print(table(found.findings, where))
        terminal.print(outcome_text(found.findings))
    settings = {
        "workers": found.workers,
        "lab": lab,
        "nic": nic,
        "uplink": uplink,
        "rank_order": rank_order or "rack",
        "environment": dict(found.environment),
        "notes": notes,
    }
    write_json(json_path, "doctor", settings, [finding.row() for finding in found.findings])
    return FAILED if failed(found.findings) else 0


def _diagnosis(
    is_launched: bool,
    workers: int | None,
    lab: str | None,
    nic: str | None,
    uplink: str | None,
    rank_order: str | None,
    seconds: float,
) -> tuple[Diagnosis, str, list[str]]:
    """What was found, where, and what is to be known about that place."""
    from thalweg.bench.checkups import examine_at
    from thalweg.doctor.examine import examine

    placed = (workers, lab, nic, uplink, rank_order) != (None,) * 5
    if is_launched:
        if placed:
            raise UsageError("the launcher has started the workers", "don't say where they are")
        with progress_bar("Looking") as bar:
            found = examine(seconds, bar.show)
        return found, f"{found.workers} workers, started by {found.launcher}", []
    if not placed:
        return examine(seconds), "this host, alone", []
    place = site_at(workers=workers, lab=lab, nic=nic, uplink=uplink, rank_order=rank_order)
    with place as site, progress_bar("Looking") as bar:
        return examine_at(site, seconds, bar.show), site.text, site.notes
