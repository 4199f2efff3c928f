"""A small training job under a code, in which given things happen at given steps.

Nothing here depends on how fast anything is. All processes see how far each rank is (`Board`), and
what is to happen waits for that: a rank that is to be late stands still until another has taken so
many steps, which never comes if somebody waits for it.
"""

from __future__ import annotations

import mmap
import os
import signal
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.training.workers import SECONDS, TIMEOUT, fingerprint, values
from thalweg.errors import WorkerFailed
from thalweg.launch.supervisor import SendMessage, run_workers
from thalweg.launch.worker_group import WorkerGroup
from thalweg.training import Run, attach
from thalweg.training.exchanges.tree import TreeExchange
from thalweg.training.snapshot import Snapshot

TREE = "codedreduce(fanout=3, stragglers=1)"
"""On 7 workers: 1 and 2 are the first layer; 3, 4 and 0, which has the root, are below 1, and 5, 6
below 2. Whoever has the same parent has the same samples."""
SIZE = 7
SAMPLES, BATCH, EPOCHS = 120, 24, 4
STEPS_A_EPOCH = SAMPLES // BATCH
STEPS = STEPS_A_EPOCH * EPOCHS
PATIENCE = 30.0  # seconds
Act = Callable[[Run, "Board"], None]
"""What a rank does before a step."""


class Board:
    """For all processes: how many steps each rank has taken, and how often it has attached."""

    def __init__(self, size: int = SIZE) -> None:
        self.size = size
        self.steps = np.frombuffer(mmap.mmap(-1, 8 * size), np.int64)
        self.lives = np.frombuffer(mmap.mmap(-1, 8 * size), np.int64)

    def furthest(self, but: int | None = None) -> int:
        """The most steps that any rank has taken, but this one."""
        return max(int(steps) for rank, steps in enumerate(self.steps) if rank != but)

    def wait(self, over: Callable[[], bool]) -> None:
        deadline = monotonic() + PATIENCE
        while not over():
            assert monotonic() < deadline, f"steps {self.steps}, lives {self.lives}"
            sleep(0.002)


def nothing(run: Run, board: Board) -> None:
    pass


def all_of(*acts: Act) -> Act:
    def act(run: Run, board: Board) -> None:
        for one in acts:
            one(run, board)

    return act


def late(rank: int, *, at: int, until: int) -> Act:
    """This rank's training stands still before step `at` until another has taken `until` steps, and
    word of it is here, if only that this rank is left behind."""

    def act(run: Run, board: Board) -> None:
        tree = run._session.exchange
        if run.rank == rank and run.step == at and isinstance(tree, TreeExchange):
            relay = tree.relay
            board.wait(lambda: board.furthest(but=rank) >= until)
            board.wait(lambda: relay.result_expired(at) or relay.newest >= until)

    return act


def dies(rank: int, *, at: int) -> Act:
    """It is killed, in its first life."""

    def act(run: Run, board: Board) -> None:
        if run.rank == rank and run.step == at and board.lives[rank] == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    return act


def waits(*ranks: int, at: int, until_back: int) -> Act:
    """These ranks stand still before a step until that one is there again, in its second life."""

    def act(run: Run, board: Board) -> None:
        if run.rank in ranks and run.step == at:
            board.wait(lambda: bool(board.lives[until_back] > 1))

    return act


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


@dataclass(frozen=True, kw_only=True)
class Script:
    """What every worker does."""

    sync: str
    act: Act = nothing
    make: Callable[[], nn.Module] = net
    epochs: int = EPOCHS
    dtype: torch.dtype = torch.float64
    accumulate: int = 1
    clip: float | None = None
    frozen: bool = False
    shares_random: bool = False
    loader: dict[str, Any] | None = None
    checkpoint: Path | None = None
    timeout: str = TIMEOUT


def trained(script: Script, board: Board) -> dict[str, Any]:
    """On one rank; what it holds at the end, the steps that it took, and its warnings."""
    load = Snapshot.load_into
    with (
        warnings.catch_warnings(record=True) as caught,
        patch.object(Snapshot, "load_into", autospec=True, side_effect=load) as loaded,
    ):
        warnings.simplefilter("always")
        result = _trained(script, board)
    messages = [str(warning.message) for warning in caught]
    return {**result, "warnings": messages, "taken_over": loaded.call_count}


def _trained(script: Script, board: Board) -> dict[str, Any]:
    torch.manual_seed(0)
    model = script.make().to(script.dtype)
    if script.frozen:
        next(model.parameters()).requires_grad_(False)
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
    run = attach(
        model,
        optimizer,
        plan=script.sync,
        data=samples(script.dtype),
        batch=BATCH,
        state=[scheduler],
        resume=script.checkpoint,
        loader=script.loader,
        timeout=script.timeout,
    )
    board.lives[run.rank] += 1
    steps, gone_through, plans, before = [], [], {}, torch.get_rng_state()
    for epoch in run.epochs(script.epochs):
        for number, (x, y) in enumerate(run.batches(epoch), start=1):
            script.act(run, board)
            plans[str(run.step)] = str(run.plan)
            if number % script.accumulate:
                with run.no_sync():
                    backward(script, run, model, x, y)
                continue
            backward(script, run, model, x, y)
            if script.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), script.clip)
            if run._catches_up:
                gone_through.append(run.step)
            optimizer.step()
            optimizer.zero_grad()
            if run._session.applies:
                steps.append(run.step)
            board.steps[run.rank] = run.step
        optimizer.zero_grad()
        scheduler.step()
        if script.checkpoint is not None:
            run.save(script.checkpoint)
    untouched = torch.equal(before, torch.get_rng_state())
    approximate = {str(e.step): e.data for e in run.events if e.kind == "approximate"}
    run.close()
    return {
        "print": fingerprint(model),
        "values": values(model),
        "lr": optimizer.param_groups[0]["lr"],
        "epoch": scheduler.state_dict()["last_epoch"],
        "steps": steps,
        "gone_through": gone_through,
        "approximate": approximate,
        "random_untouched": untouched,
        "plans": plans,
    }


def backward(script: Script, run: Run, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    def losses() -> torch.Tensor:
        found: torch.Tensor = (model(x) - y).square().mean(dim=1)
        return found

    if script.shares_random:
        with run.shared_random():
            each = losses()
    else:
        each = losses()
    torch.autograd.backward(run.mean(each) / script.accumulate)


def samples(dtype: torch.dtype) -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 6, generator=draw, dtype=torch.float64)
    wanted = torch.randn(SAMPLES, 3, generator=draw, dtype=torch.float64)
    return TensorDataset(inputs.to(dtype), wanted.to(dtype))


def train_together(
    *scripts: Script, size: int = SIZE, warns: bool = False
) -> list[list[dict[str, Any]]]:
    """One after the other, by the same processes; for each script every rank's result."""
    boards = [Board(size) for _ in scripts]

    def work(rank: int, report: SendMessage) -> dict[str, Any]:
        return in_turn(scripts, boards)

    return by_script(run_workers(size, work, timeout=SECONDS, debug=True), warns)


def in_turn(scripts: Sequence[Script], boards: Sequence[Board]) -> dict[str, Any]:
    """On one rank; there may be more boards than are needed."""
    pairs = zip(scripts, boards, strict=False)
    return {"results": [trained(script, board) for script, board in pairs]}


def by_script(results: list[dict[str, Any]], warns: bool = False) -> list[list[dict[str, Any]]]:
    """For each script every rank's result."""
    said = [line for result in results for one in result["results"] for line in one["warnings"]]
    assert warns or not said, said
    return [list(ranks) for ranks in zip(*(r["results"] for r in results), strict=True)]


def boards(size: int = SIZE) -> list[Board]:
    """For the scripts of one case."""
    return [Board(size) for _ in range(3)]


class Ended:
    """How a run went in which some may have died: results by rank, what was said, and why it
    failed, if it did."""

    def __init__(self) -> None:
        self.by_rank: dict[int, dict[str, Any]] = {}
        self.said: list[tuple[int, str]] = []
        self.failure: WorkerFailed | None = None

    def hear(self, rank: int, stream: str, line: str) -> None:
        if not line.startswith("[W"):  # torch's, which an interpreter of its own would not show
            self.said.append((rank, line))

    @property
    def reported(self) -> list[dict[str, Any]]:
        """Of those who lived to the end."""
        return [result for result in self.by_rank.values() if result]

    @property
    def lost(self) -> list[int]:
        assert self.failure is None, (self.failure, self.said)
        return [rank for rank, result in self.by_rank.items() if not result]


class Fate:
    """A director that starts these ranks anew once they have died and `when` is so, and lets those
    that were stopped go on when that is so."""

    def __init__(
        self, restart: Collection[int], resume: Collection[int], when: Callable[[], bool]
    ) -> None:
        self._restart = set(restart)
        self._resume = set(resume)
        self._when = when
        self._seen: set[int] = set()

    def prepare(self) -> None:
        pass

    def poll(self, workers: WorkerGroup) -> None:
        self._seen |= set(workers.running)
        dead = {rank for rank in self._restart & self._seen if rank not in workers.running}
        if (dead or self._resume) and self._when():
            for rank in dead:
                self._restart.discard(rank)
                workers.restart(rank)
            for rank in self._resume:
                workers.resume(rank)


def train_among_the_dying(
    script: Script,
    *,
    size: int = SIZE,
    restart: Collection[int] = (),
    resume: Collection[int] = (),
    when: Callable[[Board], bool] = lambda board: True,
    spare: Collection[int] | None = None,
) -> Ended:
    """Workers that die on their way are missed by nobody, or are started again `when` that is so.
    All but rank 0 are spare, unless others are named."""
    board = Board(size)
    ended = Ended()

    def work(rank: int, report: SendMessage) -> dict[str, Any]:
        return trained(script, board)

    try:
        results = run_workers(
            size,
            work,
            timeout=SECONDS,
            director=Fate(restart, resume, lambda: when(board)),
            on_line=ended.hear,
            spare=range(1, size) if spare is None else spare,
        )
        ended.by_rank = dict(enumerate(results))
    except WorkerFailed as failure:
        ended.failure = failure
    return ended
