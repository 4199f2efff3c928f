"""Checks that training continues in time and that failures are attributed to the right ranks.

    progress      after a fault every rank that wasn't hit takes a step within a limit, and so does
                  every rank that was hit, once the fault has ended
    culprit       a rank that is reported as failed was hit by a fault at that time, and a rank that
                  was away for longer than the longest heartbeat timeout was reported
    checkpoints   a full disk is reported and survived, and a damaged checkpoint is rejected

A rank behind a slow link may be reported or not; of a black hole either end may be. An evicted rank
with which the others made no progress backs off for some seconds. In a coded tree no rank waits for
one that is away for a moment, and none need notice. On an overloaded machine a process may get no
processor time for a second: then that is the cause.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from thalweg.chaos.exact_job import CHECKPOINT_PERIOD_STEPS
from thalweg.chaos.fault import FaultKind
from thalweg.chaos.history import History, Problem, Refused, Saved, Starved
from thalweg.chaos.recovery_times import FaultTimes
from thalweg.errors import ranks_text
from thalweg.members.failure_detector import MAX_SILENCE_TIMEOUT_SECONDS
from thalweg.members.membership import MAX_EVICTED_BACK_OFF_SECONDS, NOT_REACHED_REASON

CERTAIN_DETECTION_SECONDS = MAX_SILENCE_TIMEOUT_SECONDS + 2.0
ATTRIBUTION_SECONDS = 3.0  # after recovery, in which a fault may still be the cause
DAMAGED_CHECKPOINT_TEXT = "is damaged"
DISK_FULL_TEXT = "No space left"
MIN_OBSERVABLE_FAULT_SECONDS = 2.0  # no rank need notice a shorter fault
DETECTED_FAULT_KINDS: tuple[FaultKind, ...] = ("kill", "restart", "pause", "cut", "oneway")


def progress(faults: Sequence[FaultTimes], recovery_limit: float) -> Iterator[Problem]:
    for times in faults:
        fault, stall, rejoin = times.fault, times.stall_seconds, times.rejoin_seconds
        slow = fault.hold if fault.kind in ("degrade", "disk") else 0.0  # it slows all ranks down
        evicted = any(NOT_REACHED_REASON in report.reason for report in times.reports)
        if times.recovered is None:
            yield _of(times, "the run never recovered")
        if stall is not None and stall > recovery_limit + slow:
            yield _of(times, f"the other ranks stalled for {stall:.1f} s")
        if rejoin is not None and rejoin > recovery_limit + evicted * MAX_EVICTED_BACK_OFF_SECONDS:
            ranks = ranks_text(sorted(times.hit))
            yield _of(times, f"{ranks} rejoined {rejoin:.1f} s after it ended")


def causes_reported(
    history: History, faults: Sequence[FaultTimes], *, missed: bool = True
) -> Iterator[Problem]:
    """Reports name the right ranks. `missed` is True if the others wait for a rank that is away for
    a moment, and so must notice."""
    for times in faults:
        fault = times.fault
        long = fault.hold > CERTAIN_DETECTION_SECONDS or (
            missed and fault.kind in ("kill", "restart")
        )
        named = {rank for report in times.reports for rank in (*report.left, *report.joined)}
        if fault.kind in DETECTED_FAULT_KINDS and long and not named & times.hit:
            yield _of(times, f"no rank reported {ranks_text(sorted(times.hit))}")
    for report in history.named:
        causes = [
            times
            for times in faults
            if times.injected <= report.time  # the rank may have noticed another fault before
            and (times.recovered is None or report.noticed <= times.recovered + ATTRIBUTION_SECONDS)
        ]
        explained = {rank for times in causes for rank in times.hit} | {
            pause.rank
            for pause in history.of(Starved)
            if pause.time - pause.seconds <= report.noticed <= pause.time + ATTRIBUTION_SECONDS
        }
        wrong = [rank for rank in report.left if rank not in explained]
        if wrong:
            yield (
                f"rank {report.rank} reported {ranks_text(wrong)} at step {report.step} "
                f"({report.reason}), but no fault had hit it",
                causes[-1].fault.number if causes else None,
            )


def checkpoints(history: History, faults: Sequence[FaultTimes]) -> Iterator[Problem]:
    refusals = history.of(Refused)
    saves = [record.time for record in history.of(Saved)]
    for times in faults:
        begin, end = times.injected, times.healed or times.injected
        read = [r for r in refusals if r.fault == times.fault.number]
        if any(DAMAGED_CHECKPOINT_TEXT not in r.text for r in read):
            yield _of(times, f"a damaged checkpoint wasn't rejected: {read[0].text}")
        if times.fault.kind == "disk" and end - begin > MIN_OBSERVABLE_FAULT_SECONDS:
            steps = {commit.step for commit in history.commits if begin <= commit.time <= end}
            reported = any(
                r.rank is not None
                and begin <= r.time <= end + MIN_OBSERVABLE_FAULT_SECONDS
                and DISK_FULL_TEXT in r.text
                for r in refusals
            )
            if len(steps) > CHECKPOINT_PERIOD_STEPS and not reported:
                yield _of(times, "no rank reported that the disk is full")
            if times.recovered is not None and saves and saves[-1] < begin:
                yield _of(times, "no checkpoint was written afterwards")


def _of(times: FaultTimes, text: str) -> Problem:
    return f"{times.fault}: {text}", times.fault.number
