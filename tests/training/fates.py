"""A job whose end is known exactly, and what may befall its workers at given moments.

Samples and arithmetic are those of `under_fire.py`: nothing is ever rounded. With samples that are
all alike replicas are equal under every plan, so that there too the end is known.

Nothing here depends on how fast anything is: all processes see how far each rank is (`Board`), and
whoever is to be waited for is waited for.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from tests.training.coded import Board, Fate
from tests.training.under_fire import BATCH, EPOCHS, STEPS, Numbered
from tests.training.workers import SECONDS, TIMEOUT, listen, raised, values
from thalweg.errors import Interrupted, WorkerFailed
from thalweg.launch.supervisor import SendMessage, run_workers
from thalweg.redundancy import is_relayed
from thalweg.training import Run, attach

SIZE = 4
EVEN = 48
WIDTH = 48
LEARNING_RATE = 2.0**-10
Act = Callable[[Run, Board, str], None]
"""What a rank does "before" a step, "between" backward and optimizer, "after" the step, in the
"consensus" at the end of each epoch, and before the "saving" that follows."""


class Alike(Dataset[tuple[torch.Tensor, int]]):
    """As many batches as the others', which two, three or four workers share evenly."""

    def __len__(self) -> int:
        return EVEN * STEPS // EPOCHS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return 64.0 * torch.tensor([1.0, -2.0, 3.0, 5.0, -8.0]).double(), index


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every worker does. With `own_loader` the script alone knows the samples: a gradient of
    each rank's own."""

    sync: str
    act: Sequence[Act] = ()
    alike: bool = False
    own_loader: bool = False
    momentum: float = 0.5
    gamma: float = 0.5  # of the learning rate, with each epoch
    each_step: bool = False  # the scheduler steps after each step instead
    wide: bool = False  # a matrix that compressors compress
    folder: Path | None = None


def trained(job: Job, board: Board) -> dict[str, Any]:
    """On one rank."""
    said: list[str] = []
    listen(said)
    rank = int(os.environ["RANK"])
    board.lives[rank] += 1
    torch.manual_seed(0)
    shape = (WIDTH, WIDTH) if job.wide else (5, 1)
    model = nn.Linear(*shape, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, momentum=job.momentum)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=job.gamma)
    given: dict[str, Any] = {}
    if not job.own_loader:
        given = {"data": Numbered(), "batch": BATCH}
        if job.alike:
            given = {"data": Alike(), "batch": EVEN}
    run = attach(
        model,
        optimizer,
        plan=job.sync,
        state=[scheduler],
        timeout=TIMEOUT,
        resume=job.folder,
        **given,
    )
    first = board.steps[rank] = run.step

    def acts(when: str) -> None:
        for act in job.act:
            act(run, board, when)

    for epoch in run.epochs(EPOCHS) if not job.own_loader else range(EPOCHS):
        for x in _inputs(run, epoch, job):
            acts("before")
            optimizer.zero_grad()
            features = widened(x) if job.wide else x
            factors = features if job.wide else 1.0  # of outputs: the gradient has its full rank
            run.mean((model(features) * factors).sum(1)).backward()
            acts("between")
            optimizer.step()
            board.steps[rank] = run.step
            acts("after")
            if job.each_step:
                scheduler.step()
        if not job.each_step:
            scheduler.step()
        with run.consensus():
            acts("consensus")
        if job.folder is not None:
            acts("saving")
            run.save(job.folder)
    with run.consensus():
        ended = values(model)
    left_out = {
        name: tensor.tolist() for name, tensor in run.report(residuals=True).residuals.items()
    }
    run.close()
    return {
        "values": ended,
        "first": int(first),
        "steps": run.step,
        "members": run.members.ranks,
        "formation": run.members.epoch,
        "lr": optimizer.param_groups[0]["lr"],
        "epoch": scheduler.state_dict()["last_epoch"],
        "left_out": left_out,
        "said": said,
        "incidents": [
            {
                "formation": i.formation,
                "step": i.step,
                "left": i.left,
                "joined": i.joined,
                "reason": i.reason,
                "in_order": i.noticed <= i.over,
            }
            for i in (e.data for e in run.events if e.kind == "incident")
        ],
    }


def _inputs(run: Run, epoch: int, job: Job) -> Any:
    if job.own_loader:
        own = 64.0 * 2**run.rank * torch.ones(1, 5, dtype=torch.float64)
        return (own for _ in range(STEPS // EPOCHS))
    return (x for x, _ in run.batches(epoch))


def widened(x: torch.Tensor) -> torch.Tensor:
    """More features out of a few, so that the gradient is a matrix that compressors compress."""
    draw = torch.Generator().manual_seed(0)
    return x @ torch.randint(-2, 3, (x.shape[1], WIDTH), generator=draw).double()


# What may befall a rank


def dies(rank: int, *, at: int, when: str = "before") -> Act:
    """In its first life."""
    return _befalls(signal.SIGKILL, rank, at, when)


def all_come(*, at: int) -> Act:
    """Everybody waits before this step until the result of the last has reached all."""

    def act(run: Run, board: Board, moment: str) -> None:
        if run.step == at and moment == "before":
            board.wait(lambda: bool((board.steps >= at).all()))

    return act


def stops(rank: int, *, at: int, when: str = "before") -> Act:
    return _befalls(signal.SIGSTOP, rank, at, when)


def _befalls(number: int, rank: int, at: int, when: str) -> Act:
    over = False

    def act(run: Run, board: Board, moment: str) -> None:
        nonlocal over
        here = (run.rank, run.step, moment) == (rank, at, when)
        if here and not over and board.lives[rank] == 1:
            over = True
            os.kill(os.getpid(), number)

    return act


def awaits(rank: int, *, at: int) -> Act:
    """The others stand still before a step until that one, which was away, asks to be let in. Under
    a code only the root does: those who wait for it give their state."""
    over = False

    def act(run: Run, board: Board, moment: str) -> None:
        nonlocal over
        if over or run.step < at or moment != "before" or run.rank == rank:
            return
        over = True
        if run.rank == 0 or not is_relayed(run.plan):
            is_back = run.members.epoch > 1 and rank in run.members  # before this step already
            board.wait(lambda: is_back or _is_wanted(run) or board.steps[rank] >= at)

    return act


def _is_wanted(run: Run) -> bool:
    membership = run._recovery.membership
    assert membership is not None
    try:
        membership.raise_if_join_requested()
    except Interrupted:
        return True
    return False


@dataclass(frozen=True)
class Ended:
    """By rank; empty for one that died. `said` are the lines of all."""

    results: list[dict[str, Any]]
    said: list[tuple[int, str]]

    @property
    def lived(self) -> list[dict[str, Any]]:
        return [result for result in self.results if result]

    @property
    def dead(self) -> list[int]:
        return [rank for rank, result in enumerate(self.results) if not result]


def train_among_fates(
    job: Job,
    *,
    size: int = SIZE,
    restart: Collection[int] = (),
    resume: Collection[int] = (),
    when: Callable[[Board], bool] = lambda board: True,
    fails: bool = False,
) -> Ended:
    """Ranks that die are started again `when` that is so, and those that stopped go on. Nobody ends
    by an error of its own, unless one `fails`."""
    board = Board(size)
    said: list[tuple[int, str]] = []

    def work(rank: int, report: SendMessage) -> dict[str, Any]:
        return trained(job, board)

    def hear(rank: int, stream: str, line: str) -> None:
        if not line.startswith("[W"):
            said.append((rank, line))

    try:
        results = run_workers(
            size,
            work,
            timeout=SECONDS,
            director=Fate(restart, resume, lambda: when(board)),
            on_line=hear,
            spare=range(size),
        )
    except WorkerFailed as failure:
        raise AssertionError((str(failure), said, board.steps, board.lives)) from None
    errors = [line for _, line in said if "; the others continue" in line and "SIGKILL" not in line]
    assert bool(errors) == fails, said
    return Ended(results, said)


__all__ = [
    "EPOCHS",
    "LEARNING_RATE",
    "SIZE",
    "STEPS",
    "Act",
    "Board",
    "Ended",
    "Job",
    "awaits",
    "dies",
    "raised",
    "stops",
    "train_among_fates",
    "trained",
    "widened",
]
