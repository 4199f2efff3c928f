"""What a run sees of itself, under each plan, in real processes."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import asdict
from itertools import pairwise
from mmap import mmap
from pathlib import Path
from statistics import median
from time import sleep
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.training.conftest import Case, outcomes
from tests.training.workers import TIMEOUT, on_ranks
from thalweg.errors import ThalwegError
from thalweg.launch.supervisor import SendMessage, run_workers
from thalweg.members import activity
from thalweg.observe.journal import read_records
from thalweg.observe.records import ClockSample, RunHeader, StepRecord
from thalweg.training import attach

STEPS = 8
FORWARD, LATE = 0.03, 0.15  # seconds
PLANS = ["ring", "ddp", "ring+powersgd(rank=2)", "dssync", "local_sgd(every=2)", "asp", "adapter"]


class Slow(nn.Module):
    """Its forward takes a while, on one rank longer."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 1))
        self.late = late

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sleep(FORWARD + LATE * self.late)
        y: torch.Tensor = self.layers(x)
        return y


def trained(rank: int, sync: str, folder: str, steps: int = STEPS, late: int = 2) -> dict[str, Any]:
    inner: nn.Module = Slow(rank == late)
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.001)
    model = inner
    if sync == "adapter":
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        model, sync = DistributedDataParallel(inner), "ring"
    run = attach(model, optimizer, plan=sync, timeout=TIMEOUT, records=folder)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(3, 4)).square().mean().backward()
        optimizer.step()
    summary = run.report().table()
    late_now = [asdict(each) for each in run.report().stragglers]
    run.close()
    return {"summary": summary, "late": late_now, "tallies": len(run.report().totals)}


def steps_of(folder: Path) -> dict[int, list[StepRecord]]:
    return {
        rank: [record for record in records if isinstance(record, StepRecord)]
        for rank, records in read_records(folder).items()
    }


Recorded = Callable[[str], dict[int, list[StepRecord]]]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """What each rank has recorded under a plan, by one crew for all plans."""
    folders = {sync: tmp_path_factory.mktemp("records") for sync in PLANS}
    cases = [
        Case(name=sync, parameters={"sync": sync, "folder": str(folder)})
        for sync, folder in folders.items()
    ]
    ended = outcomes(3, trained, cases)

    def recorded(sync: str) -> dict[int, list[StepRecord]]:
        outcome = ended[sync]
        if isinstance(outcome, ThalwegError):
            raise outcome
        return steps_of(folders[sync])

    return recorded


@pytest.mark.parametrize("sync", PLANS)
def test_moments_are_in_order_and_add_up(sync: str, recorded: Recorded) -> None:
    found = recorded(sync)
    assert sorted(found) == [0, 1, 2]
    for rank, steps in found.items():
        assert [step.step for step in steps] == list(range(STEPS))
        for before, step in pairwise(steps):
            assert step.begin == before.end
        for step in steps:
            moments = [step.begin, step.first, step.last, step.averaged, step.optimized, step.end]
            assert moments == sorted(moments)
            parts = step.computing + step.exposed + step.settled
            assert parts == pytest.approx(step.seconds, abs=1e-5)
            assert step.computing >= FORWARD + LATE * (rank == 2) - 0.001


@pytest.mark.parametrize("sync", ["ring", "ddp", "adapter"])
def test_waiting_for_the_late_is_exposed_and_not_computing(sync: str, recorded: Recorded) -> None:
    exposed = {
        rank: median(step.exposed for step in steps[2:]) for rank, steps in recorded(sync).items()
    }
    for rank in (0, 1):
        assert exposed[rank] >= LATE / 2
        assert exposed[rank] > exposed[2]


def test_records_say_whose_they_are_and_what_time_it_is(tmp_path: Path) -> None:
    on_ranks(3, lambda rank: trained(rank, "ring", str(tmp_path), steps=40, late=9))
    for rank, records in read_records(tmp_path).items():
        header = next(record for record in records if isinstance(record, RunHeader))
        assert (header.rank, header.size, header.sync) == (rank, 3, "ring")
        moments = [record for record in records if isinstance(record, ClockSample)]
        assert moments
        # one machine, one clock: aligned ranks differ by no more than they admit
        for moment in moments:
            first = next(r for r in read_records(tmp_path)[0] if isinstance(r, ClockSample))
            assert abs(moment.offset - first.offset) <= moment.error + 1e-3


def test_rounds_and_compressors_are_in_the_records(tmp_path: Path) -> None:
    on_ranks(2, lambda rank: trained(rank, "ring+powersgd(rank=2)", str(tmp_path)))
    for rank, steps in steps_of(tmp_path).items():
        for step in steps[1:]:
            assert step.rounds
            for each in step.rounds:
                assert step.begin <= each.ready <= each.started <= each.ended <= step.end
                assert set(each.peers) == {1 - rank}
        assert any(step.encodings for step in steps)


def test_who_computes_longest_is_named_on_all_ranks() -> None:
    results = on_ranks(3, lambda rank: trained(rank, "ring", "", steps=30))
    for result in results:
        [late] = result["late"]
        assert (late["kind"], late["who"]) == ("compute", ["2"])
    assert re.search(r"rank 2 on \S+: compute time", results[0]["summary"])
    assert results[0]["tallies"] == 3  # the first knows of all


def test_a_run_in_which_all_are_alike_names_nobody() -> None:
    results = on_ranks(3, lambda rank: trained(rank, "ring", "", steps=40, late=9))
    assert [result["late"] for result in results] == [[], [], []]


def test_who_hangs_is_named_with_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity, "MIN_LONG_PHASE_SECONDS", 0.5)
    lines: list[str] = []
    logged = mmap(-1, 1)  # for all processes

    def hear(rank: int, stream: str, line: str) -> None:
        lines.append(line)
        logged[0] |= load_for_ever.__name__ in line

    def load_for_ever() -> None:
        while not logged[0]:
            sleep(0.01)

    def work(rank: int, report: SendMessage) -> dict[str, Any]:
        logging.basicConfig(format="%(message)s", force=True)  # pytest's takes all
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        run = attach(model, optimizer, plan="ring", timeout="60s")
        for number in range(4):
            if rank == 1 and number == 3:
                load_for_ever()
            optimizer.zero_grad()
            model(torch.ones(3, 4)).square().mean().backward()
            optimizer.step()
        run.close()
        return {}

    run_workers(3, work, timeout=60.0, on_line=hear, debug=True)
    [line] = [line for line in lines if load_for_ever.__name__ in line]
    assert re.match(r"rank 1 on \S+ blocks the other ranks", line)
    assert "in forward of step 3" in line
    assert "test_step_timer.py:" in line
