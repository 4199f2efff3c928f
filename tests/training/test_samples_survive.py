"""A worker dies in mid-epoch: every sample is counted once, or what is lost is reported."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.training.under_fire import BATCH, EPOCHS, SAMPLES, STEPS, noted, times_used, train
from tests.training.workers import SECONDS, on_ranks, one_value
from thalweg.catalog import parse_plan
from thalweg.facts import Cluster
from thalweg.launch.supervisor import SendMessage, run_workers
from thalweg.schedules import Group
from thalweg.training import Run
from thalweg.training.data.position import BatchIndex
from thalweg.training.data.sampler import BatchSampler
from thalweg.training.rendezvous import LostSamples

SIZE, DEAD = 4, 2
SHARE = BATCH // SIZE
ONCE = dict.fromkeys(range(SAMPLES), 1)
TREE = "codedreduce(fanout=3, stragglers=1)"


def train_and_kill(
    sync: str, at: int, when: str, notes: Path, dead: int = DEAD
) -> list[dict[str, Any]]:
    """What the others have in the end."""

    def act(run: Run, moment: str) -> None:
        if (run.rank, run.step, moment) == (dead, at, when):
            os.kill(os.getpid(), signal.SIGKILL)

    def work(rank: int, report: SendMessage) -> dict[str, Any]:
        return train(sync, notes, act)

    results = run_workers(SIZE, work, timeout=SECONDS, spare=range(SIZE), debug=True)
    assert not results[dead]
    lived = [result for result in results if result]
    assert one_value(lived, "steps") == STEPS
    return lived


@pytest.mark.parametrize(
    ("sync", "dead", "at", "when"),
    [
        ("ring", DEAD, 3, "before"),
        pytest.param("ring", 0, 3, "after", marks=pytest.mark.slow),
        pytest.param("hierarchical", DEAD, 7, "before", marks=pytest.mark.slow),
        pytest.param(TREE, DEAD, 3, "before", marks=pytest.mark.slow),
        pytest.param(TREE, 0, 3, "before", marks=pytest.mark.slow, id="the root of a tree"),
    ],
)
def test_each_is_counted_once_in_steps_that_all_take(
    sync: str, dead: int, at: int, when: str, tmp_path: Path
) -> None:
    """Bit for bit, what comes of it is what one worker alone makes of all samples."""
    notes, calm = tmp_path / "notes", tmp_path / "calm"
    for folder in (notes, calm):
        folder.mkdir()
    lived = train_and_kill(sync, at, when, notes, dead)
    wanted = on_ranks(1, lambda rank: train("ring", calm))[0]["values"]
    assert one_value(lived, "values") == wanted
    assert all(incident["samples"] == 0 for r in lived for incident in r["incidents"])
    for epoch in range(EPOCHS):
        used = times_used(notes, epoch, by_all=True)
        assert set(used) == set(ONCE)
        if sync != TREE:  # where several compute the same, and one of them counts
            assert used == ONCE


@pytest.mark.parametrize(
    ("sync", "at", "met"),
    [
        ("dssync", 3, 3),
        pytest.param("dssync", 6, 6, marks=pytest.mark.slow),
        pytest.param("local_sgd(every=4)", 6, 4, marks=pytest.mark.slow),
    ],
)
def test_what_is_lost_is_reported(sync: str, at: int, met: int, tmp_path: Path) -> None:
    """Steps before `met` had reached the others, and nothing is used twice."""
    lived = train_and_kill(sync, at, "before", tmp_path)
    incidents = [incident for result in lived for incident in result["incidents"]]
    assert len(incidents) == len(lived)
    incident = incidents[0]
    for other in incidents:  # ranks may be a step apart
        assert (other["left"], other["samples"]) == ([DEAD], incident["samples"])
    used = [times_used(tmp_path, epoch) for epoch in range(EPOCHS)]
    assert all(count == 1 for epoch in used for count in epoch.values())
    unused = EPOCHS * SAMPLES - sum(len(epoch) for epoch in used)
    alone = [n for n in noted(tmp_path) if n.rank == DEAD and n.step >= met and n.taken]
    assert unused > 0
    lost = unused + sum(len(note.samples) for note in alone)
    if len({other["step"] for other in incidents}) == 1:
        assert incident["samples"] == lost
    else:  # the step between them counts as lost, though the one behind may still take it
        assert lost <= incident["samples"] <= lost + BATCH


# What is lost, by itself


def lost(
    sync: str, *members: int, over: int, begins: int, since: int = 0, samples: int = 70
) -> int:
    sharers = LostSamples(
        plan=parse_plan(sync),
        group=Group.everybody(Cluster.flat(4)),
        batches=BatchSampler(samples=samples, batch=16, size=4, seed=0),
        since=since,
    )
    position = BatchIndex(epoch=1, batch=0)  # of step 5
    return sharers.lost(members, over=over, begins=begins, step=5, position=position)


def test_shares_since_the_last_meeting() -> None:
    assert lost("local_sgd(every=4)", 0, 1, 3, over=7, begins=8) == 1 + 3 * 4
    assert lost("local_sgd(every=4)", 0, 1, 3, over=7, begins=8, since=6) == 2 * 4
    assert lost("local_sgd(every=4)", 0, 1, over=7, begins=8) == 2 * (1 + 3 * 4)
    assert lost("gossip", 0, 1, 3, over=7, begins=8) == 4
    assert lost("gossip", 0, 1, 2, 3, over=7, begins=8) == 0


def test_the_last_batch_of_an_epoch_may_be_larger_or_smaller() -> None:
    """Of 70 samples, four batches of 16 and one of 6: step 4 is the last of the epoch before."""
    assert lost("gossip", 1, 2, 3, over=4, begins=5) == 2
    assert lost("gossip", 1, 2, 3, over=4, begins=6) == 2 + 4
    assert lost("gossip", 0, 1, 2, over=4, begins=5) == 1


@pytest.mark.parametrize("sync", ["ring", "hierarchical+powersgd(rank=2)", "asp"])
def test_nothing_where_replicas_are_equal(sync: str) -> None:
    assert lost(sync, 0, 1, 3, over=7, begins=8) == 0
