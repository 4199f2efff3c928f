"""A run that is stopped anywhere and resumed ends with the bits of one that wasn't."""

from __future__ import annotations

import json
import random
import re
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from tests.training.conftest import InOneCrew
from tests.training.workers import TIMEOUT, fingerprint, on_ranks, one_value, raised, same_bits
from thalweg.training import Run, attach
from thalweg.training.checkpoint import read

EPOCHS, BATCHES, SAMPLES = 2, 4, 28
STEPS = EPOCHS * BATCHES


class Noisy(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Augmented with all three kinds of random numbers."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.randn(4) + np.random.rand() + random.random()
        return torch.full((4,), index / SAMPLES) + 0.1 * noise, torch.tensor(index / SAMPLES)


class Net(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1)
        )
        self.register_buffer("shift", torch.ones(1) * rank, persistent=False)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        out: torch.Tensor = self.layers(x).squeeze(1) + self.shift
        return out

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


Kind = Callable[[nn.Module], tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]]


def adamw(model: nn.Module) -> tuple[Any, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), 0.05, amsgrad=True)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


def momentum(model: nn.Module) -> tuple[Any, Any]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)


def train(
    rank: int,
    kind: Kind = adamw,
    *,
    sync: str = "ring",
    resume: Path | None = None,
    after_step: Callable[[Run], None] = lambda run: None,
    after_epoch: Callable[[Run], None] = lambda run: None,
    epochs: int = EPOCHS,
) -> dict[str, Any]:
    """As a script would."""
    seed = rank if resume is None else 1000 + rank  # what is resumed doesn't depend on it
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    model = Net(rank)
    optimizer, scheduler = kind(model)
    run = attach(
        model,
        optimizer,
        plan=sync,
        data=Noisy(),
        batch=7,
        state=[scheduler],
        resume=resume,
        timeout=TIMEOUT,
    )
    first = run.step
    for epoch in run.epochs(epochs):
        for x, y in run.batches(epoch):
            optimizer.zero_grad()
            run.mean((model(x) - y).square()).backward()
            optimizer.step()
            after_step(run)
        if run.should_stop:
            break
        scheduler.step()
        after_epoch(run)
    with run.consensus():
        pass
    run.close()
    return {
        "print": fingerprint(nn.ParameterList(model.parameters())),
        "statistics": model.layers[1].running_var.tolist(),
        "rate": scheduler.get_last_lr(),
        "calls": model.calls,
        "first": first,
        "steps": run.step,
    }


def assert_same_end(results: list[dict[str, Any]], whole: list[dict[str, Any]]) -> None:
    """Bit for bit; batch norm's statistics, of which each rank has its own between two
    checkpoints, up to rounding."""
    for result, wanted in zip(results, whole, strict=True):
        for key in ("print", "rate", "calls", "steps"):
            assert result[key] == wanted[key]
        assert result["statistics"] == pytest.approx(wanted["statistics"], rel=1e-5)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", [adamw, momentum])
@pytest.mark.parametrize("where", ["after_step", "after_epoch"])
def test_stopped_at_any_step(kind: Kind, where: str, size: int, in_one_crew: InOneCrew) -> None:
    """With dropout, augmentation, batch norm and a schedule. Saving changes nothing either."""

    def work(rank: int, kind: Kind, where: str, folder: Path) -> dict[str, Any]:
        saves = {where: lambda run: run.save(folder / "all", keep=100)}
        found = {"whole": train(rank, kind), "saving": train(rank, kind, **saves), "resumed": {}}
        own = folder / f"as rank {rank} found them"
        for checkpoint in sorted((folder / "all").iterdir()):
            shutil.copytree(checkpoint, own / checkpoint.name / checkpoint.name)
        for copy in sorted(own.iterdir()):
            step = int(copy.name.removeprefix("step-"))
            found["resumed"][step] = train(rank, kind, resume=copy, **saves)
        return found

    results = in_one_crew(size, work)
    whole = [result["whole"] for result in results]
    assert same_bits(whole)
    assert one_value(whole, "steps") == STEPS
    assert_same_end([result["saving"] for result in results], whole)
    assert len(results[0]["resumed"]) == (STEPS if where == "after_step" else EPOCHS)
    for step in results[0]["resumed"]:
        resumed = [result["resumed"][step] for result in results]
        assert one_value(resumed, "first") == int(step)
        assert_same_end(resumed, whole)


def test_stopped_by_a_rank(tmp_path: Path) -> None:
    """run.stop() in mid-epoch, and a checkpoint after the loop: the epoch's rest isn't lost."""

    def stop(run: Run) -> None:
        if run.rank == 1 and run.step == 3:
            run.stop()

    def stopped(rank: int) -> dict[str, Any]:
        torch.manual_seed(rank)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        options: dict[str, Any] = {"data": Noisy(), "batch": 3, "timeout": TIMEOUT, "plan": "ring"}
        run = attach(model, optimizer, resume=tmp_path, **options)
        seen = []
        for epoch in run.epochs(2):
            for _, y in run.batches(epoch):
                seen += [(epoch, round(SAMPLES * s)) for s in y.tolist()]
                optimizer.zero_grad()
                run.mean(model(torch.ones(len(y), 4)).squeeze(1)).backward()
                optimizer.step()
                stop(run)
        run.save(tmp_path)
        run.close()
        return {"seen": seen, "stopped": run.should_stop, "steps": run.step}

    first = on_ranks(3, stopped)
    assert one_value(first, "stopped") is True
    assert one_value(first, "steps") == 8
    second = on_ranks(3, stopped)
    assert one_value(second, "stopped") is False
    seen = [tuple(sample) for result in (*first, *second) for sample in result["seen"]]
    assert sorted(seen) == [(epoch, sample) for epoch in range(2) for sample in range(SAMPLES)]


@pytest.mark.parametrize(("written", "read"), [(3, 2), (2, 3), (2, 1)])
def test_another_number_of_workers(written: int, read: int, tmp_path: Path) -> None:
    def save(run: Run) -> None:
        if run.step == 3:
            run.save(tmp_path)

    before = on_ranks(written, lambda rank: train(rank, after_step=save))
    after = on_ranks(read, lambda rank: train(rank, resume=tmp_path))
    assert one_value(after, "first") == 3
    assert one_value(after, "steps") == one_value(before, "steps")
    assert same_bits(after)


def test_another_plan(tmp_path: Path) -> None:
    """From replicas that differ: all begin with their mean."""
    on_ranks(2, lambda rank: train(rank, sync="gossip", after_epoch=lambda r: r.save(tmp_path)))
    after = on_ranks(2, lambda rank: train(rank, sync="tree", resume=tmp_path, epochs=3))
    assert one_value(after, "first") == STEPS
    assert same_bits(after)


@pytest.mark.parametrize("there", [True, False])
def test_no_checkpoint_yet(there: bool, in_one_crew: InOneCrew) -> None:
    def work(rank: int, there: bool, folder: Path) -> dict[str, Any]:
        folder = folder if there else folder / "new"
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        run = attach(model, optimizer, plan="ring", resume=folder, timeout=TIMEOUT)
        run.close()
        return {"step": run.step}

    assert one_value(in_one_crew(2, work), "step") == 0


# What can't be resumed


def linear() -> nn.Module:
    return nn.Linear(4, 1)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), 0.1)


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [p]} for p in model.parameters()], 0.1)


class Picky:
    def state_dict(self) -> dict[str, int]:
        return {"mine": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["mine"] == 2, "not mine"


def resumed_by(
    folder: Path,
    make: Callable[[], nn.Module] = linear,
    kind: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    state: list[Any] | None = None,
) -> dict[str, Any]:
    model = make()
    options: dict[str, Any] = {"resume": folder, "timeout": TIMEOUT, "state": state or []}
    return raised(lambda: attach(model, kind(model), plan="ring", **options).close())


def written(folder: Path, state: list[Any] | None = None) -> Path:
    model = linear()
    run = attach(model, sgd(model), plan="ring", state=state or [])
    run.save(folder)
    run.close()
    return folder / "step-00000000"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"make": lambda: nn.Linear(5, 1)}, "doesn't fit this Linear (RuntimeError: Error(s) in"),
        ({"kind": adam}, "doesn't fit this Adam (ValueError: it has no "),
        ({"kind": two_groups}, "doesn't fit this SGD (ValueError: loaded state dict has"),
        ({"state": [Picky()]}, "holds 0 state= objects, and 1 are given"),
    ],
)
def test_of_something_else(
    options: dict[str, Any], said: str, tmp_path: Path, in_one_crew: InOneCrew
) -> None:
    written(tmp_path)  # the same in all cases
    results = in_one_crew(2, lambda rank, options: resumed_by(tmp_path, **options))
    assert one_value(results, "kind") == "CheckpointError"
    assert said in one_value(results, "text")


def test_a_state_object_that_refuses(tmp_path: Path) -> None:
    written(tmp_path, [Picky()])
    results = on_ranks(2, lambda rank: resumed_by(tmp_path, state=[Picky()]))
    assert one_value(results, "kind") == "CheckpointError"
    assert "doesn't fit this Picky (AssertionError: not mine" in one_value(results, "text")


def test_damaged(tmp_path: Path) -> None:
    file = written(tmp_path) / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    results = on_ranks(3, lambda rank: resumed_by(tmp_path))
    assert one_value(results, "kind") == "CheckpointError"
    assert "is damaged: model.safetensors isn't what was written" in one_value(results, "text")


def test_damaged_after_a_sound_one(tmp_path: Path) -> None:
    """All ranks go on from that."""

    def save(run: Run) -> None:
        if run.step in (3, 5):
            run.save(tmp_path)

    whole = on_ranks(2, lambda rank: train(rank, after_step=save))
    file = tmp_path / "step-00000005" / "optimizer.safetensors"
    file.write_bytes(bytes(file.stat().st_size))
    resumed = on_ranks(2, lambda rank: train(rank, resume=tmp_path))
    assert one_value(resumed, "first") == 3
    assert_same_end(resumed, whole)


def test_foreign(tmp_path: Path) -> None:
    folder = tmp_path / "step-00000007"
    folder.mkdir()
    (folder / "checkpoint.json").write_text(json.dumps({"epoch": 3}))
    results = on_ranks(2, lambda rank: resumed_by(tmp_path))
    assert one_value(results, "kind") == "CheckpointError"
    assert "is no checkpoint of Thalweg" in one_value(results, "text")


@pytest.mark.parametrize("sync", ["ring", "local_sgd(every=2)"])
def test_a_full_disk_on_rank_0(sync: str, folder: Path, in_one_crew: InOneCrew) -> None:
    """An error on all ranks, after which training goes on, and a later checkpoint succeeds."""

    def work(rank: int, sync: str, folder: Path) -> dict[str, Any]:
        outcomes: list[str] = []

        def save(run: Run) -> None:
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            if rank == 0 and run.step == 2:
                resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
            outcomes.append(raised(lambda: run.save(folder))["text"])
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))

        found = train(rank, sync=sync, after_step=save) | {"outcomes": outcomes}
        return found | {"whole": train(rank, sync=sync)}

    results = in_one_crew(2, work)
    outcomes = one_value(results, "outcomes")
    assert "can't write checkpoint" in outcomes[1]
    assert "make room there" in outcomes[1]
    assert [text for text in outcomes if text] == [outcomes[1]]
    assert one_value(results, "steps") == STEPS
    names = sorted(path.name for path in folder.iterdir())
    assert names == [f"step-{step:08d}" for step in (STEPS - 1, STEPS)]
    if sync == "ring":
        assert_same_end(results, [result["whole"] for result in results])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Of a megabyte."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount here")
    if done.returncode:
        pytest.skip(f"no disk can be mounted here: {done.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_disk_that_is_really_full(small_disk: Path) -> None:
    """Earlier checkpoints stay, and once there is room the next one is written."""
    filler = small_disk / "filler"

    def work(rank: int) -> dict[str, Any]:
        outcomes: list[str] = []

        def save(run: Run) -> None:
            if rank == 0 and run.step == 2:
                with filler.open("wb", buffering=0) as file, suppress(OSError):
                    while True:
                        file.write(bytes(4096))
            outcomes.append(raised(lambda: run.save(small_disk))["text"])
            if rank == 0 and run.step == 3:
                assert read(small_disk / "step-00000001").step == 1
                filler.unlink()

        return train(rank, after_step=save) | {"outcomes": outcomes}

    results = on_ranks(3, work)
    outcomes = one_value(results, "outcomes")
    assert [bool(text) for text in outcomes] == [1 < step <= 3 for step in range(1, STEPS + 1)]
    for text in outcomes[1:3]:
        assert re.search(r"can't write checkpoint .*: No space left on device; make room", text)
    assert one_value(results, "steps") == STEPS
    names = sorted(path.name for path in small_disk.iterdir())
    assert names == [f"step-{step:08d}" for step in (STEPS - 1, STEPS)]


def test_a_state_that_cannot_be_written(tmp_path: Path) -> None:
    class Odd:
        def state_dict(self) -> Any:
            return {"callback": print}

        def load_state_dict(self, state: Any) -> None: ...

    def work(rank: int) -> dict[str, Any]:
        model = linear()
        run = attach(model, sgd(model), plan="ring", state=[Odd()], timeout=TIMEOUT)
        refused = raised(lambda: run.save(tmp_path))
        run.close()
        return refused

    results = on_ranks(2, work)
    assert one_value(results, "kind") == "CheckpointError"
    assert "state[0]['callback'] is a builtin_function_or_method" in one_value(results, "text")
