"""Workers with something planted in them, examined together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from thalweg.doctor import Finding
from thalweg.doctor.finding import RankFacts
from thalweg.doctor.run_checks import Diagnosis, examine
from thalweg.lab import Lab
from thalweg.launch.supervisor import run_workers
from thalweg.launch.worker_process import SendMessage

TIMEOUT = 5.0  # seconds for all to come
LIMIT = 60.0
Plant = Callable[[int], None]
"""Called with the rank, in its process, before it is examined."""


def nothing(rank: int) -> None:
    pass


def examined_here(size: int, plant: Plant = nothing, timeout: float = TIMEOUT) -> list[Diagnosis]:
    """By local workers; those of the ranks that lived."""

    def work(rank: int, report: SendMessage) -> dict[str, Any]:
        plant(rank)
        return examine(timeout).packed()

    results = run_workers(size, work, timeout=LIMIT, survives=True, on_line=_quiet, debug=True)
    return [Diagnosis.unpacked(result) for result in results if result]


def examined_in(lab: Lab, plant: Plant = nothing, timeout: float = TIMEOUT) -> list[Finding]:
    """The findings that rank 0 reports."""

    def work(rank: int, report: SendMessage) -> dict[str, Any]:
        plant(rank)
        return examine(timeout).packed()

    results = lab.run(work, process_group=False, timeout=f"{LIMIT:g}s")
    diagnoses = [Diagnosis.unpacked(result) for result in results]
    assert [found.reports for found in diagnoses] == [True] + [False] * (len(diagnoses) - 1)
    return list(diagnoses[0].findings)


def problems(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.verdict != "ok"]


def facts(rank: int, host: str | None = None, **more: Any) -> RankFacts:
    """Of a rank on a host of its own, unless another is named."""
    name = host or f"host{rank}"
    known = {"address": f"10.0.0.{rank + 1}", "interface": "eth0", "resolved": ["10.0.0.9"], **more}
    return RankFacts(rank=rank, name=name, machine=name, stack="", **known)


def _quiet(rank: int, stream: str, line: str) -> None:
    pass


__all__ = [
    "Diagnosis",
    "examined_here",
    "examined_in",
    "facts",
    "nothing",
    "problems",
]
