"""Every exact plan trains as DDP does: same bits on all ranks, and within a relative 1e-5 of DDP's
parameters, in all the ways of training that `verify` knows."""

from __future__ import annotations

import pytest

from thalweg.bench.training import Recipe
from thalweg.bench.verify import VARIANTS, VERIFY_TOLERANCE_RATIO, verify
from thalweg.catalog import default_catalog, parse_plan
from thalweg.declarations import Promise
from thalweg.errors import PlanError
from thalweg.facts import Cluster
from thalweg.schedules import Group
from thalweg.steps import refuse_what_cannot_run
from thalweg.workloads import parse_job

WORKERS = 4


def exact_plans() -> list[str]:
    """All presets that promise exactness and run here, found in the catalog, not listed here."""
    catalog = default_catalog()
    return [
        name
        for name in catalog.presets
        if catalog.guarantee(catalog.plan(name)).promise is Promise.EXACT and runs(name)
    ]


def runs(sync: str) -> bool:
    try:
        group = Group.everybody(Cluster.flat(WORKERS))
        refuse_what_cannot_run(parse_plan(sync), group, has_data=True)
    except PlanError:
        return False
    return True


def test_none_is_left_out() -> None:
    assert set(exact_plans()) == {
        "ddp", "native", "umw", "star", "ps", "ring", "tree", "double_tree", "halving_doubling",
        "hierarchical", "tuned", "stragglar", "gc", "codedreduce",
    }  # fmt: skip


def test_a_few_steps_of_every_plan() -> None:
    rows = verify(
        parse_job("digits"),
        exact_plans(),
        workers=WORKERS,
        recipe=Recipe(steps=4, timeout="60s"),
        variants=["plain"],
        timeout=110,
    )
    for row in rows:
        assert row["ok"], row
        assert row["difference"] <= VERIFY_TOLERANCE_RATIO


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("variant", VARIANTS)
def test_twenty_steps_of_every_plan(variant: str) -> None:
    rows = verify(
        parse_job("tinygpt"),
        exact_plans(),
        workers=WORKERS,
        recipe=Recipe(steps=20, timeout="60s"),
        variants=[variant],
        timeout=850,
    )
    for row in rows:
        assert row["identical"], row
        assert row["difference"] <= row["tolerance"], row
        assert row["tolerance"] == VERIFY_TOLERANCE_RATIO or row["variant"] == "bf16 parameters"
