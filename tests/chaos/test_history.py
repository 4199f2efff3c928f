from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.histories import KILL, read, sound
from thalweg.chaos import history
from thalweg.chaos.history import Commit, Healed, History, Recovered, Struck


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    with path.open("w") as file:
        written = History([KILL], file)
        for event in sound().events:
            written.add(event)
    found = read(path)
    assert found.faults == (KILL,)
    assert found.events == written.events


def test_moments_of_a_fault() -> None:
    history_so_far = sound()
    moments = [history_so_far.time_of(kind, 0) for kind in (Struck, Healed, Recovered)]
    assert moments == sorted(moment for moment in moments if moment is not None)
    assert history_so_far.time_of(Struck, 1) is None


def test_it_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    history_so_far, events = History(), sound().events
    monkeypatch.setattr(history, "MAX_RECORDS", 10)
    for event in events:
        history_so_far.add(event)
    assert history_so_far.is_full
    assert len(history_so_far.events) == 10
    assert all(isinstance(event, Commit) for event in history_so_far.events)
