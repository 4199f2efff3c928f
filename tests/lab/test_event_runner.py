"""Events while workers run: each once, when its step or its time has come."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.conftest import LabOf
from thalweg.errors import LabError, WorkerFailed
from thalweg.facts import Duration, Link
from thalweg.lab import Event, Lab
from thalweg.lab.event import EventRunner
from thalweg.lab.namespaces import delete
from thalweg.launch.supervisor import ignore, run_workers
from thalweg.launch.worker_group import OnMessage, WorkerGroup
from thalweg.launch.worker_process import SendMessage

pytestmark = pytest.mark.usefixtures("needs_lab")
TIMEOUT = 60.0
STEPS = 12
NIC = Link("nic", "host1", "out")
EventTable = dict[str, Any]


@pytest.fixture
def lab(lab_of: LabOf) -> Lab:
    return lab_of(racks=2, hosts=[2, 1], nic="100mbit", uplink="100mbit")


class Noting:
    """A lab's director, and what the lab was like after each of its events.

    Workers wait after steps 3, 6, 9, ... until one more event has happened, as a file tells them,
    so that how fast this process is doesn't matter."""

    def __init__(self, director: EventRunner, look: Callable[[], Any], files: Path) -> None:
        self.director = director
        self.lab = look
        self.files = files
        self.seen: list[Any] = []
        self.steps: list[dict[int, int]] = []

    def prepare(self) -> None:
        self.director.prepare()
        self._note({})

    def poll(self, workers: WorkerGroup) -> None:
        self.director.poll(workers)
        self._note(workers.steps)

    def _note(self, steps: Mapping[int, int]) -> None:
        while len(self.seen) < len(self.director.fired):
            self.seen.append(self.lab())
            self.steps.append(dict(steps))
            (self.files / str(len(self.seen))).touch()


def count(rank: int, report: SendMessage, files: Path, events: int) -> dict[str, Any]:
    restarts = os.environ["THALWEG_RESTARTS"]
    for step in range(1, STEPS + 1):
        report({"step": step, "pid": os.getpid(), "restarts": restarts})
        if step % 3 == 0 and step // 3 <= events:
            deadline = monotonic() + TIMEOUT
            while not (files / str(step // 3)).exists():
                assert monotonic() < deadline
                sleep(0.01)
    return {"steps": STEPS, "restarts": restarts}


def run(
    lab: Lab,
    files: Path,
    *events: EventTable,
    look: Callable[[], Any] = lambda: None,
    on_message: OnMessage = ignore,
) -> tuple[list[dict[str, Any]], Noting]:
    noting = Noting(lab.director(events), look, files)
    results = run_workers(
        lab.cluster.workers,
        lambda rank, report: count(rank, report, files, len(events)),
        place=lab.place,
        director=noting,
        on_message=on_message,
        timeout=TIMEOUT,
    )
    return results, noting


def nic(lab: Lab) -> dict[str, Any]:
    return lab.links.status()[NIC]


def test_links_change_at_their_steps(lab: Lab, tmp_path: Path) -> None:
    def look() -> tuple[Any, ...]:
        now = nic(lab)
        return now["rate"], now["cut"], now["flows"]

    assert look() == ("100mbit", False, 0)
    results, noted = run(
        lab,
        tmp_path,
        {"at_step": 3, "action": "degrade", "host": 1, "rate": "20mbit", "direction": "out"},
        {"at_step": 6, "action": "cut", "host": "host1"},
        {"at_step": 9, "action": "heal", "host": 1},
        {"at_step": 12, "action": "restore", "host": 1},
        look=look,
    )
    assert [result["steps"] for result in results] == [STEPS] * 3
    assert noted.seen == [
        ("20mbit", False, 0),
        (None, True, 0),
        ("20mbit", False, 0),
        ("100mbit", False, 0),
    ]
    assert [(f.event.action, f.step) for f in noted.director.fired] == [
        ("degrade", 3),
        ("cut", 6),
        ("heal", 9),
        ("restore", 12),
    ]


def test_a_flow_begins_and_ends(lab: Lab, tmp_path: Path) -> None:
    _, noted = run(
        lab,
        tmp_path,
        {"at_step": 3, "action": "flow", "host": 1, "flows": 2, "rate": "1mbit"},
        {"at_step": 6, "action": "flow", "rack": 0, "rate": "1mbit"},
        {"at_step": 9, "action": "restore", "host": 1},
        look=lambda: {k.owner: r["flows"] for k, r in lab.links.status().items() if r["flows"]},
    )
    assert noted.seen == [{"host1": 2}, {"host1": 2, "rack0": 1}, {"rack0": 1}]


def test_step_zero_is_before_any_worker_starts(lab: Lab, tmp_path: Path) -> None:
    event = {"at_step": 0, "action": "degrade", "host": 1, "rate": "20mbit"}
    _, noted = run(lab, tmp_path, event, look=lambda: nic(lab)["rate"])
    assert noted.seen == ["20mbit"]
    assert noted.steps == [{}]


def test_an_event_at_a_time(lab: Lab, tmp_path: Path) -> None:
    director = lab.director([{"at": "1h", "action": "cut", "host": 1}])
    event = {"at": "600ms", "action": "degrade", "host": 1, "rate": "20mbit"}
    _, noted = run(lab, tmp_path, event, look=lambda: nic(lab)["rate"])
    [fired] = noted.director.fired
    assert fired.seconds >= 0.6
    assert noted.seen == ["20mbit"]
    run_workers(3, lambda rank, report: None, place=lab.place, director=director, timeout=TIMEOUT)
    assert director.fired == []


def test_an_event_ends_when_its_time_is_over(lab: Lab) -> None:
    cut = Event(action="cut", at_step=0, until=Duration(1.0), rank=1)
    runner, seen = lab.director([cut]), []

    class Looking:
        def prepare(self) -> None:
            runner.prepare()
            seen.append(nic(lab)["cut"])

        def poll(self, workers: WorkerGroup) -> None:
            runner.poll(workers)

    def work(rank: int, report: SendMessage) -> None:
        sleep(2.0)

    run_workers(3, work, place=lab.place, director=Looking(), timeout=TIMEOUT)
    assert [*seen, nic(lab)["cut"]] == [True, False]


def test_who_is_killed_has_returned_nothing_and_the_others_go_on(lab: Lab) -> None:
    def work(rank: int, report: SendMessage) -> int:
        report({"step": 1})
        sleep(600 if rank == 1 else 0)
        return rank

    events = [{"at_step": 1, "action": "kill", "host": 1}]
    assert lab.run(work, events=events, process_group=False, timeout="60s") == [0, None, 2]


def test_who_is_restarted_runs_anew(lab: Lab, tmp_path: Path) -> None:
    pids: dict[int, set[int]] = {0: set(), 1: set(), 2: set()}
    firsts: list[tuple[int, str]] = []

    def heard(rank: int, message: dict[str, Any]) -> None:
        pids[rank].add(message["pid"])
        if message["step"] == 1:
            firsts.append((rank, message["restarts"]))

    event = {"at_step": 3, "action": "restart", "host": "host1"}
    results, _ = run(lab, tmp_path, event, on_message=heard)
    assert [result["restarts"] for result in results] == ["0", "1", "0"]
    assert [len(pids[rank]) for rank in range(3)] == [1, 2, 1]
    assert sorted(firsts) == [(0, "0"), (1, "0"), (1, "1"), (2, "0")]


def test_a_restarted_worker_has_no_process_group(lab: Lab) -> None:
    def work(rank: int, report: SendMessage) -> list[Any]:
        grouped = dist.is_initialized()
        report({"step": 1})
        if rank == 1 and os.environ["THALWEG_RESTARTS"] == "0":
            sleep(600)
        return [rank, grouped]

    events = [Event(action="restart", at_step=1, host=1)]
    assert lab.run(work, events=events, timeout="60s") == [[0, True], [1, False], [2, True]]


def test_that_it_was_killed_on_purpose_is_told_if_others_fail_for_it(lab: Lab) -> None:
    def work(rank: int, report: SendMessage) -> None:
        for step in range(1, 1000):
            dist.all_reduce(torch.ones(10))
            report({"step": step})

    events = [
        {"at_step": 3, "action": "kill", "host": 1},
        {"at": "10min", "action": "kill", "host": 0},
    ]
    line = r"^rank 1 on host1 was killed on purpose, and the others can't continue without it: "
    with pytest.raises(WorkerFailed, match=line):
        lab.run(work, events=events, timeout="60s")
    [came] = lab.fired
    assert came.event.at_step == 3
    assert came.step >= 3


def test_a_killed_worker_comes_back_when_it_is_restarted(lab: Lab, tmp_path: Path) -> None:
    results, noted = run(
        lab,
        tmp_path,
        {"at_step": 3, "action": "kill", "host": 1},
        {"at_step": 6, "action": "restart", "host": 1},  # the others count alone by then
    )
    assert [result["restarts"] for result in results] == ["0", "1", "0"]
    assert 1 not in noted.steps[1]  # in its new life it has done none


def test_who_is_paused_stands_still_until_it_is_resumed(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "2").touch()  # nobody waits for the second event
    results, noted = run(
        lab,
        tmp_path,
        {"at_step": 3, "action": "pause", "host": 1},
        {"at": "2s", "action": "resume", "host": 1},
    )
    assert [result["steps"] for result in results] == [STEPS] * 3
    assert noted.steps[1] == {0: STEPS, 1: 3, 2: STEPS}


def test_a_mistake_is_told_before_anybody_starts(lab: Lab) -> None:
    mistakes: list[tuple[EventTable, str]] = [
        ({"action": "cut", "host": 3}, "there is no host 3; give a rank from 0 to 2, or a name"),
        ({"action": "kill", "host": "x"}, "there is no host 'x'; give a rank from 0 to 2, or a"),
        ({"action": "heal", "rack": 2}, "there is no rack 2; there are 2, numbered from 0"),
        ({"action": "heal", "rack": "x"}, "there is no rack 'x'; there are 2, numbered from 0"),
        (
            {"action": "degrade", "rack": 0, "rate": "1kbit"},
            "the lab can't emulate a link of 1kbit; give 8kbit to 34gbit",
        ),
        ({"action": "explode", "rack": 0}, "the event has no action 'explode'; give one of"),
    ]
    started: list[int] = []
    for event, message in mistakes:
        events = [{"at_step": 1, **event}]
        with pytest.raises(LabError) as caught:
            lab.director(events)
        assert str(caught.value).startswith(message)
        with pytest.raises(LabError):
            lab.run(
                lambda rank, report: report({"step": 1}),
                events=events,
                on_message=lambda rank, _: started.append(rank),
                timeout="60s",
            )
    assert started == []


def test_an_event_that_fails_ends_the_run_and_says_why(name: str) -> None:
    def work(rank: int, report: SendMessage) -> None:
        report({"step": 1})
        sleep(600)

    event = {"at_step": 1, "action": "degrade", "host": 0, "rate": "1mbit", "direction": "in"}
    with Lab(hosts=2, name=name) as lab:
        delete(lab.wiring.rack(0))
        with pytest.raises(LabError, match=r"^namespace .*@rack0 is gone; take the lab down"):
            lab.run(work, events=[event], process_group=False, timeout="60s")
        assert lab.processes() == {"host0": [], "host1": []}
