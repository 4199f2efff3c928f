"""What came of the runs, in rows: one a fault, and for people one a kind of fault."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from thalweg.chaos.fault import FAULT_KINDS
from thalweg.chaos.recovery_times import FaultTimes
from thalweg.chaos.run import ChaosResult

Row = dict[str, Any]


def fault_rows(outcomes: Iterable[ChaosResult]) -> list[Row]:
    return [_fault_row(outcome, each) for outcome in outcomes for each in outcome.fault_times]


def run_rows(outcomes: Iterable[ChaosResult]) -> list[Row]:
    return [
        {
            "sync": outcome.config.sync,
            "seed": outcome.config.seed,
            "faults": len(outcome.fault_times),
            "steps": outcome.steps,
            "commits": outcome.commits,
            "seconds": outcome.seconds,
            "violations": [str(violation) for violation in outcome.violations],
            "history": str(outcome.history),
        }
        for outcome in outcomes
    ]


def kind_rows(rows: Sequence[Row]) -> list[Row]:
    """The faults of a kind under a plan in a few figures."""
    found = []
    for sync in dict.fromkeys(row["sync"] for row in rows):
        for kind in FAULT_KINDS:
            alike = [row for row in rows if (row["sync"], row["kind"]) == (sync, kind)]
            if alike:
                figures: Row = {"sync": sync, "kind": kind, "faults": len(alike)}
                for key in ("detected", "went_on", "back"):
                    values = [row[key] for row in alike if row[key] is not None]
                    figures[key] = (median(values), max(values)) if values else None
                figures["violations"] = sum(len(row["violations"]) for row in alike)
                found.append(figures)
    return found


def _fault_row(outcome: ChaosResult, each: FaultTimes) -> Row:
    fault = each.fault
    return {
        "sync": outcome.config.sync,
        "seed": outcome.config.seed,
        "fault": fault.number,
        "kind": fault.kind,
        "rank": fault.rank,
        "rack": fault.rack,
        "peer": fault.peer,
        "direction": fault.direction,
        "hold": fault.hold,
        "overlaps": fault.overlaps,
        "detected": each.detected,
        "went_on": each.stall_seconds,
        "back": each.rejoin_seconds,
        "recovered": None if each.recovered is None else each.recovered - each.injected,
        "violations": [str(v) for v in outcome.violations if v.fault == fault.number],
    }
