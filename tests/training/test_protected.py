"""All ranks are protected in the same way, or say before the first step who isn't."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from tests.training.conftest import InOneCrew
from tests.training.workers import TIMEOUT, listen, on_ranks, one_value, raised
from thalweg.members.membership_epoch import MembershipEpoch
from thalweg.training import Run, attach


def attached(sync: str = "ring") -> list[str]:
    """What is logged meanwhile."""
    heard: list[str] = []
    listen(heard)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run = attach(model, optimizer, plan=sync, timeout=TIMEOUT)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    run.close()
    return heard


@pytest.mark.parametrize(
    ("variable", "value", "named"),
    [
        (
            "THALWEG_ENCRYPTION",
            "on",
            "ranks? 1: attach.*: THALWEG_ENCRYPTION is 'on', on rank 0 'off'",
        ),
        ("THALWEG_SECRET", "another than others have", "rank 1: attach.*: THALWEG_SECRET is '"),
    ],
)
def test_a_difference_is_named(variable: str, value: str, named: str) -> None:
    def work(rank: int) -> dict[str, Any]:
        if rank == 1:
            os.environ[variable] = value
        return raised(attached)

    results = on_ranks(3, work)
    assert one_value(results, "kind") == "Mismatch"
    assert value not in results[0]["text"] or variable == "THALWEG_ENCRYPTION"
    assert re.search(named, results[0]["text"]), results[0]["text"]


@pytest.mark.parametrize("secret", [True, False])
def test_rank_0_says_so_if_anybody_may_join(secret: bool) -> None:
    def work(rank: int) -> dict[str, Any]:
        os.environ["THALWEG_ENCRYPTION"] = "on"
        if not secret:
            del os.environ["THALWEG_SECRET"]
        return {"heard": attached()}

    first, second = (result["heard"] for result in on_ranks(2, work))
    assert not second
    if secret:
        assert not first
    else:
        [said] = first
        assert "any process that reaches its store can join it; set THALWEG_SECRET" in said


@pytest.mark.parametrize("sync", ["ddp", "ring", "auto"])
def test_rank_0_says_so_if_a_plan_is_not_protected(sync: str, in_one_crew: InOneCrew) -> None:
    def work(rank: int, sync: str) -> dict[str, Any]:
        os.environ["THALWEG_ENCRYPTION"] = "off"
        heard = list(attached(sync))
        os.environ["THALWEG_ENCRYPTION"] = "on"
        return {"off": heard, "on": list(attached(sync))}

    first, second = in_one_crew(2, work)
    assert not first["off"] + second["off"] + second["on"]
    said = f"{sync} sends over torch's own connections: unlike the other connections"
    expected = [said] if sync == "ddp" else []
    assert [line[: len(said)] for line in first["on"]] == expected


@contextmanager
def two(sync: str) -> Iterator[tuple[Run, Any]]:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run = attach(model, optimizer, plan=sync, timeout=TIMEOUT)

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()

    yield run, train
    run.close()


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        ("ddp", "ddp would send over torch's own connections"),
        ("star(root=7)", "root 7 is not in the group"),
        ("rinq", "there is no plan 'rinq'"),
        ("gc", "gc gives stragglers fewer samples"),
    ],
)
def test_what_stands_in_the_store_is_refused_by_every_rank(
    plan: str, why: str, in_one_crew: InOneCrew
) -> None:
    """A plan that no rank has proposed by `run.switch`, which refuses it too."""

    def work(rank: int, plan: str) -> dict[str, Any]:
        os.environ["THALWEG_ENCRYPTION"] = "on"
        with two("ring") as (run, train):
            proposed = raised(lambda: run.switch(plan))
            if rank == 1:
                run._session.agreement.propose("sync", plan)
            return {**raised(lambda: train(30)), "proposed": proposed["text"], "step": run.step}

    for result in in_one_crew(2, work):
        assert result["text"].startswith(why)
        assert result["proposed"].startswith(why)
        assert result["step"] % 8 == 0


def in_epoch_with(plan: str, steps: int) -> list[dict[str, Any]]:
    """What becomes of two ranks with ring that enter a membership epoch that names this plan."""

    def work(rank: int) -> dict[str, Any]:
        os.environ["THALWEG_ENCRYPTION"] = "on"
        with two("ring") as (run, train):
            train(2)
            membership = run._recovery.membership
            assert membership is not None
            with patch.object(MembershipEpoch, "plan", plan):
                if rank == 1:
                    membership.request_rendezvous()
                return {
                    **raised(lambda: train(steps)),
                    "now": str(run.plan),
                    "formation": run.members.epoch,
                }

    return on_ranks(2, work)


def test_so_is_what_an_epoch_says() -> None:
    for result in in_epoch_with("star(root=7)", 20_000):
        assert result["text"].startswith("root 7 is not in the group")


def test_an_epoch_that_says_ddp_goes_on_under_encryption() -> None:
    for result in in_epoch_with("ddp", 20):
        assert result["text"] == ""
        assert (result["now"], result["formation"]) == ("ring", 2)


def test_who_named_ddp_may_come_back_to_it() -> None:
    def work(rank: int) -> dict[str, Any]:
        os.environ["THALWEG_ENCRYPTION"] = "on"
        plans = []
        with two("ddp") as (run, train):
            for other in ("ring", "ddp"):
                if rank == 0:
                    run.switch(other)
                train(10)
                plans.append(str(run.plan))
        return {"plans": plans}

    assert one_value(on_ranks(2, work), "plans") == ["ring", "ddp"]
