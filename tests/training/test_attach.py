from __future__ import annotations

import atexit
import copy
import io
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import thalweg
from tests.training.conftest import InOneCrew
from tests.training.workers import (
    TIMEOUT,
    apart,
    fingerprint,
    on_ranks,
    one_value,
    raised,
    same_bits,
)
from thalweg.catalog import default_catalog
from thalweg.errors import LayoutError, PlanError, UsageError
from thalweg.training import Run, attach

DATA = TensorDataset(torch.arange(24.0).reshape(24, 1), torch.arange(24.0))
ALONE = [
    name for name in sorted(default_catalog().presets) if name not in ("lgc", "codedreduce", "gc")
]


def line(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(1, 1)
    return model, torch.optim.SGD(model.parameters(), **{"lr": 0.001, **options})


def train(model: nn.Module, optimizer: torch.optim.Optimizer, run: Run, epochs: int = 1) -> None:
    for epoch in run.epochs(epochs):
        for x, y in run.batches(epoch):
            optimizer.zero_grad()
            run.mean((model(x).squeeze(1) - y).square()).backward()
            optimizer.step()


# What it makes of a script


def test_one_line_makes_a_plain_script_distributed() -> None:
    """Each rank has a seed, and samples, of its own."""

    def work(rank: int) -> dict[str, Any]:
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        model[1].running_mean += rank
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        before = fingerprint(model)
        thalweg.attach(model, optimizer, plan="ring", timeout=TIMEOUT)
        start = fingerprint(model)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(5, 4)).square().mean().backward()
            optimizer.step()
        end = fingerprint(nn.ParameterList(model.parameters()))
        return {"before": before, "start": start, "end": end}

    results = on_ranks(3, work)
    assert not same_bits(results, "before")
    assert one_value(results, "start") == results[0]["before"]
    assert same_bits(results, "end")
    assert results[0]["end"] != results[0]["start"]


def test_the_random_numbers_of_the_script_are_left_alone() -> None:
    def work(rank: int) -> dict[str, Any]:
        torch.manual_seed(rank)
        model, optimizer = line()
        before = torch.get_rng_state()
        run = attach(model, optimizer, data=DATA, batch=6, plan="dssync", timeout=TIMEOUT)
        train(model, optimizer, run)
        run.close()
        return {"untouched": torch.equal(before, torch.get_rng_state())}

    assert one_value(on_ranks(2, work), "untouched") is True


def test_every_sample_goes_to_somebody() -> None:
    def work(rank: int) -> dict[str, Any]:
        model, optimizer = line()
        run = attach(model, optimizer, plan="ring", data=DATA, batch=5, timeout=TIMEOUT)
        seen = [[y.tolist() for _, y in run.batches(epoch)] for epoch in run.epochs(2)]
        run.close()
        return {"seen": seen, "steps": run.step}

    results = on_ranks(3, work)
    for epoch in range(2):
        samples = [s for r in results for batch in r["seen"][epoch] for s in batch]
        assert sorted(samples) == list(range(24))
    assert results[0]["seen"][0] != results[0]["seen"][1]


def test_a_loader_with_workers_augments_anew_each_epoch() -> None:
    class Noise(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.rand(1)

    model, optimizer = line()
    run = attach(model, optimizer, plan="ring", data=Noise(), batch=4, loader={"num_workers": 1})
    seen = [batch.sum().item() for epoch in run.epochs(3) for batch in run.batches(epoch)]
    run.close()
    assert len(set(seen)) == 3


def test_the_mean_of_losses_of_few_bits() -> None:
    """The weights of samples aren't rounded to the type of the losses."""
    model, optimizer = line()
    run = attach(model, optimizer, plan="ring", data=DATA, batch=7)
    for _ in run.batches(0):
        assert run.mean(torch.ones(7, dtype=torch.bfloat16)).item() == pytest.approx(1, abs=1e-6)
        assert run.mean(torch.ones(7, dtype=torch.float64)).item() == pytest.approx(1, abs=1e-15)
        with pytest.raises(UsageError, match=r"run\.mean got \[7, 2\] losses for 7 samples"):
            run.mean(torch.ones(7, 2))
        break
    run.close()


def test_torch_distributed_is_there_already() -> None:
    def work(rank: int) -> dict[str, Any]:
        dist.init_process_group("gloo")
        torch.manual_seed(rank)
        model, optimizer = line()
        run = attach(model, optimizer, plan="ring", data=DATA, batch=6, timeout=TIMEOUT)
        train(model, optimizer, run)
        run.close()
        total = torch.ones(1)
        dist.all_reduce(total)  # still works
        return {"print": fingerprint(model), "total": total.item()}

    results = on_ranks(3, work)
    assert same_bits(results)
    assert one_value(results, "total") == 3


@pytest.mark.parametrize("sync", ALONE)
def test_alone(sync: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher, no network: as without Thalweg."""
    for variable in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("socket.socket.connect", None)
    model, optimizer = line()
    plain = copy.deepcopy(model)
    sgd = torch.optim.SGD(plain.parameters(), lr=0.001)
    run = attach(model, optimizer, plan=sync, data=DATA, batch=6)
    assert (run.rank, run.size) == (0, 1)
    for x, y in run.batches(0):
        for each, optim in ((model, optimizer), (plain, sgd)):
            optim.zero_grad()
            run.mean((each(x).squeeze(1) - y).square()).backward()
            optim.step()
    with run.consensus():
        assert apart(model, plain) < 1e-6
    run.close()
    assert not dist.is_initialized()


@pytest.mark.parametrize("sync", ["ring", "asp"])
def test_a_fork_that_ends_leaves_the_run_alone(sync: str) -> None:
    """It ends as a script does, and exit functions are run."""

    def work(rank: int) -> dict[str, Any]:
        os.environ["THALWEG_ENCRYPTION"] = "on"
        model, optimizer = line()
        run = attach(model, optimizer, plan=sync, data=DATA, batch=6)
        train(model, optimizer, run)
        if not (child := os.fork()):
            atexit._run_exitfuncs()
            os._exit(0)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        train(model, optimizer, run)
        run.close()
        return {"ended": ended, "refused": dict(run.report().rejected)}

    for result in on_ranks(2, work):
        assert result == {"ended": 0, "refused": {}}


def test_without_a_plan_auto_chooses() -> None:
    def work(rank: int) -> dict[str, Any]:
        model, optimizer = line()
        with attach(model, optimizer, data=DATA, batch=6, timeout=TIMEOUT) as run:
            train(model, optimizer, run, epochs=3)
        return {"chosen": [event.step for event in run.events if event.kind == "auto"][:1]}

    assert one_value(on_ranks(2, work), "chosen") == [8]


def test_alone_without_a_plan_nothing_is_chosen() -> None:
    model, optimizer = line()
    with attach(model, optimizer, data=DATA, batch=6) as run:
        train(model, optimizer, run, epochs=3)
        assert (str(run.plan), run.step, run.events) == ("ring", 12, ())


def test_a_code_needs_others() -> None:
    model, optimizer = line()
    with pytest.raises(LayoutError, match="use more workers"):
        attach(model, optimizer, plan="gc(stragglers=1)", data=DATA, batch=4)


# One after the other


@pytest.mark.parametrize("sync", ["ring", "ddp", "local_sgd(every=1)"])
def test_again_in_the_same_processes(sync: str, in_one_crew: InOneCrew) -> None:
    """With the same model, which in between is as if it had never been attached."""

    def work(rank: int, sync: str) -> dict[str, Any]:
        torch.manual_seed(rank)
        model, optimizer = line()
        prints = []
        for _ in range(3):
            run = attach(model, optimizer, plan=sync, data=DATA, batch=6, timeout=TIMEOUT)
            train(model, optimizer, run)
            run.close()
            prints.append(fingerprint(model))
            optimizer.zero_grad()
            model(torch.ones(1, 1) * rank).sum().backward()
            assert model.weight.grad.item() == rank
            optimizer.step()
            prints.append(fingerprint(model))
        return {"prints": prints}

    results = in_one_crew(2, work)
    together = list(zip(*(result["prints"] for result in results), strict=True))
    assert [len(set(prints)) for prints in together] == [1, 2, 1, 2, 1, 2]


def test_two_models_at_once() -> None:
    """As adversarial training has it: two runs, whose rounds don't get mixed up."""

    def work(rank: int) -> dict[str, Any]:
        torch.manual_seed(rank)
        (one, optimizer), (two, other) = line(), line(momentum=0.5)
        runs = [attach(one, optimizer, plan="ring", timeout=TIMEOUT)]
        runs.append(attach(two, other, plan="tree", timeout=TIMEOUT))
        for _ in range(3):
            x = torch.randn(4, 1)
            optimizer.zero_grad()
            other.zero_grad()
            (one(x) - two(x)).square().mean().backward()
            optimizer.step()
            other.step()
        for run in runs:
            run.close()
        return {"one": fingerprint(one), "two": fingerprint(two)}

    results = on_ranks(3, work)
    assert same_bits(results, "one")
    assert same_bits(results, "two")


def test_copies_and_files_know_nothing_of_it() -> None:
    """A moving average by deepcopy, and torch.save of a whole module."""
    model, optimizer = line()
    run = attach(model, optimizer, plan="ring")
    average = copy.deepcopy(model)
    average(torch.ones(1, 1)).sum().backward()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    again(torch.ones(1, 1)).sum().backward()
    copy.deepcopy(optimizer)
    run.close()


def test_after_the_end() -> None:
    model, optimizer = line()
    run = attach(model, optimizer, plan="ring")
    run.close()
    run.close()
    with pytest.raises(thalweg.errors.RunError, match="the run is closed; attach the model again"):
        run.consensus().__enter__()


# What doesn't go together


def with_another_rank_1(rank: int, changed: dict[str, Any]) -> dict[str, Any]:
    """What attach() ends in with something else on rank 1."""
    options: dict[str, Any] = {"data": DATA, "batch": 6, "plan": "ring", "seed": 0}
    make = line
    if rank == 1:
        options |= changed
        make = options.pop("make", line)
    model, optimizer = make()
    return raised(lambda: attach(model, optimizer, timeout=TIMEOUT, **options))


def frozen() -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = line()
    model.bias.requires_grad_(False)
    return model, optimizer


def larger() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(1, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.001)


def adam() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(1, 1)
    return model, torch.optim.Adam(model.parameters(), lr=0.001)


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"plan": "tree"}, "plan tree, on rank 0 ring"),
        ({"make": lambda: line(lr=0.1)}, "optimizer: group 0, lr is 0.1, on rank 0 0.001"),
        ({"make": adam}, "optimizer: class is Adam, on rank 0 SGD"),
        ({"make": larger}, "model: weight is [2, 1] float32, on rank 0 [1, 1] float32"),
        ({"make": frozen}, "model: bias is [1] float32 frozen, on rank 0 [1] float32"),
        ({"data": TensorDataset(torch.zeros(9))}, "attach(): samples is 9, on rank 0 24"),
        ({"batch": 12}, "attach(): batch is 12, on rank 0 6"),
        ({"seed": 7}, "attach(): seed is 7, on rank 0 0"),
        ({"data": None, "batch": None}, "attach(): batch is None, on rank 0 6"),
        ({"resume": "x"}, "attach(): resume is 'given', on rank 0 'absent'"),
    ],
    ids=lambda value: str(value)[:20] if isinstance(value, str) else "",
)
def test_ranks_that_differ(changed: dict[str, Any], what: str, in_one_crew: InOneCrew) -> None:
    results = in_one_crew(3, with_another_rank_1)
    assert one_value(results, "kind") == "Mismatch"
    said = one_value(results, "text")
    assert said == (
        f"not all ranks hold the same as rank 0 (rank 1: {what}); "
        "start all of them with the same script and arguments"
    )


@pytest.mark.parametrize(
    ("changed", "kind", "problem"),
    [
        ({"plan": "rinf"}, "PlanError", "there is no plan 'rinf'"),
        ({"batch": 2}, "UsageError", "a batch of 2 has no sample for each of 3 workers"),
        ({"cluster": "no such file"}, "ClusterError", "can't read"),
    ],
)
def test_a_mistake_on_one_rank(changed: dict[str, Any], kind: str, problem: str) -> None:
    zero, one, two = on_ranks(3, lambda rank: with_another_rank_1(rank, changed))
    assert one["kind"] == kind
    assert one["text"].startswith(problem)
    for other in (zero, two):
        assert other["kind"] == "PeerFailed"
        assert other["text"].startswith(f"rank 1 aborted: {problem}")


@pytest.mark.parametrize("missing", [0, 2])
def test_a_rank_that_never_attaches(missing: int) -> None:
    def work(rank: int) -> dict[str, Any]:
        if rank == missing:
            return {"kind": "", "text": ""}
        model, optimizer = line()
        return raised(lambda: attach(model, optimizer, plan="ring", timeout="3s"))

    results = on_ranks(3, work)
    others = [result for rank, result in enumerate(results) if rank != missing]
    assert {other["kind"] for other in others} <= {"PeerLost", "PeerFailed"}
    assert any(other["kind"] == "PeerLost" for other in others)
    assert all(f"rank {missing} hasn't joined within 3 s" in other["text"] for other in others)


def test_a_code_without_data() -> None:
    model, optimizer = line()
    with pytest.raises(PlanError, match="gives stragglers fewer samples"):
        _alone_of(2, lambda: attach(model, optimizer, plan="gc(stragglers=1)", timeout=TIMEOUT))


def _alone_of(size: int, work: Callable[[], Any]) -> None:
    """Raise what rank 0 ends in."""
    zero = on_ranks(size, lambda rank: raised(work))[0]
    raise getattr(thalweg.errors, zero["kind"])(*zero["text"].split("; ", 1))


def test_an_optimizer_of_another_model() -> None:
    model, _ = line()
    _, optimizer = line()
    with pytest.raises(UsageError, match="the optimizer has parameters that are not the model's"):
        attach(model, optimizer, plan="ring")


def test_data_without_batch() -> None:
    model, optimizer = line()
    with pytest.raises(UsageError, match="data= and batch= go together"):
        attach(model, optimizer, plan="ring", data=DATA)
    run = attach(model, optimizer, plan="ring")
    with pytest.raises(UsageError, match=r"run\.batches needs the data"):
        next(iter(run.batches(0)))
    run.close()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"plan": 3}, "plan=3 is no plan, or text of one"),
        (
            {"model": [nn.Linear(1, 1)]},
            "model=[Linear(in_features=1,",
        ),
        ({"model": nn.Linear(1, 1, device="meta")}, "weight has no values, as it is on the meta"),
        ({"data": {"x": DATA}, "batch": 4}, "data= is dict, and samples are loaded by their index"),
        ({"data": DATA, "batch": 2.5}, "batch=2.5 is no whole number of samples"),
        ({"data": DATA, "batch": True}, "batch=True is no whole number of samples"),
        ({"data": iter(()), "batch": 4}, "data= is tuple_iterator, and samples are loaded by"),
        ({"data": DataLoader(DATA), "batch": 4}, "data= is DataLoader"),
        ({"seed": "a"}, "seed='a' is no whole number"),
        ({"timeout": 0}, "timeout=0 leaves no time"),
        ({"timeout": None}, "timeout=None is no duration"),
        ({"state": [3]}, "state= has int, which has no state_dict and load_state_dict"),
        ({"resume": 3}, "resume=3 is no folder"),
        ({"on_event": "print"}, "on_event='print' is no function"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_argument_of_another_kind(arguments: dict[str, Any], problem: str) -> None:
    model, optimizer = line()
    given = {"model": model, "optimizer": optimizer, **arguments}
    with pytest.raises(UsageError, match=re.escape(problem)):
        attach(**given)


def test_a_layer_without_a_shape() -> None:
    with pytest.raises(UsageError, match=r"1\.weight has no shape yet, as its layer is lazy"):
        attach(nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3)))


def test_nothing_to_train() -> None:
    model, optimizer = line()
    model.requires_grad_(False)
    with pytest.raises(PlanError, match="the model has no parameter that is trained"):
        attach(model, optimizer, plan="ring")


def test_a_cluster_of_another_size(tmp_path: Path) -> None:
    model, optimizer = line()
    with pytest.raises(UsageError, match="the cluster has 4 workers, and 1 were started"):
        attach(model, optimizer, plan="ring", cluster=thalweg.facts.Cluster.flat(4))


def test_ranks_with_folders_of_their_own(tmp_path: Path) -> None:
    """Relative paths differ; the run doesn't."""

    def work(rank: int) -> dict[str, Any]:
        own = tmp_path / str(rank)
        own.mkdir()
        os.chdir(own)
        model, optimizer = line()
        run = attach(
            model, optimizer, plan="ring", data=DATA, batch=6, resume="here", timeout=TIMEOUT
        )
        train(model, optimizer, run)
        run.save("here")
        run.close()
        return {"there": Path("here").exists(), "print": fingerprint(model)}

    results = on_ranks(2, work)
    assert same_bits(results)
    assert [result["there"] for result in results] == [True, False]
