"""What is proposed on one rank happens on all, at the same step."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
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
from thalweg.training import Run, attach

SIZE = 3
DATA = TensorDataset(torch.randn(60, 4, generator=torch.Generator().manual_seed(1)))


def trained(
    rank: int,
    sync: str,
    act: Callable[[int, Run], None] = lambda rank, run: None,
    *,
    adam: bool = False,
    epochs: int = 3,
    batch: int = 6,
) -> dict[str, Any]:
    """Ten steps an epoch, `act` after each."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(6) if batch == 6 else nn.LayerNorm(6)
    model = nn.Sequential(nn.Linear(4, 6), norm, nn.Tanh(), nn.Linear(6, 1))
    make = torch.optim.Adam if adam else torch.optim.SGD
    optimizer = make(model.parameters(), 0.01)
    run = attach(model, optimizer, plan=sync, data=DATA, batch=batch, timeout=TIMEOUT)
    plans, prints = [], []
    for epoch in run.epochs(epochs):
        for (x,) in run.batches(epoch):
            plans.append(str(run.plan))
            optimizer.zero_grad()
            run.mean(model(x).square().sum(1)).backward()
            optimizer.step()
            prints.append(fingerprint(nn.ParameterList(model.parameters())))
            act(rank, run)
    stopped, steps = run.should_stop, run.step
    slots = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    run.close()
    return {
        "plans": plans,
        "prints": prints,
        "print": prints[-1],
        "values": values(model),
        "slots": [float(x) for slot in slots for x in slot.reshape(-1)],
        "stopped": stopped,
        "steps": steps,
    }


@cache
def unchanged(rank: int, sync: str = "ring", **options: Any) -> dict[str, Any]:
    """The training in which nothing is proposed, once in a process."""
    return trained(rank, sync, **options)


def proposes(who: int, at: int, sync: str) -> Callable[[int, Run], None]:
    def act(rank: int, run: Run) -> None:
        if rank == who and run.step == at:
            run.switch(sync)

    return act


@pytest.mark.parametrize("other", ["tree", "ring @ bucket=100B", "ddp", "star(root=2)"])
def test_from_one_exact_plan_to_another(other: str, in_one_crew: InOneCrew) -> None:
    def work(rank: int, other: str) -> dict[str, Any]:
        changed = trained(rank, "ring", proposes(1, 5, other))
        return changed | {"unchanged": unchanged(rank)["values"]}

    changed = in_one_crew(SIZE, work)
    plans = one_value(changed, "plans")
    assert set(plans) == {"ring", other}
    assert plans == sorted(plans, key=lambda plan: plan == other)
    assert plans.index(other) in (8, 16, 24)  # safe points
    assert one_value(changed, "prints")
    assert changed[0]["values"] == pytest.approx(changed[0]["unchanged"], abs=1e-6)


@pytest.mark.parametrize("sync", ["ring", "ring+topk(ratio=0.5, warmup=0)", "local_sgd(every=1)"])
def test_a_part_that_is_frozen_while_the_plan_changes(sync: str, in_one_crew: InOneCrew) -> None:
    """As the two parts of a GAN are by turns: it is averaged again when it is trained again."""

    def work(rank: int, sync: str) -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        run = attach(model, optimizer, plan=sync, timeout=TIMEOUT)
        plans = []
        for step in range(20):
            model[2].requires_grad_(not 4 <= step < 16)
            if step == 4:
                run.switch("tree")
            torch.manual_seed(100 * step + rank)
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            plans.append(str(run.plan))
        result = {"plan": plans[15], "prints": fingerprint(model)}
        run.close()
        return result

    results = in_one_crew(SIZE, work)
    assert one_value(results, "plan") == "tree"  # the plan had changed before the part was trained
    assert one_value(results, "prints")


def test_a_model_that_is_frozen_for_a_forward() -> None:
    """As a discriminator is while the generator trains through it."""

    def work(rank: int) -> dict[str, Any]:
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with attach(model, optimizer, timeout=TIMEOUT) as run:
            for step in range(12):
                torch.manual_seed(100 * step + rank)
                model.requires_grad_(False)
                model(torch.randn(3, 4))
                model.requires_grad_(True)
                optimizer.zero_grad()
                model(torch.randn(3, 4)).square().mean().backward()
                optimizer.step()
            return {"prints": fingerprint(model), "steps": run.step}

    results = on_ranks(2, work)
    assert one_value(results, "prints")
    assert one_value(results, "steps") == 12


def test_ddp_takes_over_no_part_that_is_frozen() -> None:
    def work() -> None:
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with attach(model, optimizer, plan="ring", timeout=TIMEOUT) as run:
            model[1].requires_grad_(False)
            run.switch("ddp")
            for _ in range(20):
                model(torch.randn(8, 4)).square().mean().backward()
                optimizer.step()

    for result in on_ranks(2, lambda rank: raised(work)):
        assert "ddp averages what is trained when it begins, and 1.weight" in result["text"]


def test_and_away_from_ddp() -> None:
    def work(rank: int) -> dict[str, Any]:
        changed = trained(rank, "ddp", proposes(2, 3, "ring"))
        return changed | {"unchanged": unchanged(rank, "ddp")["values"]}

    changed = on_ranks(SIZE, work)
    assert one_value(changed, "plans")[-1] == "ring"
    assert one_value(changed, "prints")
    assert changed[0]["values"] == pytest.approx(changed[0]["unchanged"], abs=1e-6)


@pytest.mark.parametrize("sync", ["local_sgd(every=3)", "local_sgd(every=2, delay=1)", "gossip"])
def test_leaving_a_plan_of_differing_replicas_averages_once(
    sync: str, in_one_crew: InOneCrew
) -> None:
    """Parameters, statistics and what the optimizer keeps."""
    act = proposes(0, 5, "ring")
    results = in_one_crew(SIZE, lambda rank, sync: trained(rank, sync, act, adam=True))
    plans = one_value(results, "plans")
    switched = plans.index("ring")
    for number, prints in enumerate(zip(*(r["prints"] for r in results), strict=True)):
        if number >= switched:
            assert len(set(prints)) == 1
    assert len({r["prints"][switched - 1] for r in results}) == SIZE
    assert one_value(results, "slots")


def test_into_a_plan_of_differing_replicas() -> None:
    results = on_ranks(SIZE, lambda rank: trained(rank, "ring", proposes(0, 5, "gossip")))
    assert one_value(results, "plans")[-1] == "gossip"
    assert not same_bits(results)


def test_into_a_code_and_out_again() -> None:
    """Shares and weights of the samples change with the plan, in mid-epoch."""

    def act(rank: int, run: Run) -> None:
        if rank == 0 and run.step in (1, 17):
            run.switch("gc(stragglers=1)" if run.step == 1 else "ring")

    def work(rank: int) -> dict[str, Any]:
        changed = trained(rank, "ring", act, batch=7, epochs=5)
        return changed | {"unchanged": unchanged(rank, batch=7, epochs=5)["values"]}

    changed = on_ranks(4, work)
    plans = one_value(changed, "plans")
    assert plans[16] == "gc(stragglers=1)"
    assert plans[-1] == "ring"
    assert one_value(changed, "prints")
    assert changed[0]["values"] == pytest.approx(changed[0]["unchanged"], abs=1e-6)


def test_a_parameter_that_one_rank_never_used() -> None:
    """Its momentum exists on one rank only; after the change it is everybody's mean."""

    def work(rank: int) -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
        sgd = torch.optim.SGD(model.parameters(), 0.1, momentum=0.5)
        run = attach(model, sgd, plan="local_sgd(every=3)", timeout=TIMEOUT)
        x = torch.ones(1, 2)
        while run.step < 30:
            run.safe_point()
            if str(run.plan) == "ring":
                break
            if rank == 1 and run.step == 2:
                run.switch("ring")
            sgd.zero_grad()
            used = model[0](x) + model[1](x) if rank == 0 else model[0](x)
            used.sum().backward()
            sgd.step()
        momenta = [sgd.state[p]["momentum_buffer"].tolist() for p in model.parameters()]
        run.close()
        return {"print": fingerprint(model), "momenta": momenta}

    results = on_ranks(2, work)
    assert same_bits(results)
    first, second = one_value(results, "momenta")
    assert second == [[x / 2 for x in row] for row in first]


@pytest.mark.parametrize("who", range(SIZE))
def test_stop(who: int, in_one_crew: InOneCrew) -> None:
    def work(rank: int, who: int) -> dict[str, Any]:
        def act(rank: int, run: Run) -> None:
            if rank == who and run.step == 3:
                run.stop()

        return trained(rank, "ring", act)

    results = in_one_crew(SIZE, work)
    assert one_value(results, "stopped") is True
    assert one_value(results, "steps") in (8, 16, 24)
    assert same_bits(results)


@pytest.mark.parametrize(
    ("sync", "said"),
    [
        ("rinf", "there is no plan 'rinf'"),
        ("gossip+int8", "gossip+int8 is unsound: gossip adds neighbours' payloads, and"),
        ("auto", "auto has no rounds before it has chosen"),
        ("star(root=7)", "root 7 is not in the group"),
        ("ring @ transport=c10d", "the transport c10d was retired, because it was slower than tcp"),
    ],
)
def test_what_cannot_be_proposed(sync: str, said: str, in_one_crew: InOneCrew) -> None:
    """Refused where it is proposed; the run goes on."""

    def work(rank: int, sync: str) -> dict[str, Any]:
        refusals: list[str] = []

        def act(rank: int, run: Run) -> None:
            if rank == 1 and run.step == 2:
                refusals.append(raised(lambda: run.switch(sync))["text"])

        return trained(rank, "ring", act, epochs=1) | {"refusals": refusals}

    results = in_one_crew(2, work)
    assert results[1]["refusals"][0].startswith(said)
    assert one_value(results, "plans") == ["ring"] * 10


def test_a_code_without_data() -> None:
    def work(rank: int) -> dict[str, Any]:
        model = nn.Linear(2, 1)
        sgd = torch.optim.SGD(model.parameters(), 0.1)
        run = attach(model, sgd, plan="ring", timeout=TIMEOUT)
        refused = raised(lambda: run.switch("gc(stragglers=1)"))
        run.close()
        return refused

    results = on_ranks(2, work)
    assert one_value(results, "kind") == "PlanError"
    assert "give data= and batch= to attach()" in results[0]["text"]


def with_own_loader(
    rank: int, sync: str, other: str, then: str = "", compiled: str = "", forwards: int = 1
) -> dict[str, Any]:
    """Sixty steps, to the `other` plan and from there to a third."""
    torch.manual_seed(0)
    torch.compiler.reset()  # type: ignore[no-untyped-call]
    model: nn.Module = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    if compiled == "before":
        model = torch.compile(model, backend="eager")  # type: ignore[assignment]
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    run = attach(model, optimizer, plan=sync, timeout=TIMEOUT)
    call: Callable[..., torch.Tensor] = model
    if compiled == "after":
        call = torch.compile(model, backend="eager")
    draw = torch.Generator().manual_seed(rank)
    plans, prints = [], []
    ahead = [plan for plan in (other, then) if plan]
    for _ in range(60):
        optimizer.zero_grad()
        outputs = [call(torch.randn(3, 4, generator=draw)) for _ in range(forwards)]
        torch.cat(outputs).square().mean().backward()
        optimizer.step()
        plans.append(str(run.plan))
        prints.append(fingerprint(model))
        if rank == 1 and ahead and (run.step == 2 or str(run.plan) == other):
            run.switch(ahead.pop(0))
    run.close()
    return {"plans": plans, "prints": prints, "values": values(model)}


def test_to_ddp_and_away_with_ones_own_loader() -> None:
    """There the change comes inside the model's forward: the first step of it is averaged too,
    and the training is the same as without a change."""
    cases: list[dict[str, Any]] = [
        {"sync": "ring", "other": "ddp", "then": "ddp @ bucket=100B"},
        {"sync": "ddp", "other": "tree", "then": "ddp"},
        {"sync": "ring", "other": "ddp", "then": "ring", "compiled": "before"},
        {"sync": "ring", "other": "ddp", "then": "ring", "compiled": "after"},
        {"sync": "ring", "other": ""},
        {"sync": "ring", "other": "ddp", "forwards": 2},
        {"sync": "ring", "other": "", "forwards": 2},
    ]
    ended = on_ranks(
        2, lambda rank: {str(n): with_own_loader(rank, **c) for n, c in enumerate(cases)}
    )
    results = [[one[str(number)] for one in ended] for number in range(len(cases))]
    for case, ranks in zip(cases, results, strict=True):
        wanted = [case["sync"], case["other"], case.get("then", "")]
        assert list(dict.fromkeys(one_value(ranks, "plans"))) == list(
            dict.fromkeys(filter(None, wanted))
        )
        assert one_value(ranks, "prints")
    for several, calm in ((results[:4], results[4]), (results[5:6], results[6])):
        for ranks in several:
            assert ranks[0]["values"] == pytest.approx(calm[0]["values"], abs=1e-6)
