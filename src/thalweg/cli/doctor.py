"""`thalweg doctor`: what is wrong with this set-up?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from thalweg.cli.options import PlaceOptions, with_bundles
from thalweg.cli.output import JsonOption, console, progress_bar, write_json
from thalweg.errors import WorkerFailed
from thalweg.facts import Duration
from thalweg.report.tables import table_of

if TYPE_CHECKING:
    from thalweg.bench.run_everywhere import Deployment
    from thalweg.doctor import Finding
    from thalweg.doctor.run_checks import Diagnosis

FAILED_EXIT_CODE = 1
VERDICT_STYLES = {"fail": "bold red", "warn": "yellow", "ok": "green"}
DOCTOR_TIMEOUT_SECONDS = 600.0  # seconds for all of it


@with_bundles
def command(
    place: PlaceOptions,
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
    from thalweg.doctor.environment import paste as environment_lines
    from thalweg.doctor.finding import failed

    seconds = Duration.parse(timeout).seconds
    found, deployment = _diagnosis(place, seconds)
    if found is None:
        return 0  # rank 0 reports, and its exit code counts
    terminal = console(json_path)
    if paste:
        block = paste_text(environment_lines(found.environment), found.findings)
        terminal.print(block, soft_wrap=True, markup=False)
    else:
        terminal.print(table(found.findings, deployment.text))
        terminal.print(outcome_text(found.findings))
    settings = {
        "workers": found.workers,
        **place.settings,
        "environment": dict(found.environment),
        "notes": deployment.notes,
    }
    write_json(json_path, "doctor", settings, [finding.row() for finding in found.findings])
    return FAILED_EXIT_CODE if failed(found.findings) else 0


def _diagnosis(place: PlaceOptions, seconds: float) -> tuple[Diagnosis | None, Deployment]:
    """The diagnosis, and where it was made; no diagnosis if another launched rank reports it."""
    from thalweg.bench.run_everywhere import Deployment, Report, Result, run_everywhere
    from thalweg.doctor.run_checks import Diagnosis, examine

    def work(rank: int, report: Report) -> Result:
        found = examine(seconds, report)
        return found.packed() if found.tells else {}  # rank 0, or a rank that can't reach it

    unplaced = place == PlaceOptions()
    where = (
        nullcontext(Deployment.of_this_process()) if unplaced else place.site(under_launcher=True)
    )
    with where as deployment, progress_bar("Looking") as bar:
        results = run_everywhere(
            deployment, work, bar.show, timeout=DOCTOR_TIMEOUT_SECONDS, survives=True
        )
    for result in filter(None, results):
        return Diagnosis.unpacked(result), deployment
    if deployment.launcher is None:
        raise WorkerFailed("no worker returned a diagnosis", "see the workers' output above")
    return None, deployment


def table(findings: Sequence[Finding], where: str) -> Table:
    """The remedy stands below what was found."""
    made = table_of("", "check", "what was found, and what to do", title=where)
    for finding in findings:
        told = Text(finding.text)
        if finding.remedy:
            told.append(f"\n-> {finding.remedy}", style="bold")
        made.add_row(
            Text(finding.verdict, style=VERDICT_STYLES[finding.verdict]), finding.check, told
        )
    return made


def outcome_text(findings: Sequence[Finding]) -> str:
    number = Counter[str](finding.verdict for finding in findings)
    if not number["fail"] and not number["warn"]:
        return f"All {number['ok']} checks are fine."
    parts = [
        f"{number[verdict]} {words}"
        for verdict, words in (("fail", "failed"), ("warn", "to look at"), ("ok", "fine"))
        if number[verdict]
    ]
    return ", ".join(parts) + "."


def paste_text(environment: Sequence[str], findings: Sequence[Finding]) -> str:
    """Between two lines that say where to cut."""
    told = [f"- {finding.verdict} {finding.line}" for finding in findings]
    told = [line for line, finding in zip(told, findings, strict=True) if finding.verdict != "ok"]
    fine = [finding.check for finding in findings if finding.verdict == "ok"]
    lines = [
        "----- copy from here -----",
        *environment,
        "",
        *told,
        f"- ok: {', '.join(fine)}",
        "----- to here -----",
    ]
    return "\n".join(lines)
