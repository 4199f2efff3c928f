"""`thalweg doctor`: checks of the environment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from thalweg.cli.options import PlaceOptions, TimeoutOption, option, with_bundles
from thalweg.cli.output import Output, progress_bar
from thalweg.errors import WorkerFailed
from thalweg.facts import Duration
from thalweg.report.tables import table_of

if TYPE_CHECKING:
    from thalweg.bench.run_everywhere import Deployment
    from thalweg.doctor import Finding
    from thalweg.doctor.run_checks import Diagnosis

VERDICT_STYLES = {"fail": "bold red", "warn": "yellow", "ok": "green"}
DOCTOR_TIMEOUT_SECONDS = 600.0  # for all checks together


@with_bundles
def doctor(
    *,
    place: PlaceOptions,
    paste: Annotated[
        bool, option("A block to paste into an issue; no secrets in it.", None, "--paste")
    ] = False,
    timeout: TimeoutOption = "30s",
    output: Output,
) -> int:
    """Check what can break or slow down training: interfaces, names, reachability and bandwidth
    between ranks, clocks, versions, limits.

    It runs alone on this host; with --workers or --lab; or started like your training, as one of
    torchrun's or srun's workers. Exit code 1 if a check fails.
    """
    from thalweg.doctor.environment import paste as environment_lines
    from thalweg.doctor.finding import failed

    diagnosis, deployment = _diagnosis(place, Duration.parse(timeout).seconds)
    if diagnosis is None:
        return 0  # rank 0 reports, and its exit code counts
    if paste:
        block = paste_text(environment_lines(diagnosis.environment), diagnosis.findings)
        output.print(block, soft_wrap=True)
    else:
        output.print(table(diagnosis.findings, deployment.text), outcome_text(diagnosis.findings))
    output.write_json(
        "doctor",
        [finding.row() for finding in diagnosis.findings],
        workers=diagnosis.workers,
        **place.settings,
        environment=dict(diagnosis.environment),
        notes=deployment.notes,
    )
    return 1 if failed(diagnosis.findings) else 0


def _diagnosis(place: PlaceOptions, seconds: float) -> tuple[Diagnosis | None, Deployment]:
    """The diagnosis, and where it was made; no diagnosis if another launched rank reports it."""
    from thalweg.bench.run_everywhere import Deployment, Report, Result, run_everywhere
    from thalweg.doctor.run_checks import Diagnosis, examine

    def work(rank: int, report: Report) -> Result:
        diagnosis = examine(seconds, report)
        # rank 0, or a rank that can't reach it, has reports
        return diagnosis.packed() if diagnosis.reports else {}

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
    columns: dict[str, Callable[[Finding], RenderableType]] = {
        "": lambda finding: Text(finding.verdict, style=VERDICT_STYLES[finding.verdict]),
        "check": lambda finding: finding.check,
        "finding and remedy": _finding_text,
    }
    return table_of(findings, columns, title=where)


def _finding_text(finding: Finding) -> Text:
    """The finding, with its remedy on the next line."""
    return Text.assemble(finding.text, (f"\n-> {finding.remedy}" if finding.remedy else "", "bold"))


def outcome_text(findings: Sequence[Finding]) -> str:
    number = Counter[str](finding.verdict for finding in findings)
    if not number["fail"] and not number["warn"]:
        return f"All {number['ok']} checks are ok."
    parts = [
        f"{number[verdict]} {words}"
        for verdict, words in (("fail", "failed"), ("warn", "warnings"), ("ok", "ok"))
        if number[verdict]
    ]
    return ", ".join(parts) + "."


def paste_text(environment: Sequence[str], findings: Sequence[Finding]) -> str:
    """The environment and the findings, between two lines that mark what to copy."""
    bad = [f"- {found.verdict} {found.line}" for found in findings if found.verdict != "ok"]
    fine = [finding.check for finding in findings if finding.verdict == "ok"]
    lines = [
        "----- copy from here -----",
        *environment,
        "",
        *bad,
        f"- ok: {', '.join(fine)}",
        "----- to here -----",
    ]
    return "\n".join(lines)
