"""A history in which all is as it should be: of three ranks, rank 1 is killed after step 4 and
comes back after step 8. Tests doctor it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from thalweg.chaos.fault import Fault
from thalweg.chaos.history import (
    Commit,
    Ended,
    Healed,
    History,
    Named,
    Record,
    Recovered,
    Struck,
    of_dict,
)

KILL = Fault(number=0, kind="kill", rank=1, after=0.5, hold=4.0)
BATCH = 6
LAST = 12
DIED, BACK = 4, 8
ALL, LEFT = (0, 1, 2), (0, 2)


def digest(step: int) -> str:
    return f"after-{step}"


def checksum(step: int) -> int:
    return 1000 * step


def sound() -> History:
    """A step takes a second; the fault comes at 4.5, and is felt until 6."""
    events: list[Record] = []
    for step in range(1, LAST + 1):
        members, formation = (LEFT, 2) if DIED < step <= BACK else (ALL, 1 if step <= DIED else 3)
        now = step + (1.0 if step > DIED else 0.0)
        if step == DIED + 1:
            events.append(Struck(time=4.5, fault=0))
            events += [_named(rank, 5.2, 2, left=(1,)) for rank in LEFT]
        if step == BACK + 1:
            events.append(Healed(time=9.1, fault=0))
            events += [_named(rank, 9.3, 3, joined=(1,)) for rank in ALL]
        events += [_commit(rank, now, step, formation, members) for rank in members]
        if step == BACK + 1:
            events.append(Recovered(time=now + 0.01, fault=0))
    events += [
        Ended(time=20.0, rank=r, life=int(r == 1), step=LAST, digest=digest(LAST)) for r in ALL
    ]
    return history_of(events)


def history_of(events: list[Record], *faults: Fault) -> History:
    history = History(faults or (KILL,))
    for event in events:
        history.add(event)
    return history


def doctored(which: Callable[[Record], bool], **changes: object) -> History:
    """With these changes to the events that are meant, of which there is one at least."""
    events = sound().events
    assert any(which(event) for event in events)
    return history_of([replace(e, **changes) if which(e) else e for e in events])


def without(which: Callable[[Record], bool]) -> History:
    events = sound().events
    assert any(which(event) for event in events)
    return history_of([event for event in events if not which(event)])


def is_commit(rank: int, step: int) -> Callable[[Record], bool]:
    return lambda event: isinstance(event, Commit) and (event.rank, event.step) == (rank, step)


def _commit(rank: int, now: float, step: int, formation: int, members: tuple[int, ...]) -> Commit:
    share = BATCH // len(members)
    return Commit(
        time=now + rank / 1000,
        rank=rank,
        life=int(rank == 1 and step > DIED),
        step=step,
        formation=formation,
        began_in=formation,
        members=members,
        digest=digest(step),
        samples=share,
        checksum=checksum(step) // len(members)
        + (checksum(step) % len(members) if rank == 0 else 0),
        before=(float(step + rank), -float(rank)),
        after=(step + sum(members) / len(members), -sum(members) / len(members)),
    )


def _named(
    rank: int,
    noticed: float,
    formation: int,
    left: tuple[int, ...] = (),
    joined: tuple[int, ...] = (),
) -> Named:
    return Named(
        time=noticed + 0.2,
        noticed=noticed,
        rank=rank,
        life=int(rank == 1),
        step=DIED if formation == 2 else BACK,
        formation=formation,
        left=left,
        joined=joined,
        reason="rank 1 is silent",
    )


def read(path: Path) -> History:
    """What was written to a file."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    events = [(line.pop("event"), line) for line in lines]
    history = History(Fault(**line) for kind, line in events if kind == "fault")
    for kind, line in events:
        if kind != "fault":
            history.add(of_dict({"event": kind, **line}))
    return history
