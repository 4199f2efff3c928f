"""Under asp every gradient counts once, whatever befalls workers. Each has a counter among the
parameters, which its gradients raise by one: the parameters themselves tell what was applied."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection
from mmap import mmap
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.training.coded import Board, Fate
from tests.training.fates import awaits
from tests.training.workers import SECONDS, TIMEOUT, one_value
from thalweg.launch.supervisor import SendMessage, run_workers
from thalweg.launch.worker_process import RESTARTS_VARIABLE
from thalweg.training import Run, attach, lifecycle
from thalweg.training.plan_context import PlanContext

SIZE, STALENESS, STEPS, EPOCHS = 3, 2, 24, 2
LOST, AT, BACK = 2, 5, 14  # who is away, from which step on, and where the others wait for it
Act = Callable[[Run, Board], None]


class Counters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(SIZE, dtype=torch.float64))


class Whole(torch.optim.SGD):
    """One step a gradient, where the server gives each of N workers an N-th of the rate."""

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["lr"] = 1.0
        return super().step(closure)


class Acknowledged:
    """How many gradients of each rank were, for all processes."""

    def __init__(self) -> None:
        self.by = np.frombuffer(mmap(-1, 8 * SIZE), np.int64)


def trained(
    act: Act,
    *,
    restart: Collection[int] = (),
    resume: Collection[int] = (),
    when: Callable[[Board], bool] = lambda board: True,
) -> tuple[list[dict[str, Any]], list[int]]:
    """What each rank brings home, and how many of its gradients were acknowledged."""
    board, acknowledged = Board(SIZE), Acknowledged()
    data = TensorDataset(torch.zeros(SIZE * STEPS // EPOCHS, 1))

    def work(rank: int, report: SendMessage) -> dict[str, Any]:
        board.lives[rank] += 1
        model = Counters()
        optimizer = Whole(model.parameters(), lr=1.0)
        sync = f"asp(staleness={STALENESS})"
        run = attach(model, optimizer, plan=sync, data=data, batch=SIZE, timeout=TIMEOUT)
        for epoch in run.epochs(EPOCHS):
            for _ in run.batches(epoch):
                act(run, board)
                optimizer.zero_grad()
                model.counts[rank].backward()
                optimizer.step()
                acknowledged.by[rank] += 1
                board.steps[rank] = run.step
        with run.consensus():
            counts = [round(-float(count), 6) for count in model.counts.detach()]
        run.close()
        return {"counts": counts, "steps": run.step}

    results = run_workers(
        SIZE,
        work,
        timeout=SECONDS,
        director=Fate(restart, resume, lambda: when(board)),
        on_line=lambda *_: None,
        spare=range(SIZE),
    )
    return results, acknowledged.by.tolist()


def befalls(number: int, rank: int) -> Act:
    """This signal, before a step and in its first life."""
    over = False

    def act(run: Run, board: Board) -> None:
        nonlocal over
        if (run.rank, run.step, board.lives[rank], over) == (rank, AT, 1, False):
            over = True
            os.kill(os.getpid(), number)

    return act


def test_one_that_was_given_up_is_back_with_its_next_gradient() -> None:
    """The others go on without it, wait for it at a later step, and don't get away from it."""
    stop = befalls(signal.SIGSTOP, LOST)

    def act(run: Run, board: Board) -> None:
        stop(run, board)
        if run.rank != LOST and run.step == BACK:
            board.wait(lambda: board.steps[LOST] > AT)

    results, acknowledged = trained(
        act, resume=[LOST], when=lambda board: board.furthest(but=LOST) >= BACK
    )
    assert one_value(results, "counts") == acknowledged
    assert one_value(results, "steps") == STEPS
    assert acknowledged[:LOST] == [STEPS] * LOST
    missed = BACK - AT  # the share that is dropped; the first gradient after that is of an old step
    assert STEPS - missed <= acknowledged[LOST] <= STEPS - missed + STALENESS + 1


@pytest.mark.parametrize("rank", [LOST, 0], ids=["a worker", "the root"])
def test_one_that_was_killed_is_back_as_another_process(rank: int) -> None:
    """Members meet anew twice, and the server with them: what it has applied stays applied."""
    die, wait = befalls(signal.SIGKILL, rank), awaits(rank, at=BACK)

    def act(run: Run, board: Board) -> None:
        die(run, board)
        wait(run, board, "before")

    results, acknowledged = trained(act, restart=[rank])
    counts = one_value(results, "counts")
    others = [other for other in range(SIZE) if other != rank]
    assert [counts[other] for other in others] == [acknowledged[other] for other in others]
    if rank == LOST:
        assert counts[rank] == acknowledged[rank]
    else:  # what nobody else had seen is lost with the root
        assert acknowledged[rank] - AT <= counts[rank] <= acknowledged[rank]
    assert all(STEPS - STALENESS <= acknowledged[other] <= STEPS for other in others)
    assert one_value(results, "steps") == STEPS


def test_the_root_dies_while_the_others_look_for_its_server() -> None:
    """It was at a rendezvous, and the process that replaces it knows nothing of that."""
    die, wait = befalls(signal.SIGKILL, LOST), awaits(LOST, at=BACK)
    make = lifecycle.make

    def dies_once(context: PlanContext, *given: Any) -> Any:
        if context.world.rank == context.root == 0 and os.environ[RESTARTS_VARIABLE] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        return make(context, *given)

    def act(run: Run, board: Board) -> None:
        die(run, board)
        wait(run, board, "before")

    with patch.object(lifecycle, "make", dies_once):
        results, acknowledged = trained(act, restart=[LOST, 0])
    counts = one_value(results, "counts")
    assert counts[1] == acknowledged[1]
    assert counts[LOST] <= acknowledged[LOST]
    assert counts[0] <= acknowledged[0] + 1  # one may have been on its way when it died
    assert one_value(results, "steps") == STEPS
