"""Parameter plans: every replica goes its own way, and their mean is that of all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.training.conftest import InOneCrew
from tests.training.workers import TIMEOUT, apart, fingerprint, on_ranks, one_value, same_bits
from thalweg.errors import Mismatch
from thalweg.facts import Cluster, parse_cluster
from thalweg.training import Run, attach

SIZE = 4
MIXING = [
    "local_sgd(every=1)",
    "local_sgd(every=3)",
    "local_sgd(every=2, delay=1)",
    "local_sgd(every=1, delay=1)",
    "local_sgd(every=1, levels=rack)",
    "local_sgd(every=1, levels=rack, delay=1)",
    "local_sgd(every=2, levels=rack, delay=1)",
    "dssync",
    "dssync(delay=1)",
    "gossip",
    "gossip(graph=exponential)",
]


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    optimizer.zero_grad()
    model(torch.randn(4, 3, generator=generator, dtype=torch.float64)).square().mean().backward()
    optimizer.step()


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize("optimizer", ["plain", "rare"])
def test_averaging_every_step_is_averaging_gradients(
    optimizer: str, in_one_crew: InOneCrew
) -> None:
    """For plain SGD: the mean of x - lr g is the mean of x, less lr times the mean of g."""

    def trained(rank: int, optimizer: str, sync: str) -> nn.Module:
        model = small()
        sgd = torch.optim.SGD(model.parameters(), 0.2, weight_decay=0.1 * (optimizer == "rare"))
        run = attach(model, sgd, plan=sync, timeout=TIMEOUT)
        for number in range(5):
            step(model, sgd, 10 * number + rank)
        run.close()
        return model

    def work(rank: int, optimizer: str) -> dict[str, Any]:
        parameters = trained(rank, optimizer, "local_sgd(every=1)")
        return {
            "apart": apart(parameters, trained(rank, optimizer, "ring")),
            "print": fingerprint(parameters),
        }

    results = in_one_crew(3, work)
    assert same_bits(results)
    assert max(result["apart"] for result in results) < 1e-12


SLOW_HOST = Cluster.regular([4], nic=["10mbit", "100mbit", "100mbit", "100mbit"])
SLOW_RACK = Cluster.regular([2, 2], nic="100mbit", uplink=["10mbit", "100mbit"])


@pytest.mark.parametrize(
    ("sync", "cluster"),
    [
        *((sync, Cluster.regular([4])) for sync in MIXING),
        *((sync, Cluster.regular([2, 2])) for sync in MIXING),
        *((sync, Cluster.regular([3, 1])) for sync in MIXING if "rack" in sync or "ds" in sync),
        *((sync, cluster) for sync in MIXING if "ds" in sync for cluster in (SLOW_HOST, SLOW_RACK)),
    ],
)
def test_the_mean_is_kept(sync: str, cluster: Cluster, in_one_crew: InOneCrew) -> None:
    """Averaging adds nothing to the mean: it moves as the replicas' own steps move it."""

    def work(rank: int, sync: str, cluster: Cluster) -> dict[str, Any]:
        model = small()
        sgd = torch.optim.SGD(model.parameters(), 0.2)
        run = attach(model, sgd, plan=sync, cluster=cluster, timeout=TIMEOUT)
        start = flat(model)
        moved = torch.zeros_like(start)
        for number in range(24 if cluster in (SLOW_HOST, SLOW_RACK) else 6):
            before = flat(model)
            step(model, sgd, 10 * number + rank)
            gradient = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
            moved -= 0.2 * gradient
            assert number or not torch.equal(flat(model), before)
        run.close()  # what was on its way is applied
        return {"end": flat(model).tolist(), "own way": (start + moved).tolist()}

    results = in_one_crew(SIZE, work)
    ends = torch.tensor([result["end"] for result in results], dtype=torch.float64)
    ways = torch.tensor([result["own way"] for result in results], dtype=torch.float64)
    torch.testing.assert_close(ends.mean(0), ways.mean(0), rtol=0, atol=1e-14)
    spread = float((ends - ends.mean(0)).abs().max())
    assert spread < float((ways - ways.mean(0)).abs().max())


def test_a_result_that_is_one_step_late_keeps_the_step_in_between() -> None:
    def work(rank: int) -> dict[str, Any]:
        model = nn.Linear(1, 1, bias=False)
        sgd = torch.optim.SGD(model.parameters(), 1.0)
        run = attach(model, sgd, plan="local_sgd(every=1, delay=1)", timeout=TIMEOUT)
        nn.init.zeros_(model.weight)
        seen = []
        for _ in range(3):
            sgd.zero_grad()
            (-model.weight * (rank + 1)).sum().backward()  # one to rank 0, two to rank 1
            sgd.step()
            seen.append(model.weight.item())
        run.close()
        return {"seen": [*seen, model.weight.item()]}

    zero, one = (result["seen"] for result in on_ranks(2, work))
    # After a step of 1 and 2 the mean is 1.5: +0.5 and -0.5, one step late.
    assert zero == [1.0, 2.5, 4.0, 4.5]
    assert one == [2.0, 3.5, 5.0, 4.5]


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.layer = nn.Linear(3, 2)
        self.frozen = nn.Parameter(torch.arange(4, dtype=torch.int8), requires_grad=False)
        self.register_buffer("table", torch.rand(50).bfloat16())  # the same on all ranks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(self.norm(x))
        return out


def differing(rank: int, sync: str) -> tuple[Normed, Run]:
    """Replicas and statistics that differ."""
    torch.manual_seed(0)
    model = Normed()
    sgd = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.2)
    run = attach(model, sgd, plan=sync, timeout=TIMEOUT)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        sgd.zero_grad()
        model(torch.randn(8, 3, generator=generator) + rank).square().mean().backward()
        sgd.step()
    return model, run


@pytest.mark.parametrize("sync", ["local_sgd(every=9)", "gossip", "ring", "ddp"])
def test_consensus(sync: str, in_one_crew: InOneCrew) -> None:
    def work(rank: int, sync: str) -> dict[str, Any]:
        model, run = differing(rank, sync)
        before = fingerprint(model.layer)
        weight = model.layer.weight.detach().reshape(-1).tolist()
        mean = model.norm.running_mean.tolist()
        table = model.table.clone()
        with run.consensus():
            inside = {
                "inside": fingerprint(model),
                "weight inside": model.layer.weight.detach().reshape(-1).tolist(),
                "mean inside": model.norm.running_mean.tolist(),
            }
        after = fingerprint(model.layer)
        stays = model.norm.running_mean.tolist() == inside["mean inside"]
        kept = torch.equal(model.table, table) and stays
        run.close()
        return inside | {
            "print": before,
            "restored": before == after,
            "weight": weight,
            "mean": mean,
            "kept": kept,
        }

    results = in_one_crew(3, work)
    assert same_bits(results, "inside")
    assert same_bits(results) == (sync in ("ring", "ddp"))
    assert one_value(results, "restored") is True
    assert one_value(results, "kept") is True
    for name in ("weight", "mean"):
        together = torch.tensor([result[name] for result in results])
        inside = torch.tensor(results[0][f"{name} inside"])
        torch.testing.assert_close(inside, together.mean(0))


def test_consensus_ends_well_when_what_is_in_it_does_not() -> None:
    class Oops(Exception):
        pass

    def evaluate(run: Run) -> None:
        with run.consensus():
            raise Oops

    def work(rank: int) -> dict[str, Any]:
        model, run = differing(rank, "local_sgd(every=9)")
        before = fingerprint(model.layer)
        with pytest.raises(Oops):
            evaluate(run)
        run.close()
        return {"restored": fingerprint(model.layer) == before}

    assert one_value(on_ranks(3, work), "restored") is True


def test_the_bits_of_an_average() -> None:
    """After every rank has met every other, replicas are equal bit for bit."""

    def work(rank: int) -> dict[str, Any]:
        model = small()
        adam = torch.optim.AdamW(model.parameters(), 0.05)
        run = attach(model, adam, plan="local_sgd(every=3)", timeout=TIMEOUT)
        prints = []
        for number in range(6):
            step(model, adam, 10 * number + rank)
            prints.append(fingerprint(model))
        run.close()
        return {"prints": prints}

    prints = [result["prints"] for result in on_ranks(3, work)]
    assert [len(set(at_step)) for at_step in zip(*prints, strict=True)] == [3, 3, 1, 3, 3, 1]


@pytest.mark.parametrize("sync", ["dssync", "local_sgd(every=1, levels=rack, delay=1)"])
def test_statistics_are_averaged_with_the_parameters(sync: str, in_one_crew: InOneCrew) -> None:
    """In a group of all: batch norm's, but no other buffer."""

    def work(rank: int, sync: str) -> dict[str, Any]:
        torch.manual_seed(0)
        model = Normed()
        sgd = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
        run = attach(model, sgd, plan=sync, timeout=TIMEOUT)
        model.table.fill_(rank)
        model(torch.full((4, 3), float(rank))).sum().backward()
        sgd.step()
        run.close()
        return {"mean": model.norm.running_mean.tolist(), "table": model.table[0].item()}

    for rank, result in enumerate(in_one_crew(3, work)):
        assert result["mean"] == pytest.approx([0.1 * 1.0] * 3)  # of 0, 1 and 2; momentum 0.1
        assert result["table"] == rank


@pytest.mark.parametrize(("optimizer", "equal"), [("local", False), ("averaged", True)])
def test_the_optimizers_state_is_averaged_if_asked(
    optimizer: str, equal: bool, in_one_crew: InOneCrew
) -> None:
    def work(rank: int, optimizer: str) -> dict[str, Any]:
        model = small()
        adam = torch.optim.Adam(model.parameters(), 0.01)
        run = attach(model, adam, plan=f"dssync(optimizer={optimizer})", timeout=TIMEOUT)
        for number in range(3):
            step(model, adam, 10 * number + rank)
        run.close()
        first = next(iter(model.parameters()))
        return {"print": fingerprint(model), "slot": adam.state[first]["exp_avg"].tolist()}

    results = in_one_crew(3, work)  # one group of all: what is averaged is equal
    assert same_bits(results)
    assert all(result["slot"] == results[0]["slot"] for result in results) == equal


def test_who_expects_other_groups_is_told() -> None:
    def work(rank: int) -> dict[str, Any]:
        model = small()
        sgd = torch.optim.SGD(model.parameters(), 0.1)
        cluster = SLOW_RACK if rank else Cluster.regular([2, 2])
        with pytest.raises(Mismatch, match="kept apart") as error:
            attach(model, sgd, plan="dssync", cluster=cluster, timeout=TIMEOUT)
        return {"said": str(error.value)}

    assert "rack0" in on_ranks(4, work)[0]["said"]


def test_who_has_other_names_for_the_hosts_is_told() -> None:
    """An adjustment names hosts: all must know them."""

    def work(rank: int) -> dict[str, Any]:
        model = small()
        sgd = torch.optim.SGD(model.parameters(), 0.1)
        names = ", ".join(f'"{"ab"[rank]}{number}"' for number in range(2))
        cluster = parse_cluster(f'[[rack]]\nname = "r"\nhosts = [{names}]')
        with pytest.raises(Mismatch, match="cluster"):
            attach(model, sgd, plan="dssync", cluster=cluster, timeout=TIMEOUT)
        return {}

    on_ranks(2, work)


def test_a_checkpoint_has_the_mean_of_all_optimizers(tmp_path: Path) -> None:
    def momentum(sgd: torch.optim.Optimizer) -> list[float]:
        slots = [state["momentum_buffer"] for state in sgd.state.values()]
        return torch.cat([slot.reshape(-1) for slot in slots]).tolist()

    def work(rank: int) -> dict[str, Any]:
        model = small()
        sgd = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        run = attach(model, sgd, plan="local_sgd(every=9)", timeout=TIMEOUT)
        step(model, sgd, rank)
        own = momentum(sgd)
        run.save(tmp_path)
        after = momentum(sgd)
        run.close()
        run = attach(model, sgd, plan="local_sgd(every=9)", resume=tmp_path, timeout=TIMEOUT)
        run.close()
        return {"own": own, "kept": own == after, "resumed": momentum(sgd)}

    results = on_ranks(2, work)
    mean = torch.tensor([result["own"] for result in results]).mean(0)
    assert results[0]["own"] != results[1]["own"]
    for result in results:
        assert result["kept"]
        torch.testing.assert_close(torch.tensor(result["resumed"]), mean)


def test_a_variance_stays_one_when_an_average_comes_late() -> None:
    def work(rank: int) -> dict[str, Any]:
        model = nn.BatchNorm1d(1, momentum=0.9)
        sgd = torch.optim.SGD(model.parameters(), 0.0)
        run = attach(model, sgd, plan="local_sgd(every=1, delay=1)", timeout=TIMEOUT)
        spread = 10.0 if rank else 1.0
        for number in range(4):
            model(torch.tensor([[-spread], [spread]]) / 100**number).sum().backward()
            sgd.step()
        variance = model.running_var.item()
        run.close()
        return {"variance": variance}

    assert all(result["variance"] >= 0 for result in on_ranks(2, work))


def racks_of_three() -> Cluster:
    return parse_cluster(
        "".join(f"[[rack]]\nname = '{r}'\nhosts = ['{r}0', '{r}1', '{r}2']\n" for r in "ab")
    )


def test_equal_replicas_of_two_bytes_stay_equal_to_the_bit() -> None:
    """A mean of six that was rounded to their own type at each hop would move every other value."""
    plans = [*MIXING, "local_sgd(every=1, optimizer=averaged)"]

    def kept(sync: str, dtype: torch.dtype) -> bool:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(40, 40), nn.BatchNorm1d(40)).to(dtype)
        adam = torch.optim.Adam(model.parameters(), 0.0, eps=1e-3)
        run = attach(model, adam, plan=sync, timeout=TIMEOUT, cluster=racks_of_three())
        before = fingerprint(model[0])
        generator = torch.Generator().manual_seed(1)
        for _ in range(4):
            adam.zero_grad()
            x = torch.randn(8, 40, generator=generator).to(dtype)
            model(x).float().square().mean().backward()
            adam.step()
        with run.consensus():
            same = fingerprint(model[0]) == before
        given = [torch.randn(1000, generator=generator).to(dtype) for _ in range(2)]
        means = [tensor.clone() for tensor in given]
        run.all_reduce_mean(means)
        same = same and all(map(torch.equal, given, means))
        run.close()
        return same and fingerprint(model[0]) == before and model[1].num_batches_tracked == 4

    def work(rank: int) -> dict[str, Any]:
        types = [torch.bfloat16, torch.float16]
        return {f"{sync}, {t}": bool(kept(sync, t)) for sync in plans for t in types}

    for result in on_ranks(6, work):
        assert [case for case, same in result.items() if not same] == []


class Replacing(torch.optim.SGD):
    """Gives parameters and momenta new memory at every step, as hand-written optimizers do."""

    replaces = True

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for parameter in self.param_groups[0]["params"] if self.replaces else ():
            parameter.data = parameter.data.clone()
            state = self.state[parameter]
            if state.get("momentum_buffer") is not None:
                state["momentum_buffer"] = state["momentum_buffer"].clone()


def test_parameters_whose_memory_is_replaced() -> None:
    def work(rank: int) -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = Replacing(model.parameters(), 0.05)
        run = attach(model, optimizer, plan="local_sgd(every=2)", timeout=TIMEOUT)
        for _ in range(4):
            optimizer.zero_grad()
            (model(torch.ones(2, 4)) - rank).square().mean().backward()
            optimizer.step()
        run.close()
        return {"print": fingerprint(model)}

    assert same_bits(on_ranks(2, work))


@pytest.mark.parametrize("late", ["skipped", "unused", "replaced"])
@pytest.mark.parametrize("sync", ["local_sgd(every=1, {})", "local_sgd(levels=rack, delay=1, {})"])
def test_state_that_comes_later_is_averaged_too(sync: str, late: str) -> None:
    """All ranks skip the first step, or don't use a layer in it, or momenta move."""

    def work(rank: int) -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        sgd = Replacing(model.parameters(), 0.05, momentum=0.9)
        run = attach(
            model,
            sgd,
            plan=sync.format("optimizer=averaged"),
            nonfinite="skip",
            timeout=TIMEOUT,
            cluster=racks_of_three() if "rack" in sync else None,
        )
        for step in range(40):
            sgd.zero_grad()
            sgd.replaces = late == "replaced" and step < 2
            x = torch.ones(2, 4) * (float("nan") if step == 0 and late == "skipped" else 1.0)
            parts = model[:1] if step == 0 and late == "unused" else model
            ((parts(x) - rank).square().mean() * (0 if step == 39 else 1)).backward()
            sgd.step()
        momenta = [sgd.state[p]["momentum_buffer"] for p in model.parameters()]
        run.close()
        return {"momenta": torch.cat([m.flatten() for m in momenta]).tolist()}

    first, *others = [
        torch.tensor(r["momenta"]) for r in on_ranks(6 if "rack" in sync else 2, work)
    ]
    for other in others:
        assert torch.allclose(first, other, atol=1e-3 if "rack" in sync else 1e-7)
