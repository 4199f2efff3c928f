"""Gradients that have inf or nan in them, under every class of plans: named, or skipped."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from tests.training.conftest import InOneCrew
from tests.training.workers import (
    TIMEOUT,
    fingerprint,
    on_ranks,
    one_value,
    raised,
    same_bits,
    values,
)
from thalweg.errors import UsageError
from thalweg.members.world import World
from thalweg.training import attach
from thalweg.training.finite import is_finite, not_finite

SIZE = 3
BAD = 2  # the step at which a gradient is not finite
STEPS = 6
BATCH = 12
EXACT = ["ring", "ring+powersgd", "ddp"]
LOCAL = ["dssync", "local_sgd(every=2)", "gossip"]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 4))


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(STEPS * BATCH, 40, generator=generator))


def train(sync: str, bad: tuple[int, ...], *, scales: bool = False, **options: Any) -> Any:
    """One epoch in which the last bias has a gradient of nan on the ranks `bad`, at one step."""
    model = net()
    sgd = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    run = attach(model, sgd, plan=sync, data=data(), batch=BATCH, timeout=TIMEOUT, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scales)
    moved = []
    for epoch in run.epochs(1):
        for [x] in run.batches(epoch):
            sgd.zero_grad()
            step, before = run.step, values(model)
            loss = run.mean(model(x).square().mean(dim=1))
            if step == BAD and run.rank in bad:
                loss = loss + float("nan") * model[2].bias.sum()
            scaler.scale(loss).backward()
            scaler.unscale_(sgd)
            nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            scaler.step(sgd)
            scaler.update()
            moved.append(values(model) != before)
    run.close()
    skipped = [event for event in run.events if event.kind == "nonfinite"]
    return {
        "step": run.step,
        "moved": moved,
        "print": fingerprint(model),
        "finite": all(bool(p.isfinite().all()) for p in model.parameters()),
        "scale": scaler.get_scale(),
        "skipped": [event.step for event in skipped],
        "text": " ".join(event.data for event in skipped),
    }


def test_names_parameter_rank_and_step_on_every_rank() -> None:
    """The bias is left alone by compressors, and travels in the bucket that leaves first."""
    plans = ["ring", "ring+int8", "ring+fp16", "hierarchical+powersgd", "ddp", *LOCAL]

    def work(rank: int) -> dict[str, Any]:
        return {sync: raised(lambda sync=sync: train(sync, (1,)))["text"] for sync in plans}

    for result in on_ranks(SIZE, work):
        for sync in plans:
            wanted = "the gradient of 2.bias has inf or nan on rank 1 at step 2"
            assert wanted in result[sync], (sync, result[sync])


@pytest.mark.parametrize("sync", ["gc(stragglers=1)", "codedreduce(fanout=2, stragglers=1)"])
def test_a_code_raises_if_it_has_used_what_is_not_finite(sync: str) -> None:
    """On all ranks: whoever's answers were taken, one of them was bad."""

    def work(rank: int) -> dict[str, Any]:
        return raised(lambda: train(sync, (0, 1, 2)))

    for result in on_ranks(SIZE, work):
        assert "the gradient of 2.bias has inf or nan on rank" in result["text"]
        assert "at step 2" in result["text"]


@pytest.mark.parametrize("scales", [False, True])
def test_all_ranks_skip_together(scales: bool) -> None:
    plans = [*EXACT, "ring+fp16", "codedreduce(fanout=2, stragglers=1)"]

    def work(rank: int) -> dict[str, Any]:
        options = {"nonfinite": "skip", "scales": scales}
        bad = {sync: (0, 1, 2) if "coded" in sync else (1,) for sync in plans}
        return {sync: train(sync, bad[sync], **options) for sync in plans}

    results = on_ranks(SIZE, work)
    for sync in plans:
        of_all = [result[sync] for result in results]
        assert same_bits(of_all), sync
        assert one_value(of_all, "finite")
        assert one_value(of_all, "step") == STEPS
        assert one_value(of_all, "skipped") == [BAD]
        assert one_value(of_all, "moved") == [step != BAD for step in range(STEPS)]
        assert one_value(of_all, "scale") == (512.0 if scales else 1.0)
        assert "2.bias" in of_all[0]["text"], sync


@pytest.mark.parametrize("scales", [False, True])
def test_a_group_goes_on_with_a_rank_that_skips_its_own_step(scales: bool) -> None:
    def work(rank: int) -> dict[str, Any]:
        return {s: train(s, (1,), nonfinite="skip", scales=scales) for s in LOCAL}

    results = on_ranks(SIZE, work)
    for sync in LOCAL:
        of_all = [result[sync] for result in results]
        assert one_value(of_all, "finite")
        assert one_value(of_all, "step") == STEPS
        assert [result["skipped"] for result in of_all] == [[], [BAD], []]
        if scales:
            assert [result["scale"] for result in of_all] == [1024.0, 512.0, 1024.0]


class InThreeTypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        types = torch.float32, torch.bfloat16, torch.float64, torch.float32
        self.parts = nn.ParameterList(nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in types)

    def forward(self, factors: torch.Tensor) -> torch.Tensor:
        return torch.stack([f * p.sum().float() for f, p in zip(factors, self.parts, strict=True)])


@pytest.mark.parametrize("spoilt", range(4))
def test_whatever_types_parameters_have(spoilt: int, in_one_crew: InOneCrew) -> None:
    """What says that a gradient is not finite travels last, so that none is missed."""

    def work(rank: int) -> dict[str, Any]:
        factors = torch.ones(4)
        if rank == 1:
            factors[spoilt] = float("nan")
        texts = []
        for sync in ("ring", "ring+fp16", "ring @ bucket=4B"):
            model = InThreeTypes()
            run = attach(model, torch.optim.SGD(model.parameters(), 0.1), plan=sync)
            loss = model(factors).sum()
            texts.append(raised(loss.backward)["text"])
            run.close()
        return {"texts": texts}

    for result in on_ranks(2, work):
        for text in result["texts"]:
            assert f"the gradient of parts.{spoilt} has inf or nan on rank 1 at step 0" in text


def test_gradients_that_no_backward_computed() -> None:
    """They would not be averaged, and nobody would look whether they are finite."""

    def work(rank: int) -> dict[str, Any]:
        texts = {}
        for sync, factor in (("ring", 1.0), ("local_sgd(every=2)", float("nan"))):
            model = nn.Linear(2, 1)
            sgd = torch.optim.SGD(model.parameters(), 0.1)
            run = attach(model, sgd, plan=sync)
            model(torch.ones(1, 2)).sum().backward()
            sgd.step()
            sgd.step()  # the same once more is the script's business
            gradients = torch.autograd.grad(
                factor * model(torch.ones(1, 2)).sum(), list(model.parameters())
            )
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient
            texts[sync] = raised(sgd.step)["text"]
            run.close()
        return texts

    for result in on_ranks(2, work):
        assert "gradients that no backward has computed" in result["ring"]
        assert "weight, bias have inf or nan on rank" in result["local_sgd(every=2)"]


def test_statistics_that_are_spoilt_end_the_run() -> None:
    """A skipped step leaves them as they are, and averaging would spread them."""

    def work(rank: int) -> dict[str, Any]:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        sgd = torch.optim.SGD(model.parameters(), 0.1)
        run = attach(model, sgd, plan="local_sgd(every=1)", nonfinite="skip", timeout=TIMEOUT)
        x = torch.ones(4, 2) * (float("nan") if rank == 1 else 1.0)
        result = raised(lambda: (model(x).sum().backward(), sgd.step()))
        run.close()
        return result

    assert "1.running_mean has inf or nan on rank 1 at step 0" in on_ranks(2, work)[1]["text"]


class LooksTwice(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        closure()
        return super().step(closure)


@pytest.mark.parametrize("sync", ["ring", "local_sgd(every=1)"])
def test_a_closure_that_looks_twice_counts_one_step(sync: str, in_one_crew: InOneCrew) -> None:
    def work(rank: int) -> dict[str, Any]:
        model = net()
        sgd = LooksTwice(model.parameters(), 0.1)
        run = attach(model, sgd, plan=sync, nonfinite="skip", timeout=TIMEOUT)
        for step in range(3):
            looks = 0

            def look(step: int = step) -> torch.Tensor:
                nonlocal looks
                sgd.zero_grad()
                loss: torch.Tensor = model(torch.ones(2, 40)).square().mean()
                bad = step == 1 and looks == 0 and rank == 1
                (float("nan") * loss if bad else loss).backward()  # type: ignore[no-untyped-call]
                looks += 1
                return loss

            sgd.step(look)
        run.close()
        return {"step": run.step, "skipped": len([e for e in run.events if e.kind == "nonfinite"])}

    results = on_ranks(2, work)
    assert one_value(results, "step") == 3
    assert results[1]["skipped"] == 1


def test_a_second_backward_on_the_batch_of_a_skipped_step_is_refused() -> None:
    """As of an optimizer that looks twice (SAM), zeroing gradients in between."""

    def work(rank: int) -> dict[str, Any]:
        model = net()
        sgd = torch.optim.SGD(model.parameters(), 0.05)
        run = attach(
            model,
            sgd,
            plan="local_sgd(every=1)",
            data=data(),
            batch=BATCH,
            nonfinite="skip",
            timeout=TIMEOUT,
        )

        def train() -> None:
            for [x] in run.batches(0):
                for factor in (float("nan") if rank == 1 else 1.0, 1.0):
                    sgd.zero_grad()
                    (factor * run.mean(model(x).square().mean(dim=1))).backward()
                sgd.step()

        return raised(train)

    assert (
        "a second backward in one step followed one whose gradients" in on_ranks(2, work)[1]["text"]
    )


def test_a_skipped_step_leaves_no_trace() -> None:
    """Not in a compressor's residuals either, nor if it is one of several that are accumulated."""
    plans = ("ring", "ring+powersgd", "ring+topk", "ring+int8")
    cases = [(sync, parts) for sync in plans for parts in (1, 2)]

    def end(sync: str, parts: int, *, with_bad: bool, rank: int) -> str:
        model = net()
        adam = torch.optim.AdamW(model.parameters(), 0.01)
        run = attach(model, adam, plan=sync, timeout=TIMEOUT, nonfinite="skip")
        for number in (0, 1, -1, 2, 3) if with_bad else (0, 1, 2, 3):
            adam.zero_grad()
            for part in range(parts):
                generator = torch.Generator().manual_seed(100 * number + 10 * part + rank + 1000)
                loss = model(torch.randn(8, 40, generator=generator)).square().mean()
                if number < 0 and part == 0 and rank == 1:
                    loss = loss * float("inf")
                with run.no_sync() if part < parts - 1 else nullcontext():
                    loss.backward()
            adam.step()
        assert run.step == (5 if with_bad else 4)
        run.close()
        return fingerprint(model)

    def work(rank: int) -> dict[str, Any]:
        return {
            f"{sync} {parts}": [end(sync, parts, with_bad=w, rank=rank) for w in (True, False)]
            for sync, parts in cases
        }

    for result in on_ranks(2, work):
        assert [case for case, prints in result.items() if len(set(prints)) > 1] == []


def test_a_backward_on_top_of_a_skipped_one_is_refused_where_only_this_rank_skips() -> None:
    """Accumulated outside of no_sync: which backward is the last of a step isn't known."""

    def work(rank: int) -> dict[str, Any]:
        model = nn.Linear(4, 1)
        sgd = torch.optim.SGD(model.parameters(), 0.1)
        attach(model, sgd, plan="dssync", timeout=TIMEOUT, nonfinite="skip")

        def steps() -> None:
            for number in range(2):
                sgd.zero_grad()
                for part in range(3):
                    bad = rank == 1 and number == 1 and part == 0
                    (model(torch.ones(2, 4)).mean() * (float("nan") if bad else 1.0)).backward()
                sgd.step()

        return raised(steps)

    results = on_ranks(2, work)
    assert "accumulate inside run.no_sync()" in results[1]["text"]


def test_so_is_one_that_leaves_them_alone() -> None:
    """An actor and a critic, each with a loss of its own."""

    def work(rank: int) -> dict[str, Any]:
        actor, critic = nn.Linear(4, 1), nn.Linear(4, 1)
        both = nn.ModuleList([actor, critic])
        sgd = torch.optim.SGD(both.parameters(), 0.1)
        attach(both, sgd, plan="dssync", timeout=TIMEOUT, nonfinite="skip")

        def steps() -> None:
            for number in range(2):
                sgd.zero_grad()
                bad = rank == number == 1
                (actor(torch.ones(2, 4)).mean() * (float("nan") if bad else 1.0)).backward()
                critic(torch.ones(2, 4)).mean().backward()
                sgd.step()

        return raised(steps)

    results = on_ranks(2, work)
    assert "accumulate inside run.no_sync()" in results[1]["text"]


@pytest.mark.parametrize("sync", ["ring", "ddp"])
def test_a_ddp_object_accumulates_by_its_own_no_sync(sync: str, in_one_crew: InOneCrew) -> None:
    def work(rank: int, sync: str) -> dict[str, Any]:
        World.join(20.0).join_process_group()
        model = DistributedDataParallel(net())
        sgd = torch.optim.SGD(model.parameters(), 0.1)
        run = attach(model, sgd, plan=sync, timeout=TIMEOUT, nonfinite="skip")
        for number in range(3):
            sgd.zero_grad()
            bad = float("inf") if rank == number == 1 else 1.0
            with model.no_sync():
                (model(torch.ones(2, 40)).mean() * bad).backward()
            model(torch.ones(2, 40)).mean().backward()
            sgd.step()
        run.close()
        finite = all(bool(p.isfinite().all()) for p in model.parameters())
        return {"print": fingerprint(model), "finite": finite, "step": run.step}

    results = in_one_crew(2, work)
    assert same_bits(results)
    assert one_value(results, "finite")
    assert one_value(results, "step") == 3


def test_a_closure_is_skipped_too() -> None:
    def work(rank: int) -> dict[str, Any]:
        model = net()
        sgd = torch.optim.SGD(model.parameters(), 0.1)
        run = attach(model, sgd, plan="ring", timeout=TIMEOUT, nonfinite="skip")
        for number in range(3):

            def closure(number: int = number) -> torch.Tensor:
                sgd.zero_grad()
                loss = model(torch.ones(2, 40)).mean()
                (loss * (float("nan") if rank == number == 1 else 1.0)).backward()
                return loss

            sgd.step(closure)
        run.close()
        finite = all(bool(p.isfinite().all()) for p in model.parameters())
        return {"print": fingerprint(model), "finite": finite, "step": run.step}

    results = on_ranks(2, work)
    assert same_bits(results)
    assert one_value(results, "finite")
    assert one_value(results, "step") == 3


def test_a_ddp_object() -> None:
    """Left to torch, whose gradients it were can't be known; by our rounds they are named."""

    def work(rank: int) -> dict[str, Any]:
        World.join(20.0).join_process_group()
        found = {}
        for sync in ("ring", "ring+int8", "ddp"):
            model = DistributedDataParallel(net())
            sgd = torch.optim.SGD(model.parameters(), 0.1)
            attach(model, sgd, plan=sync, timeout=TIMEOUT)
            bad = float("nan") if rank == 1 else 1.0

            def steps(model: nn.Module = model, bad: float = bad) -> None:
                for _ in range(2):  # under a compressor the others learn of it in the next
                    (model(torch.ones(2, 40)).mean() * bad).backward()

            found[sync] = raised(steps)["text"]
        return found

    for result in on_ranks(2, work):
        assert "on rank 1 at step 0" in result["ring"]
        assert "on rank 1 at step 0" in result["ring+int8"]
        assert "on a rank that is not known at step 0" in result["ddp"]


def test_what_overflows_half_precision_is_skipped() -> None:
    """A finite gradient that fp16 has no number for: for a GradScaler that is no error."""

    def work(rank: int) -> dict[str, Any]:
        model = nn.Linear(4, 4)
        sgd = torch.optim.SGD(model.parameters(), 0.1)
        run = attach(model, sgd, plan="ring+fp16", timeout=TIMEOUT, nonfinite="skip")
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
        for _ in range(8):
            sgd.zero_grad()
            scaler.scale(model(torch.ones(2, 4)).sum()).backward()
            scaler.step(sgd)
            scaler.update()
        run.close()
        return {
            "print": fingerprint(model),
            "scale": scaler.get_scale(),
            "skipped": len([e for e in run.events if e.kind == "nonfinite"]),
            "step": run.step,
        }

    results = on_ranks(2, work)
    assert same_bits(results)
    assert one_value(results, "step") == 8
    skipped = one_value(results, "skipped")
    assert one_value(results, "scale") == 2.0 ** (20 - skipped)
    assert 2.0 ** (20 - skipped) * 2 <= 65504 < 2.0 ** (21 - skipped) * 2


def test_choices_are_checked() -> None:
    model = nn.Linear(2, 1)
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(UsageError, match='use "raise" or "skip"'):
        attach(model, sgd, plan="ring", nonfinite="warn")
    of_bias = torch.optim.SGD([model.bias], 0.1)
    with pytest.raises(UsageError, match="can't keep another optimizer from stepping weight"):
        attach(model, of_bias, plan="ring", nonfinite="skip")

    def work(rank: int) -> dict[str, Any]:
        choice = "skip" if rank else "raise"
        return raised(lambda: attach(model, sgd, plan="ring", timeout=TIMEOUT, nonfinite=choice))

    for result in on_ranks(2, work):
        assert "nonfinite is 'skip', on rank 0 'raise'" in result["text"]


def test_a_sum_that_overflows_is_no_finding() -> None:
    large = torch.full((8,), 3e38)
    assert not is_finite(large)
    assert not_finite({"large": large, "empty": torch.empty(0)}) == []
    assert not_finite({"large": large}, largest=1e38) == ["large"]
    for bad in (float("nan"), float("inf"), -float("inf")):
        with_bad = large.clone()
        with_bad[3] = bad
        assert not_finite({"good": large, "bad": with_bad}) == ["bad"]
        assert not is_finite(with_bad, largest=3.1e38)
    assert is_finite(torch.full((100,), 6e4, dtype=torch.float16))
