"""A run's state in a checkpoint of the script's own, by torch.save."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.training.conftest import InOneCrew
from tests.training.workers import TIMEOUT, fingerprint, on_ranks, one_value, raised, same_bits
from thalweg.errors import UsageError
from thalweg.training import Run, attach

EPOCHS, BATCHES, BATCH = 2, 4, 12
STEPS, AT = EPOCHS * BATCHES, 5
Load = Callable[[Run], None]
EXACT = ["ring", "ring+powersgd(rank=2)", "codedreduce(fanout=2,stragglers=1)"]
EVENTUAL = ["dssync", "local_sgd(every=2)"]


def train(
    rank: int,
    sync: str,
    *,
    resume: Path | None = None,
    load: Load = lambda run: None,
    after_step: Load = lambda run: None,
) -> dict[str, Any]:
    torch.manual_seed(rank)
    draw = torch.Generator().manual_seed(1)
    shapes = (BATCH * BATCHES, 32), (BATCH * BATCHES, 48)
    data = TensorDataset(*(torch.randn(shape, generator=draw) for shape in shapes))
    model = nn.Linear(32, 48)
    sgd = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(sgd, 1, gamma=0.5)
    run = attach(
        model, sgd, plan=sync, data=data, batch=BATCH, state=[scheduler], resume=resume,
        timeout=TIMEOUT,
    )  # fmt: skip
    load(run)
    first, noise = run.step, torch.rand(1).item()
    for epoch in run.epochs(EPOCHS):
        for x, y in run.batches(epoch):
            sgd.zero_grad()
            run.mean((model(x) - y).square().mean(1)).backward()
            sgd.step()
            after_step(run)
        scheduler.step()
    left_out = {
        name: left.tolist() for name, left in (run.report(residuals=True).residuals or {}).items()
    }
    with run.consensus():
        found = fingerprint(model)
    run.close()
    rate = scheduler.get_last_lr()
    return {
        "print": found, "first": first, "steps": run.step, "rate": rate, "left_out": left_out,
        "noise": noise,
    }  # fmt: skip


def saving(folder: Path) -> Load:
    """Both ways, each rank into a file of its own."""

    def save(run: Run) -> None:
        if run.step == AT:
            run.save(folder)
            torch.save(run.state_dict(), folder / f"{run.rank}.pt")

    return save


def loading(file: Path) -> Load:
    return lambda run: run.load_state_dict(torch.load(file, weights_only=True))


@pytest.mark.parametrize("sync", [*EXACT, *EVENTUAL])
def test_it_continues_as_a_checkpoint_does(sync: str, in_one_crew: InOneCrew) -> None:
    """Also if every rank loads its own file, of which the first member's is taken."""

    def work(rank: int, sync: str, folder: Path) -> dict[str, Any]:
        return {
            "whole": train(rank, sync, after_step=saving(folder)),
            "resumed": train(rank, sync, resume=folder),
            "first": train(rank, sync, load=loading(folder / "0.pt")),
            "own": train(rank, sync, load=loading(folder / f"{rank}.pt")),
        }

    for result in in_one_crew(3, work):
        assert result["first"] == result["resumed"] == result["own"]
        assert (result["first"]["first"], result["first"]["steps"]) == (AT, STEPS)
        if sync in EXACT:
            assert result["first"]["print"] == result["whole"]["print"]
            assert result["first"]["left_out"] == result["whole"]["left_out"]


@pytest.mark.parametrize("sync", ["ring+powersgd(rank=2)", "codedreduce(fanout=2,stragglers=1)"])
def test_on_other_workers_or_under_another_plan(sync: str, tmp_path: Path) -> None:
    on_ranks(3, lambda rank: train(rank, sync, after_step=saving(tmp_path)))
    for size, other in ((2, sync), (3, "dssync"), (3, "gc(stragglers=1)"), (3, "ring+topk")):

        def work(rank: int, other: str = other) -> dict[str, Any]:
            return {
                "resumed": train(rank, other, resume=tmp_path),
                "loaded": train(rank, other, load=loading(tmp_path / "0.pt")),
            }

        results = on_ranks(size, work)
        for result in results:
            assert result["loaded"] == result["resumed"]
        assert same_bits([result["loaded"] for result in results])


def test_what_is_in_it() -> None:
    """Copies, which training and other ranks don't change."""

    def work(rank: int) -> dict[str, Any]:
        states: list[dict[str, Any]] = []
        train(rank, "ring+powersgd(rank=2)", after_step=lambda run: states.append(run.state_dict()))
        models = [state["model"]["weight"] for state in states]
        return {
            "steps": [state["step"] for state in states],
            "distinct": len({weight.sum().item() for weight in models}),
            "places": len({weight.data_ptr() for weight in models}),
            "ranks": [number for number, own in enumerate(states[-1]["ranks"]) if own],
        }

    results = on_ranks(2, work)
    assert one_value(results, "steps") == list(range(1, STEPS + 1))
    assert one_value(results, "distinct") == one_value(results, "places") == STEPS
    assert [result["ranks"] for result in results] == [[0, 1], [1]]


def shorter(state: dict[str, Any]) -> None:
    state["model"].pop("bias")


def elsewhere(state: dict[str, Any]) -> None:
    state["sampling"]["batch size"] = 7


def without_objects(state: dict[str, Any]) -> None:
    state["objects"] = []


def of_another_step(state: dict[str, Any]) -> None:
    state["step"] = 3


def emptied(state: dict[str, Any]) -> None:
    state.clear()


def of_rank_1(state: dict[str, Any]) -> None:
    state["ranks"][0] = None


WRONG = {
    "a model": (shorter, {0, 1}, "the state given to rank 0 doesn't fit this Linear"),
    "data": (elsewhere, {0, 1}, "the state given to rank 0 was written with batch size 7, now"),
    "objects": (without_objects, {0, 1}, "the state given to rank 0 holds 0 state= objects"),
    "a step": (of_another_step, {1}, "rank 1 was given the state of step 3, and rank 0 that of"),
    "nothing": (emptied, {1}, "rank 1 was given no state of a run"),
    "a part": (of_rank_1, {0, 1}, "has what ring+powersgd(rank=2) keeps on 1 of 2 ranks"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_state_is_refused_on_all_ranks(case: str, in_one_crew: InOneCrew) -> None:
    def work(rank: int, case: str, folder: Path) -> dict[str, Any]:
        states: list[dict[str, Any]] = []

        def keep(run: Run) -> None:
            if run.step == AT:
                torch.save(run.state_dict(), folder / f"{rank}.pt")
                run.all_reduce_mean([torch.zeros(1)])  # a barrier
                states.append(torch.load(folder / "0.pt", weights_only=True))

        train(rank, "ring+powersgd(rank=2)", after_step=keep)
        [state] = states
        change, ranks, _ = WRONG[case]
        if rank in ranks:
            change(state)
        said: list[dict[str, Any]] = []

        def refused(run: Run) -> None:
            said.append(raised(lambda: run.load_state_dict(state)))

        train(rank, "ring+powersgd(rank=2)", load=refused)
        return said[0]

    results = in_one_crew(2, work)
    assert one_value(results, "kind") == "CheckpointError"
    for result in results:
        assert WRONG[case][2] in result["text"]


def test_too_late() -> None:
    def work(rank: int) -> dict[str, Any]:
        def too_late(run: Run) -> None:
            state = run.state_dict()
            with pytest.raises(UsageError, match="after the training had begun; call it right"):
                run.load_state_dict(state)

        return train(rank, "ring", after_step=too_late)

    assert one_value(on_ranks(2, work), "steps") == STEPS


def test_a_step_without_effect_leaves_no_settings_in_it() -> None:
    """A rank that was interrupted saves before the step is repeated."""
    model = nn.Linear(2, 1)
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(sgd, 0.5)
    run = attach(model, sgd, plan="ring", state=[scheduler])
    model(torch.ones(1, 2)).sum().backward()
    sgd.step()
    before = run.state_dict()
    run._session.void_step()
    scheduler.step()
    during = run.state_dict()
    assert during["optimizer"]["param_groups"] == before["optimizer"]["param_groups"]
    assert during["objects"] == before["objects"]
    run.close()
