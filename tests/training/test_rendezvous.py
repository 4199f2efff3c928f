"""Workers die, are started again, or stand still, and training goes on as if nothing had happened:
under exact plans the end is that of a run in which nothing did, bit for bit."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from tests.training.fates import (
    EPOCHS,
    LEARNING_RATE,
    SIZE,
    STEPS,
    Board,
    Ended,
    Job,
    all_come,
    awaits,
    dies,
    stops,
    train_among_fates,
    widened,
)
from tests.training.under_fire import BATCH, Numbered
from tests.training.workers import SECONDS, TIMEOUT, one_value, values
from thalweg.errors import Interrupted
from thalweg.launch.supervisor import run_workers
from thalweg.members.membership_epoch import MembershipEpoch
from thalweg.training import Run, attach
from thalweg.training.exchanges.rounds import RoundsExchange
from thalweg.training.lifecycle import RankSession
from thalweg.training.recovery import Recovery

LOST, AT = 2, 3  # the rank that something befalls, and the step
BACK = 6  # the step before which the others wait for it
EXACT = ["ring", "hierarchical", "codedreduce(fanout=2, stragglers=1)"]
EVENTUAL = ["dssync+int8", "local_sgd(every=4)", "gossip"]
LOSSY = ["hierarchical+powersgd(rank=2)", "lgc", "asp"]
ALL = EXACT + EVENTUAL + LOSSY
FAST = {
    ("ring", "killed"),
    ("ring", "started again"),
    ("ring", "stopped"),
    ("dssync+int8", "killed"),
    ("codedreduce(fanout=2, stragglers=1)", "without its root"),
}


def in_a_run(sync: str, **options: Any) -> Job:
    """Samples are alike where replicas differ: then it is known where they end."""
    return Job(sync=sync, alike=sync in EVENTUAL, **options)


def killed(sync: str) -> Ended:
    return train_among_fates(in_a_run(sync, act=[dies(LOST, at=AT)]))


def started_again(sync: str) -> Ended:
    act = [dies(LOST, at=AT), awaits(LOST, at=BACK)]
    return train_among_fates(in_a_run(sync, act=act), restart=[LOST])


def stopped(sync: str) -> Ended:
    """Until the others have gone on without it; under a code nobody waits for it at all."""
    act = [stops(LOST, at=AT), awaits(LOST, at=BACK)]
    return train_among_fates(
        in_a_run(sync, act=act), resume=[LOST], when=lambda b: b.furthest(but=LOST) > AT
    )


def two_at_once(sync: str) -> Ended:
    return train_among_fates(in_a_run(sync, act=[dies(1, at=AT), dies(LOST, at=AT)]))


def without_its_root(sync: str) -> Ended:
    return train_among_fates(in_a_run(sync, act=[dies(0, at=AT)]))


FATES: dict[str, tuple[Callable[[str], Ended], list[int]]] = {
    "killed": (killed, [LOST]),
    "started again": (started_again, []),
    "stopped": (stopped, []),
    "two at once": (two_at_once, [1, LOST]),
    "without its root": (without_its_root, [0]),
}


def cases() -> list[Any]:
    return [
        pytest.param(sync, fate, marks=() if (sync, fate) in FAST else pytest.mark.slow)
        for sync in ALL
        for fate in FATES
    ]


@pytest.fixture(scope="module")
def calm() -> dict[bool, list[float]]:
    """Where a worker alone ends, with samples that are alike and that aren't."""
    ends = [train_among_fates(Job(sync="ring", alike=a), size=1) for a in (False, True)]
    return {alike: end.results[0]["values"] for alike, end in enumerate(ends)}


@pytest.mark.parametrize(("sync", "fate"), cases())
def test_training_goes_on(sync: str, fate: str, calm: dict[bool, list[float]]) -> None:
    befall, dead = FATES[fate]
    ended = befall(sync)
    assert ended.dead == dead
    assert one_value(ended.lived, "steps") == STEPS
    assert one_value(ended.lived, "lr") == LEARNING_RATE / 2**EPOCHS
    assert one_value(ended.lived, "epoch") == EPOCHS
    found = one_value(ended.lived, "values")
    if sync in EXACT:
        assert found == calm[False]
    elif sync in EVENTUAL:
        assert found == pytest.approx(calm[True], rel=1e-9)
    if (sync, fate) == ("asp", "killed"):
        line = f"rank {LOST} failed; its part of the data is lost"
        assert ended.results[0]["said"].count(line) == 1


# When, and what is logged


@pytest.mark.parametrize("own_loader", [False, True])
def test_a_scheduler_of_every_step_is_stepped_once(own_loader: bool) -> None:
    """It multiplies the learning rate that it finds, so an interrupted step must leave none."""
    act = [dies(LOST, at=AT, when="between"), all_come(at=AT)]
    ended = train_among_fates(Job(sync="ring", act=act, each_step=True, own_loader=own_loader))
    assert ended.dead == [LOST]
    assert one_value(ended.lived, "lr") == LEARNING_RATE / 2**STEPS
    assert one_value(ended.lived, "epoch") == STEPS


def test_who_left_and_who_joined_is_logged() -> None:
    ended = stopped("ring")
    others = [ended.results[rank] for rank in range(SIZE) if rank != LOST]
    for other in others:
        left, joined = (i for i in other["incidents"] if i["left"] or i["joined"])
        assert AT - 1 <= left["step"] <= AT  # it may have stopped before its message left
        assert (left["left"], left["joined"]) == ([LOST], [])
        assert left["reason"].startswith(f"rank {LOST} failed (")
        assert (joined["left"], joined["joined"]) == ([], [LOST])
        assert joined["formation"] > left["formation"] > 1
        assert BACK <= joined["step"] <= BACK + 1
    assert joined["reason"] == f"rank {LOST} joined"
    assert left["in_order"]
    assert joined["in_order"]
    assert [i["joined"] for i in ended.results[LOST]["incidents"]] == [[LOST]]
    assert one_value(ended.results, "members") == list(range(SIZE))
    said = [line for result in ended.results for line in result["said"]]  # by who gave its state
    [first] = [line for line in said if line.endswith("with ranks 0, 1, 3")]
    [second] = [line for line in said if line.endswith("with ranks 0, 1, 2, 3")]
    assert f"membership epoch {left['formation']} resumes at step {left['step']} " in first
    assert f"membership epoch {joined['formation']} resumes at step {joined['step']} " in second


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["ring", "local_sgd(every=4)"])
@pytest.mark.parametrize(
    ("at", "when"),
    [
        (STEPS // EPOCHS, "consensus"),
        (STEPS, "consensus"),
        (STEPS - 1, "before"),
        (STEPS - 1, "between"),
        (STEPS, "after"),
        (0, "before"),
    ],
)
def test_at_any_moment(sync: str, at: int, when: str, calm: dict[bool, list[float]]) -> None:
    ended = train_among_fates(in_a_run(sync, act=[dies(LOST, at=at, when=when)]))
    assert ended.dead == [LOST]
    assert one_value(ended.lived, "steps") == STEPS
    assert one_value(ended.lived, "values") == pytest.approx(calm[sync in EVENTUAL], rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["ring", "dssync+int8"])
def test_it_dies_once_more_while_it_comes_in(sync: str, calm: dict[bool, list[float]]) -> None:
    """Others have let it in, and wait for it to take their state."""
    load_snapshot = RankSession.load_snapshot

    def dies_once(session: RankSession, *state: Any) -> None:
        if session.rank == LOST:
            os.kill(os.getpid(), signal.SIGKILL)
        load_snapshot(session, *state)

    with patch.object(RankSession, "load_snapshot", dies_once):
        ended = train_among_fates(in_a_run(sync, act=[dies(LOST, at=AT)]), restart=[LOST])
    assert ended.dead == [LOST]
    assert one_value(ended.lived, "members") == [0, 1, 3]
    assert one_value(ended.lived, "formation") >= 3  # one that it was let into, and another
    assert one_value(ended.lived, "steps") == STEPS
    assert one_value(ended.lived, "values") == pytest.approx(calm[sync in EVENTUAL], rel=1e-9)


def test_the_only_one_with_a_steps_result_dies_as_it_hands_it_over(
    calm: dict[bool, list[float]],
) -> None:
    """The others have kept their own states, and redo the step."""
    finish, steps = RoundsExchange.finish, [0]
    transfer = Recovery._transferred

    def comes_to_one(exchange: RoundsExchange) -> None:
        steps[0] += 1
        finish(exchange)
        if steps[0] == AT and os.environ["RANK"] != str(LOST):
            raise Interrupted("the result didn't come")

    def dies_as_donor(recovery: Recovery, epoch: MembershipEpoch, *given: Any) -> Any:
        assert epoch.donor == LOST or epoch.left
        if epoch.donor == int(os.environ["RANK"]) == LOST:
            os.kill(os.getpid(), signal.SIGKILL)
        return transfer(recovery, epoch, *given)

    with (
        patch.object(RoundsExchange, "finish", comes_to_one),
        patch.object(Recovery, "_transferred", dies_as_donor),
    ):
        ended = train_among_fates(in_a_run("ring"))
    assert ended.dead == [LOST]
    assert one_value(ended.lived, "formation") == 3
    assert one_value(ended.lived, "steps") == STEPS
    assert one_value(ended.lived, "values") == calm[False]


@pytest.mark.slow
@pytest.mark.parametrize("restart", [[], [LOST]], ids=["for good", "and is started again"])
def test_while_all_save(restart: list[int], tmp_path: Path, calm: dict[bool, list[float]]) -> None:
    """One that is started again takes over another's state, not the checkpoint's."""
    act = [dies(LOST, at=STEPS // EPOCHS, when="saving"), awaits(LOST, at=BACK)]
    job = Job(sync="ring", folder=tmp_path, act=act if restart else act[:1])
    ended = train_among_fates(job, restart=restart)
    assert ended.dead == [rank for rank in [LOST] if not restart]
    assert one_value(ended.lived, "values") == calm[False]
    assert len(list(tmp_path.glob("step-*"))) == EPOCHS


# A loader of the script's own


@pytest.mark.parametrize("sync", ["ring", "ddp"])
def test_with_their_own_loader_survivors_repeat_with_their_gradients(sync: str) -> None:
    """Each rank has a gradient of its own: from the step on in which two die, it is the mean of the
    others'. Under ddp, torch has written over the gradients: the next batch is taken for them."""
    ended = train_among_fates(
        Job(
            sync=sync,
            own_loader=True,
            momentum=0.0,
            act=[all_come(at=AT), dies(1, at=AT), dies(LOST, at=AT)],
        )
    )
    assert ended.dead == [1, LOST]
    before, after = (1 + 2 + 4 + 8) / 4, (1 + 8) / 2
    rates = [LEARNING_RATE / 2 ** (step // (STEPS // EPOCHS)) for step in range(STEPS)]
    means = [before if step < AT else after for step in range(STEPS)]
    if sync == "ddp":
        means[AT] = 0.0
    wanted = -64 * sum(rate * mean for rate, mean in zip(rates, means, strict=True))
    assert one_value(ended.lived, "values") == [wanted] * 5


@pytest.mark.slow
def test_who_was_started_again_with_its_own_loader_is_refused() -> None:
    act = [dies(LOST, at=AT)]
    ended = train_among_fates(
        Job(sync="ring", own_loader=True, act=act), restart=[LOST], fails=True
    )
    assert ended.dead == [LOST]
    assert one_value(ended.lived, "steps") == STEPS
    (line,) = [text for _, text in ended.said if "own loader" in text]
    assert line.startswith(
        f"rank {LOST}: this rank was restarted, and its place in the script's own loader isn't "
        "known"
    )


# Compressors


@pytest.mark.slow
@pytest.mark.parametrize("comes_back", [False, True])
def test_what_compressors_kept_goes_on(comes_back: bool, tmp_path: Path) -> None:
    """Error feedback: what was applied and what all still hold is the sum of all gradients, but for
    what the one that was lost had left out."""
    lost = tmp_path / "lost"

    def write_down(run: Run, board: Board, when: str) -> None:
        if (run.rank, run.step, when) == (LOST, AT, "before") and not lost.exists():
            torch.save(run.report(residuals=True).residuals["weight"], lost)

    befalls = [stops(LOST, at=AT), awaits(LOST, at=BACK)] if comes_back else [dies(LOST, at=AT)]
    job = Job(
        sync="hierarchical+powersgd(rank=2)",
        wide=True,
        momentum=0.0,
        gamma=1.0,
        act=[write_down, *befalls],
    )
    ended = train_among_fates(
        job, resume=[LOST] if comes_back else [], when=lambda b: b.furthest(but=LOST) > AT
    )
    data = Numbered()
    x = widened(torch.stack([data[index][0] for index in range(len(data))]))
    gradients = EPOCHS * x.T @ x / BATCH
    applied = -torch.tensor(one_value(ended.lived, "values")).double() / LEARNING_RATE
    held = sum(torch.tensor(result["left_out"]["weight"]) for result in ended.lived)
    left_out = torch.load(lost)
    assert left_out.norm() > 1e-3 * gradients.norm()
    there = (applied + held + left_out).reshape(gradients.shape)
    assert torch.allclose(there, gradients, rtol=0, atol=1e-6 * float(gradients.norm()))


@pytest.mark.parametrize("calls", [1, 3])
def test_a_step_with_a_closure_is_repeated_from_its_beginning(calls: int) -> None:
    """LBFGS has changed the parameters when the first backward of such a step is over."""

    def work(rank: int, dying: int) -> dict[str, Any]:
        torch.manual_seed(0)
        data = torch.utils.data.TensorDataset(torch.randn(48, 4, dtype=torch.float64))
        model = nn.Linear(4, 1, dtype=torch.float64)
        optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=3)
        run = attach(model, optimizer, plan="ring", data=data, batch=12, timeout=TIMEOUT)
        evaluations = 0

        def closure(x: torch.Tensor) -> Any:
            nonlocal evaluations
            evaluations += 1
            if (rank, evaluations) == (LOST, dying):
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            loss = run.mean((model(x).squeeze(1) - x.sum(1)) ** 2)
            loss.backward()
            return loss

        for epoch in run.epochs(2):
            for (x,) in run.batches(epoch):
                optimizer.step(partial(closure, x))
        run.close()
        return {"values": values(model), "steps": run.step}

    calm, disturbed = (
        run_workers(
            3, lambda rank, _, at=at: work(rank, at), timeout=SECONDS, spare=range(3), debug=True
        )
        for at in (0, 6 + calls)
    )
    assert not disturbed[LOST]
    for result in disturbed[:LOST]:
        assert result["steps"] == calm[0]["steps"]
        assert result["values"] == pytest.approx(calm[0]["values"], rel=1e-9)
