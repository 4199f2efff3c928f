"""Plans with a compressor, under real training: same bits everywhere, nothing lost, nothing spread.

Losses are linear in the parameters where it matters, so that every gradient is known: then what
training did can be compared with the sum of all gradients.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

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
from thalweg.compress import Compressor, Payload, SummableCodec
from thalweg.errors import RunError
from thalweg.facts import Cluster, Size, Tensor, parse_cluster
from thalweg.schedules import Group
from thalweg.steps import compile_step
from thalweg.training import Run, attach
from thalweg.training.compiled_steps import RankStep
from thalweg.training.exchanges.compressed import Compression
from thalweg.training.sources.gradients import layout_of

SIZE = 4
COMPRESSORS = sorted(default_catalog().compressors)
KEEPING = [name for name in COMPRESSORS if default_catalog().compressors[name].biased]
SMALL_BUCKETS = "@ bucket=20KB"


def first(always: Collection[Any], everything: Sequence[Any]) -> list[Any]:
    """All of them, those that are not among the first under `make test-all` alone."""
    slow = pytest.mark.slow
    return [x if x in always else pytest.param(x, marks=slow) for x in everything]


def racks() -> Cluster:
    """Two of two, with slow uplinks."""
    slow = "uplink = '100mbit'"
    names = (("a", ["a0", "a1"]), ("b", ["b0", "b1"]))
    return parse_cluster(
        "".join(f"[[rack]]\nname = '{n}'\nhosts = {h}\n{slow}\n" for n, h in names)
    )


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(48, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 40)]
    return nn.Sequential(*layers)


def deep() -> nn.Module:
    """Seven layers of one size."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(48, 48), nn.Tanh()) for _ in range(7)]
    return nn.Sequential(*layers)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 48, generator=generator).to(next(model.parameters()).dtype)
    optimizer.zero_grad()
    model(x).float().square().mean().backward()
    optimizer.step()


def trained(rank: int, sync: str, steps: int = 6, **options: Any) -> nn.Module:
    make = options.pop("make", net)
    model = make().to(options.pop("dtype", torch.float32))
    sgd = torch.optim.SGD(model.parameters(), 0.05)
    run = attach(model, sgd, plan=sync, timeout=TIMEOUT, **options)
    for number in range(steps):
        step(model, sgd, 100 * number + rank)
    run.close()
    return model


class Slopes(nn.Module):
    """A loss whose gradient is the slopes, whatever the parameters are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64, 40))
        self.other = nn.Parameter(torch.zeros(30, 50))
        self.bias = nn.Parameter(torch.zeros(40))

    def forward(self, slopes: dict[str, torch.Tensor]) -> torch.Tensor:
        return sum(((p * slopes[n]).sum() for n, p in self.named_parameters()), torch.zeros(()))


def slopes(rank: int, number: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * number + rank)
    shapes = {name: p.shape for name, p in Slopes().named_parameters()}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def descend(run: Run, model: nn.Module, sgd: torch.optim.Optimizer, rank: int, number: int) -> None:
    run.safe_point()
    sgd.zero_grad()
    model(slopes(rank, number)).backward()
    sgd.step()


def distance(model: nn.Module, numbers: range, size: int = SIZE) -> float:
    """From where plain SGD with rate 1 would have come, in units of the way there."""
    error = whole = 0.0
    for name, parameter in model.named_parameters():
        target = -sum(slopes(rank, n)[name] for n in numbers for rank in range(size)) / size
        error += float((parameter.detach() - target).square().sum())
        whole += float(target.square().sum())
    return float((error / whole) ** 0.5)


@contextmanager
def descending(sync: str, **options: Any) -> Iterator[tuple[Run, nn.Module, torch.optim.Optimizer]]:
    model = Slopes()
    sgd = torch.optim.SGD(model.parameters(), 1.0)
    run = attach(model, sgd, plan=sync, timeout=TIMEOUT, **options)
    yield run, model, sgd
    run.close()


@pytest.mark.parametrize("name", COMPRESSORS)
def test_all_ranks_get_the_same(name: str, in_one_crew: InOneCrew) -> None:
    def work(rank: int, name: str) -> dict[str, Any]:
        model = trained(rank, f"ring+{name} @ bucket=20KB")
        return {"print": fingerprint(model), "moved": apart(model, net())}

    results = in_one_crew(SIZE, work)
    assert same_bits(results)
    assert all(result["moved"] > 0 for result in results)


@pytest.mark.parametrize("name", COMPRESSORS)
def test_random_states_are_the_users(name: str) -> None:
    model = net()
    states = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())
    sgd = torch.optim.SGD(model.parameters(), 0.05)
    run = attach(model, sgd, plan=f"ring+{name}", timeout=TIMEOUT)
    for number in range(3):
        step(model, sgd, number)
    run.close()
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), repr(np.random.get_state())) == states[1:]


@pytest.mark.parametrize("bucket", first(["4KB"], ["1MB", "20KB", "4KB"]))
@pytest.mark.parametrize("name", ["powersgd", "int8", "sign", "topk", "fp16"])
def test_any_number_of_buckets(name: str, bucket: str, in_one_crew: InOneCrew) -> None:
    def work(rank: int, name: str, bucket: str) -> dict[str, Any]:
        return {"print": fingerprint(trained(rank, f"ring+{name} @ bucket={bucket}"))}

    assert same_bits(in_one_crew(3, work))


@pytest.mark.parametrize("name", ["fp16", "bf16", "int8", "qsgd"])
def test_little_is_lost(name: str, in_one_crew: InOneCrew) -> None:
    def work(rank: int, name: str) -> dict[str, Any]:
        return {"apart": apart(trained(rank, "ring"), trained(rank, f"ring+{name}"))}

    for result in in_one_crew(2, work):
        assert 0 < result["apart"] < 2e-3


@pytest.mark.parametrize("name", KEEPING)
def test_what_is_left_out_comes_later(name: str, in_one_crew: InOneCrew) -> None:
    """What the parameters have moved, and all residuals, are the sum of all gradients."""

    def work(rank: int, name: str) -> dict[str, Any]:
        sync = f"ring+{name}" + {"dgc": "(momentum=0)", "sign": "(feedback=true)"}.get(name, "")
        with descending(sync) as (run, model, sgd):
            for number in range(5):
                descend(run, model, sgd, rank, number)
            held = run.report(residuals=True).residuals
            for kept in held.values():
                run.all_reduce_mean([kept])
            with torch.no_grad():
                for key, parameter in model.named_parameters():
                    if key in held:
                        parameter -= SIZE * held[key].view(parameter.shape)
            return {"apart": distance(model, range(5)), "kept": len(held)}

    for result in in_one_crew(SIZE, work):
        assert result["apart"] < 1e-4
        assert result["kept"] == 2


@pytest.mark.parametrize("sync", ["ring", "local_sgd(every=1)", "ring+fp16", "ddp"])
def test_leaving_a_compressor_pays_back(sync: str, in_one_crew: InOneCrew) -> None:
    def work(rank: int, sync: str) -> dict[str, Any]:
        with descending("ring+topk") as (run, model, sgd):
            for number in range(4):
                descend(run, model, sgd, rank, number)
            if rank == 0:
                run.switch(sync)
            for number in range(4, 21):
                descend(run, model, sgd, rank, number)
            return {"apart": distance(model, range(21)), "sync": str(run.plan)}

    for result in in_one_crew(SIZE, work):
        assert result["sync"] == sync
        assert result["apart"] < (2e-3 if "fp16" in sync else 1e-5)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("ring+topk", "hierarchical(compress=between)+topk"),
        ("hierarchical(compress=between)+topk", "ring+topk"),
        ("hierarchical(compress=between)+acpsgd", "ring+acpsgd"),
        ("ring+sign(feedback=true)", "ring+sign(feedback=true) @ bucket=4KB"),
        ("ring+sign(feedback=true)", "hierarchical(compress=between)+sign(feedback=true)"),
    ],
)
def test_nothing_is_lost_between_plans(before: str, after: str, in_one_crew: InOneCrew) -> None:
    def work(rank: int, before: str, after: str) -> dict[str, Any]:
        with descending(before, cluster=racks()) as (run, model, sgd):
            for sync, numbers in ((after, range(4)), ("ring", range(4, 21))):
                for number in numbers:
                    descend(run, model, sgd, rank, number)
                if rank == 0:
                    run.switch(sync)
            for number in range(21, 39):
                descend(run, model, sgd, rank, number)
            result = {"apart": distance(model, range(39)), "print": fingerprint(model)}
            return {**result, "sync": str(run.plan)}

    results = in_one_crew(SIZE, work)
    assert same_bits(results)
    assert one_value(results, "sync") == "ring"
    assert all(result["apart"] < 1e-4 for result in results)


def test_what_is_kept_of_an_unused_parameter_is_not_lost() -> None:
    def work(rank: int) -> dict[str, Any]:
        with descending("ring+topk(ratio=0.1)") as (run, model, sgd):
            for number in range(6):
                run.safe_point()
                sgd.zero_grad()
                given = slopes(rank, number)
                if number % 2:  # `other` takes no part
                    products = [model.weight * given["weight"], model.bias * given["bias"]]
                    loss = products[0].sum() + products[1].sum()
                else:
                    loss = model(given)
                loss.backward()
                sgd.step()
            kept = run.report(residuals=True).residuals["other"]
            run.all_reduce_mean([kept])
            wanted = sum(slopes(r, n)["other"] for n in (0, 2, 4) for r in range(SIZE)) / SIZE
            moved = -model.other.detach() + SIZE * kept.view(30, 50)
            return {"apart": (moved - wanted).abs().max().item()}

    assert all(result["apart"] < 1e-4 for result in on_ranks(SIZE, work))


def test_variances_stay_positive() -> None:
    def work(rank: int) -> dict[str, Any]:
        model = net()
        adam = torch.optim.Adam(model.parameters(), 0.01)
        sync = "local_sgd(every=1, optimizer=averaged)+int8"
        run = attach(model, adam, plan=sync, timeout=TIMEOUT)
        for number in range(8):
            step(model, adam, 100 * number + rank)
        run.close()
        least = min(state["exp_avg_sq"].min().item() for state in adam.state.values())
        finite = all(bool(p.isfinite().all()) for p in model.parameters())
        return {"least": least, "finite": finite}

    assert all(result["least"] >= 0 and result["finite"] for result in on_ranks(2, work))


def test_another_compressor_takes_what_is_left_out() -> None:
    def work(rank: int) -> dict[str, Any]:
        with descending("ring+topk") as (run, model, sgd):
            for number in range(3):
                descend(run, model, sgd, rank, number)
            if rank == 1:
                run.switch("ring+randomk(ratio=0.1)")
            for number in range(3, 20):
                descend(run, model, sgd, rank, number)
            if rank == 1:
                run.switch("ring")
            for number in range(20, 38):
                descend(run, model, sgd, rank, number)
            return {"apart": distance(model, range(38))}

    assert all(result["apart"] < 1e-5 for result in on_ranks(SIZE, work))


@pytest.mark.parametrize("after", ["ring+topk", "ring"])
@pytest.mark.parametrize("size", [2, 3])
def test_what_is_left_out_survives_another_number_of_workers(
    tmp_path: Path, size: int, after: str
) -> None:
    """Resumed on `size` ranks, which then have gradients of zero until all is paid back."""

    def first(rank: int) -> dict[str, Any]:
        with descending("ring+topk(ratio=0.1)") as (run, model, sgd):
            for number in range(4):
                descend(run, model, sgd, rank, number)
            run.save(tmp_path)
            return {"apart": distance(model, range(4))}

    assert all(result["apart"] > 0.3 for result in on_ranks(SIZE, first))

    def second(rank: int) -> dict[str, Any]:
        sync = "ring+topk(ratio=0.5)" if after == "ring+topk" else after
        with descending(sync, resume=tmp_path) as (run, model, sgd):
            for _ in range(12):
                run.safe_point()
                sgd.zero_grad()
                model({n: torch.zeros_like(p) for n, p in model.named_parameters()}).backward()
                sgd.step()
            return {"apart": distance(model, range(4)), "print": fingerprint(model)}

    results = on_ranks(size, second)
    assert same_bits(results)
    assert all(result["apart"] < 1e-4 for result in results)


def resumed(
    rank: int, sync: str, folder: Path, steps: int, make: Callable[[], nn.Module] = net
) -> dict[str, Any]:
    """So many steps at once, and with a stop in the middle."""
    whole = trained(rank, sync, steps, make=make)
    model = make()
    for numbers in (range(steps // 2), range(steps // 2, steps)):
        model = make()
        sgd = torch.optim.SGD(model.parameters(), 0.05)
        run = attach(model, sgd, plan=sync, resume=folder, timeout=TIMEOUT)
        for number in numbers:
            step(model, sgd, 100 * number + rank)
        run.save(folder)
        run.close()
    return {"print": fingerprint(model), "whole": fingerprint(whole)}


@pytest.mark.parametrize("name", first(["powersgd", "int8", "sign", "dgc"], COMPRESSORS))
def test_stopped_and_resumed_is_uninterrupted(name: str, in_one_crew: InOneCrew) -> None:
    def work(rank: int, name: str, folder: Path) -> dict[str, Any]:
        return resumed(rank, f"ring+{name} {SMALL_BUCKETS}", folder, 10)

    results = in_one_crew(3, work)
    assert same_bits(results)
    assert one_value(results, "print") == one_value(results, "whole")


@pytest.mark.slow
@pytest.mark.timeout(360)
@pytest.mark.parametrize(("bucket", "count"), [("1MB", 1), ("25KB", 3), ("9KB", 8)])
@pytest.mark.parametrize("name", ["powersgd", "int8", "sign", "sign(feedback=true)"])
def test_two_hundred_steps(tmp_path: Path, name: str, bucket: str, count: int) -> None:
    layout = layout_of(dict(deep().named_parameters()), Size.parse(bucket))
    assert len(layout.buckets) == count
    sync = f"ring+{name} @ bucket={bucket}"
    results = on_ranks(4, lambda rank: resumed(rank, sync, tmp_path, 200, deep), seconds=300)
    assert same_bits(results)
    assert one_value(results, "print") == one_value(results, "whole")


def test_warm_up_is_exact() -> None:
    def work(rank: int) -> dict[str, Any]:
        steps = {3: "", 6: ""}
        for number in steps:
            steps[number] = fingerprint(trained(rank, "ring+powersgd(warmup=3)", number))
        exact = {number: fingerprint(trained(rank, "ring", number)) for number in steps}
        return {"warm": steps[3] == exact[3], "later": steps[6] == exact[6]}

    for result in on_ranks(2, work):
        assert result == {"warm": True, "later": False}


@pytest.mark.parametrize(
    "dtype", first([torch.bfloat16], [torch.bfloat16, torch.float16, torch.float64])
)
@pytest.mark.parametrize("name", ["powersgd", "int8", "sign", "topk", "fp16", "randomblock"])
def test_other_types(name: str, dtype: torch.dtype, in_one_crew: InOneCrew) -> None:
    def work(rank: int, name: str, dtype: torch.dtype) -> dict[str, Any]:
        return {"print": fingerprint(trained(rank, f"ring+{name}", 3, dtype=dtype))}

    assert same_bits(in_one_crew(2, work))


class Odd(nn.Module):
    """Nothing to send, a single number, one row, and one column."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0, 5))
        self.number = nn.Parameter(torch.ones(()))
        self.row = nn.Parameter(torch.ones(1, 3000))
        self.column = nn.Parameter(torch.ones(3000, 1))
        self.deep = nn.Parameter(torch.ones(5, 7, 3, 3, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(((p * x).square().sum() for p in self.parameters()), torch.zeros(()))


@pytest.mark.parametrize("name", COMPRESSORS)
def test_odd_shapes(name: str, in_one_crew: InOneCrew) -> None:
    def work(rank: int, name: str) -> dict[str, Any]:
        model = Odd()
        sgd = torch.optim.SGD(model.parameters(), 0.01)
        run = attach(model, sgd, plan=f"ring+{name}", timeout=TIMEOUT)
        for number in range(3):
            sgd.zero_grad()
            model(torch.tensor(0.1 * (1 + rank + number))).backward()
            sgd.step()
        run.close()
        return {"print": fingerprint(model), "moved": model.number.item() < 1}

    results = in_one_crew(2, work)
    assert same_bits(results)
    assert all(result["moved"] for result in results)


def test_mixed_types_have_buckets_of_their_own() -> None:
    def work(rank: int) -> dict[str, Any]:
        model = net()
        model[2].to(torch.bfloat16)
        sgd = torch.optim.SGD(model.parameters(), 0.05)
        run = attach(model, sgd, plan="ring+int8", timeout=TIMEOUT)
        for number in range(3):
            sgd.zero_grad()
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, float(rank + number))
            weights = (p.float().sum() * (rank + 1) for p in model.parameters())
            sum(weights, torch.zeros(())).backward()
            sgd.step()
        run.close()
        return {"print": fingerprint(model)}

    assert same_bits(on_ranks(2, work))


@pytest.mark.parametrize(
    ("itemsize", "declared", "said"),
    [(2, 1, "bytes instead of the"), (4, 2, "not the 2 that"), (4, 0, "more than the 1 that")],
)
def test_payloads_that_are_not_declared_are_refused(
    itemsize: int, declared: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Plain(SummableCodec):
        def rounds(self, values: Any, out: Any, step: int, *, keep: bool) -> Iterator[Any]:
            for _ in range(1 if declared else 2):
                yield values.copy()

    def sizes(tensors: Sequence[Tensor], step: int) -> list[Payload]:
        elements = sum(tensor.elements for tensor in tensors)
        return [Payload("values", elements, itemsize)] * max(1, declared)

    plain = Compressor(
        name="plain",
        summary="as it is",
        sizes=sizes,
        codec=Plain,
        summable=True,
        takes=lambda tensor: len(tensor.shape) > 1,
    )
    larger = default_catalog().with_compressor(plain)
    monkeypatch.setattr("thalweg.training.exchanges.compressed.default_catalog", lambda: larger)
    plan = larger.plan("ring+plain")
    compression = Compression.of(plan)
    layout = layout_of(
        {"w": nn.Parameter(torch.zeros(40, 40))}, Size.parse("1MB"), compression.arrange
    )
    group = Group.everybody(Cluster.flat(2))
    [chain] = compile_step(plan, group, layout.workload, 0, larger).chains
    rank_step = RankStep((chain,), {}, 0)
    compressed = compression.buckets(layout, 0)[chain.bucket]
    monkeypatch.setattr(RankStep, "task", lambda *_: None)
    with pytest.raises(RunError, match=said) as refused:
        list(compressed.tasks(rank_step, chain))
    assert "the codec of plain has other payloads" in str(refused.value)


@pytest.mark.parametrize("name", ["powersgd", "int8", "sign", "topk", "fp16", "randomblock"])
@pytest.mark.parametrize(
    "value", first([float("inf")], [float("nan"), float("inf"), -float("inf")])
)
def test_what_is_not_finite_is_named(name: str, value: float) -> None:
    def work(rank: int) -> dict[str, Any]:
        model = Slopes()
        sgd = torch.optim.SGD(model.parameters(), 1.0)
        attach(model, sgd, plan=f"ring+{name}", timeout=TIMEOUT)
        given = slopes(rank, 0)
        if rank == 1:
            given["other"][3, 7] = value
        return raised(lambda: model(given).backward())

    results = on_ranks(3, work)
    kinds = {result["kind"] for result in results}  # others may be told by one that gives up first
    assert {"NotFinite"} <= kinds <= {"NotFinite", "PeerFailed"}
    for result in results:
        assert "the gradient of other has inf or nan on rank 1 at step 0" in result["text"]


@pytest.mark.parametrize(
    "sync",
    [
        "dssync+int8",
        "dssync+bf16",
        "gossip+bf16",
        "gossip(graph=exponential)+fp16",
        "local_sgd(every=2)+int8",
        "local_sgd(every=1, delay=1)+qsgd",
        "dssync(delay=1)+fp16",
        "local_sgd(every=1)+terngrad",
    ],
)
def test_averaging_parameters_keeps_their_mean(sync: str, in_one_crew: InOneCrew) -> None:
    def work(rank: int, sync: str) -> dict[str, Any]:
        with descending(sync, cluster=racks()) as (run, model, sgd):
            for number in range(6):
                descend(run, model, sgd, rank, number)
            with run.consensus():
                mean = distance(model, range(6))
            return {"mean": mean, "drift": run.report(drift=True).drift}

    for result in in_one_crew(SIZE, work):
        assert result["mean"] < (5e-3 if "16" in sync else 1e-5)
        assert result["drift"] > 0


@pytest.mark.parametrize("name", first(["powersgd", "sign", "topk"], COMPRESSORS))
def test_between_racks_alone(name: str, in_one_crew: InOneCrew) -> None:
    def work(rank: int, name: str) -> dict[str, Any]:
        sync = f"hierarchical(compress=between)+{name} {SMALL_BUCKETS}"
        return {"print": fingerprint(trained(rank, sync, cluster=racks()))}

    assert same_bits(in_one_crew(SIZE, work))


@pytest.mark.parametrize(
    "topology",
    first(["ddp", "tree"], ["ddp", "star", "tree", "double_tree", "halving_doubling", "ps"]),
)
@pytest.mark.parametrize("name", ["powersgd", "int8", "fp16"])
def test_any_topology(topology: str, name: str, in_one_crew: InOneCrew) -> None:
    def work(rank: int, topology: str, name: str) -> dict[str, Any]:
        return {"print": fingerprint(trained(rank, f"{topology}+{name}"))}

    assert same_bits(in_one_crew(3, work))


DATA = TensorDataset(torch.randn(64, 48, generator=torch.Generator().manual_seed(5)))


@pytest.mark.parametrize(
    "sync",
    [
        "gc(stragglers=1)+fp16",
        "gc(stragglers=1)+randomblock(ratio=0.1)",
        "codedreduce(fanout=2, stragglers=1)+bf16",
        "codedreduce(fanout=2, stragglers=1)+randomk(ratio=0.1)",
        "lgc+bf16",
    ],
)
def test_plans_that_wait_for_nobody(sync: str, in_one_crew: InOneCrew) -> None:
    def work(rank: int, sync: str) -> dict[str, Any]:
        model = net()
        sgd = torch.optim.SGD(model.parameters(), 0.2)
        run = attach(model, sgd, plan=sync, data=DATA, batch=16, timeout=TIMEOUT)
        losses = []
        for epoch in run.epochs(5):
            for (x,) in run.batches(epoch):
                sgd.zero_grad()
                loss = run.mean(model(x).square().mean(1))
                loss.backward()
                sgd.step()
                losses.append(model(DATA.tensors[0]).square().mean().item())
        with run.consensus():
            result = {"print": fingerprint(model), "first": losses[0], "last": losses[-1]}
        run.close()
        return result

    results = in_one_crew(4, work)
    for result in results:
        assert result["last"] < 0.9 * result["first"]
    assert same_bits(results)


@pytest.mark.parametrize("name", ["powersgd", "int8", "topk", "fp16"])
def test_under_a_ddp_object(name: str) -> None:
    """Which lays its buckets out anew after the first step."""

    def work(rank: int) -> dict[str, Any]:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        model = net()
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.02)
        sgd = torch.optim.SGD(model.parameters(), 0.05)
        run = attach(ddp, sgd, plan=f"ring+{name}", timeout=TIMEOUT)
        for number in range(5):
            step(ddp, sgd, 100 * number + rank)
        run.close()
        return {"print": fingerprint(model)}

    assert same_bits(on_ranks(3, work))


@pytest.mark.parametrize("sync", ["ring @ bucket=4KB", "ring+topk(ratio=0.1) @ bucket=4KB"])
def test_ddp_lays_out_its_own_buckets(sync: str) -> None:
    """Whatever the plan's size is; and what was kept goes along when it does so anew."""

    def work(rank: int) -> dict[str, Any]:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        model = Slopes()
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.012)
        sgd = torch.optim.SGD(model.parameters(), 1.0)
        run = attach(ddp, sgd, plan=sync, timeout=TIMEOUT)
        for number in range(4):
            sgd.zero_grad()
            ddp(slopes(rank, number)).backward()
            sgd.step()
        held = run.report(residuals=True).residuals
        run.all_reduce_mean(list(held.values()))
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if key in held:
                    parameter -= SIZE * held[key].view(parameter.shape)
        result = {"apart": distance(model, range(4)), "kept": len(held)}
        run.close()
        return result

    for result in on_ranks(SIZE, work):
        assert result["apart"] < 1e-4
        assert result["kept"] == (2 if "topk" in sync else 0)


@pytest.mark.parametrize(
    ("sync", "words"),
    [
        ("ring+powersgd(rank=0)", "0 is too small; give at least 1"),
        ("ring+topk(ratio=1.5)", "1.5 is too large; give at most 1"),
        ("ring+topk(ratio=0)", "0 is too small"),
        ("gossip+int8", "gossip adds neighbours' payloads, and int8's can't be added"),
        ("dssync+topk", "topk leaves out most of a parameter"),
        ("codedreduce+powersgd", "with a code use bf16, fp16, randomblock or randomk"),
        ("asp+int8", "an asynchronous parameter server takes gradients uncompressed"),
        ("lgc+powersgd", "powersgd needs all ranks at the same step"),
        ("lgc+int8", "late gradients are added up, and payloads of int8 can't be"),
        ("gc+fp16(warmup=3)", "leave warmup out"),
        ("local_sgd(every=2, levels=rack, delay=1)+int8", "leave delay out"),
        ("hierarchical(compress=between)", "there is nothing to compress between racks; add a"),
        ("ring+dgc", "dgc has a momentum of 0.9, and the optimizer has its own"),
    ],
)
def test_what_cannot_be_is_said(sync: str, words: str) -> None:
    model = net()
    sgd = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    told = raised(lambda: attach(model, sgd, plan=sync, timeout=TIMEOUT))
    assert words in told["text"]


def test_a_checkpoint_of_another_model(tmp_path: Path) -> None:
    with descending("ring+topk") as (run, model, sgd):
        descend(run, model, sgd, 0, 0)
        run.save(tmp_path)
    model = net()
    sgd = torch.optim.SGD(model.parameters(), 0.05)
    told = raised(lambda: attach(model, sgd, plan="ring+topk", resume=tmp_path, timeout=TIMEOUT))
    assert told["kind"] == "CheckpointError"
    assert "doesn't fit this Sequential" in told["text"]
