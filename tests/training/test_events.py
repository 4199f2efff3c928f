"""What happened in a run is in one list, in the records, and told to the script's function."""

from __future__ import annotations

import json
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

import pytest
import torch
from torch import nn

from tests.training.workers import TIMEOUT, on_ranks
from thalweg.plan import Plan
from thalweg.training import Run, attach
from thalweg.training.events import EVENT_HISTORY_COUNT, Events, RunEvent


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), 0.1)


def steps(run: Run, model: nn.Module, number: int) -> None:
    for _ in range(number):
        run.optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        run.optimizer.step()


def test_a_change_of_plan_is_an_event_a_record_and_a_call(tmp_path: Path) -> None:
    def work(rank: int) -> dict[str, Any]:
        model, optimizer = model_and_optimizer()
        called: list[tuple[int, str, bool]] = []

        def on_event(event: RunEvent) -> None:
            called.append((run.step, event.text, current_thread() is main_thread()))

        run = attach(
            model, optimizer, plan="ring", timeout=TIMEOUT, records=tmp_path, on_event=on_event
        )
        steps(run, model, 2)
        if rank == 0:
            run.switch("tree")
        while str(run.plan) != "tree":
            steps(run, model, 1)
        steps(run, model, 2)
        run.close()
        [event] = [event for event in run.events if event.kind == "plan"]
        assert isinstance(event.data, Plan)
        told = [(step, here) for step, text, here in called if text == "tree"]
        return {"step": event.step, "text": event.text, "told": told}

    results = on_ranks(2, work)
    assert {result["text"] for result in results} == {"tree"}
    for result in results:  # in the training thread, once, when the plan runs
        [(step, is_here)] = result["told"]
        assert is_here
        assert step >= result["step"]
    for file in tmp_path.iterdir():
        records = [json.loads(line) for line in file.read_text().splitlines()]
        noted = [(r["topic"], r["text"]) for r in records if r["kind"] == "note"]
        assert ("plan", "tree") in noted


def test_an_error_in_the_function_of_the_script_is_raised_where_it_trains() -> None:
    model, optimizer = model_and_optimizer()

    def on_event(event: RunEvent) -> None:
        raise ValueError(event.text)

    run = attach(model, optimizer, plan="ring", on_event=on_event, nonfinite="skip")
    model(torch.full((1, 2), torch.nan)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(ValueError, match="skipped: "):
        model(torch.ones(1, 2))
    model(torch.ones(1, 2)).sum().backward()  # that event is over
    optimizer.step()
    run.close()
    assert run.step == 2


def test_the_last_events_are_told_at_the_end() -> None:
    model, optimizer = model_and_optimizer()
    told: list[RunEvent] = []
    with attach(model, optimizer, plan="ring", on_event=told.append, nonfinite="skip") as run:
        model(torch.full((1, 2), torch.nan)).sum().backward()
        optimizer.step()
        assert told == []
    [event] = told
    assert run.events == (event,)
    assert (event.step, event.kind) == (0, "nonfinite")
    assert event.text == f"skipped: {event.data}"


def test_the_list_is_bounded() -> None:
    events = Events()
    for step in range(EVENT_HISTORY_COUNT + 3):
        events.add("hang", step, "")
    assert [events.newest()[0].step, len(events.newest())] == [3, EVENT_HISTORY_COUNT]
