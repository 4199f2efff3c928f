"""Does training go on in time, and is it said who was the cause?

    progress      after a fault every rank that wasn't hit takes a step within a bound, and so does
                  every rank that was, once it is healed
    culprit       who is said to be gone was hit by a fault at that time, or is cut off by one; and
                  whoever was out for longer than signs of life may stay away was named
    checkpoints   a full disk is told and borne, and a damaged checkpoint refused by name

A slow link is no reason to be named, and none not to be. Of a black hole either end may be named.
One that was left out, since the others got nowhere with it, stays away for some seconds by itself.
Under a code nobody waits for one that is away for a moment, and nobody need notice. On a machine
with too much to do a process may not get to run for a second: then that is the cause.
"""

from __future__ import annotations

from collections.abc import Sequence

from thalweg.chaos.exact_job import CHECKPOINT_PERIOD_STEPS
from thalweg.chaos.fault import FaultKind
from thalweg.chaos.history import Commit, History, Named, Refused, Saved, Starved, Violation
from thalweg.chaos.recovery_times import FaultTimes
from thalweg.errors import ranks_text
from thalweg.members.failure_detector import MAX_SILENCE_TIMEOUT_SECONDS
from thalweg.members.membership import MAX_EVICTED_BACK_OFF_SECONDS, NOT_REACHED_REASON

CERTAIN_DETECTION_SECONDS = (
    MAX_SILENCE_TIMEOUT_SECONDS + 2.0
)  # seconds out after which nobody can have missed it
FAULT_LINGER_SECONDS = 3.0  # seconds after a fault is over in which it may still be the reason
DAMAGED_CHECKPOINT_TEXT = "is damaged"
DISK_FULL_TEXT = "No space left"
MIN_OBSERVABLE_FAULT_SECONDS = 2.0  # seconds: a shorter fault may be over before anybody sees it
DETECTED_FAULT_KINDS: tuple[FaultKind, ...] = ("kill", "restart", "pause", "cut", "oneway")


def progress(felt: Sequence[FaultTimes], bound: float) -> list[Violation]:
    found = []
    for each in felt:
        if each.recovered is None:
            found.append(_violation("progress", each, "the run was never well again"))
        if each.stall_seconds is not None and each.stall_seconds > bound + _borne(each):
            text = f"the others went on after {each.stall_seconds:.1f} s only"
            found.append(_violation("progress", each, text))
        if each.rejoin_seconds is not None and each.rejoin_seconds > bound + _kept_away(each):
            who = ranks_text(sorted(each.hit))
            text = f"{who} took a step {each.rejoin_seconds:.1f} s after that only"
            found.append(_violation("progress", each, text))
    return found


def causes_reported(
    history: History, felt: Sequence[FaultTimes], *, missed: bool = True
) -> list[Violation]:
    """`missed`: whether the others wait for one that is away for a moment, and so must notice."""
    return [*_unnamed(felt, missed), *_wrongly_named(history, felt)]


def _borne(each: FaultTimes) -> float:
    """Seconds that others may have to wait for: a slow link slows all down while it is slow."""
    return each.fault.hold if each.fault.kind in ("degrade", "disk") else 0.0


def _kept_away(each: FaultTimes) -> float:
    """Seconds that one may have to stay away with which the others got nowhere, before it asks."""
    left_out = any(NOT_REACHED_REASON in event.reason for event in each.reports)
    return MAX_EVICTED_BACK_OFF_SECONDS if left_out else 0.0


def _unnamed(felt: Sequence[FaultTimes], missed: bool) -> list[Violation]:
    found = []
    for each in felt:
        fault = each.fault
        long = fault.hold > CERTAIN_DETECTION_SECONDS or (
            missed and fault.kind in ("kill", "restart")
        )
        named = {rank for event in each.reports for rank in (*event.left, *event.joined)}
        if fault.kind in DETECTED_FAULT_KINDS and long and not named & each.hit:
            text = f"nobody named {ranks_text(sorted(each.hit))}"
            found.append(_violation("culprit", each, text))
    return found


def _wrongly_named(history: History, felt: Sequence[FaultTimes]) -> list[Violation]:
    found = []
    starved = list(history.of(Starved))
    for event in history.named:
        causes = [
            each
            for each in felt
            if each.injected <= event.time  # it may have noticed another one before
            and (each.recovered is None or event.noticed <= each.recovered + FAULT_LINGER_SECONDS)
        ]
        hit = {rank for each in causes for rank in each.hit} | {
            pause.rank for pause in starved if _explains(pause, event)
        }
        innocent = [rank for rank in event.left if rank not in hit]
        if innocent:
            found.append(
                Violation(
                    check="culprit",
                    text=f"rank {event.rank} named {ranks_text(innocent)} at step {event.step} "
                    f"({event.reason}), which no fault had hit",
                    fault=causes[-1].fault.number if causes else None,
                )
            )
    return found


def _explains(pause: Starved, event: Named) -> bool:
    """Whether it couldn't give a sign in the time before it was named."""
    began = pause.time - pause.seconds
    return began <= event.noticed <= pause.time + FAULT_LINGER_SECONDS


def checkpoints(history: History, felt: Sequence[FaultTimes]) -> list[Violation]:
    texts: list[tuple[FaultTimes, str]] = []
    refusals = list(history.of(Refused))
    saves = [event.time for event in history.of(Saved)]
    for each in felt:
        until = each.healed or each.injected
        ours = [r for r in refusals if r.fault == each.fault.number]
        full = [r for r in refusals if r.rank is not None and each.injected <= r.time]
        if any(DAMAGED_CHECKPOINT_TEXT not in r.text for r in ours):
            texts.append((each, f"a damaged checkpoint wasn't refused: {ours[0].text}"))
        if each.fault.kind == "disk" and until - each.injected > MIN_OBSERVABLE_FAULT_SECONDS:
            taken = {c.step for c in history.of(Commit) if each.injected <= c.time <= until}
            was_due = len(taken) > CHECKPOINT_PERIOD_STEPS
            if was_due and not any(
                DISK_FULL_TEXT in r.text
                for r in full
                if r.time <= until + MIN_OBSERVABLE_FAULT_SECONDS
            ):
                texts.append((each, "nobody was told that the disk is full"))
            if each.recovered is not None and saves and saves[-1] < each.injected:
                texts.append((each, "no checkpoint was written afterwards"))
    return [_violation("checkpoints", each, text) for each, text in texts]


def _violation(check: str, each: FaultTimes, text: str) -> Violation:
    return Violation(check=check, text=f"{each.fault}: {text}", fault=each.fault.number)
