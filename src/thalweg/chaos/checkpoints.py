"""Is a full disk told and borne, and a damaged checkpoint refused by name?"""

from __future__ import annotations

from collections.abc import Sequence

from thalweg.chaos.history import Commit, History, Refused, Saved
from thalweg.chaos.job import SAVE_EVERY
from thalweg.chaos.timing import Felt
from thalweg.chaos.verdicts import Violation

DAMAGED = "is damaged"
FULL = "No space left"
LONG = 2.0  # seconds: a shorter fault may be over before anybody sees it


def told(history: History, felt: Sequence[Felt]) -> list[Violation]:
    found = []
    refusals = list(history.of(Refused))
    saves = [event.time for event in history.of(Saved)]
    for each in felt:
        until = each.healed or each.struck
        ours = [r for r in refusals if r.fault == each.fault.number]
        full = [r for r in refusals if r.rank is not None and each.struck <= r.time]
        if any(DAMAGED not in r.text for r in ours):
            found.append(_violation(each, f"a damaged checkpoint wasn't refused: {ours[0].text}"))
        if each.fault.kind == "disk" and until - each.struck > LONG:
            taken = {c.step for c in history.of(Commit) if each.struck <= c.time <= until}
            was_due = len(taken) > SAVE_EVERY
            if was_due and not any(FULL in r.text for r in full if r.time <= until + LONG):
                found.append(_violation(each, "nobody was told that the disk is full"))
            if each.recovered is not None and saves and saves[-1] < each.struck:
                found.append(_violation(each, "no checkpoint was written afterwards"))
    return found


def _violation(each: Felt, text: str) -> Violation:
    return Violation(check="checkpoints", text=f"{each.fault}: {text}", fault=each.fault.number)
