"""What is wrong with a set-up: a table for people, and a block to paste into an issue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from thalweg.doctor import Finding

STYLES = {"fail": "bold red", "warn": "yellow", "ok": "green"}


def table(findings: Sequence[Finding], where: str) -> Table:
    """The remedy stands below what was found."""
    made = Table(title=where, title_justify="left", box=None)
    for heading in ("", "check", "what was found, and what to do"):
        made.add_column(heading)
    for finding in findings:
        told = Text(finding.told)
        if finding.remedy:
            told.append(f"\n-> {finding.remedy}", style="bold")
        made.add_row(Text(finding.verdict, style=STYLES[finding.verdict]), finding.check, told)
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
