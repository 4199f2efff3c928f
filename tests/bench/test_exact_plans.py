"""Every exact plan, over both transports, trains as DDP does: same bits on all ranks, and within a
relative 1e-5 of DDP's parameters, in all the ways of training that `verify` knows."""

from __future__ import annotations

import pytest

from thalweg.bench.training import Recipe
from thalweg.bench.verify import TOLERANCE, VARIANTS, verify
from thalweg.catalog import default_catalog
from thalweg.declarations import Promise
from thalweg.errors import PlanError
from thalweg.facts import Cluster, Workload
from thalweg.facts.units import Size
from thalweg.rounds import compile_rounds
from thalweg.schedules import Group
from thalweg.workloads import parse_job

WORKERS = 4


def exact_plans() -> list[str]:
    """All presets that promise exactness and have rounds, found in the catalog, not listed here."""
    catalog = default_catalog()
    group = Group.everybody(Cluster.flat(WORKERS))
    found = []
    for name in catalog.presets:
        plan = catalog.plan(name)
        try:
            compile_rounds(plan, group, Workload.of_size(Size.parse("1KB")), 0)
        except PlanError:
            continue
        native = catalog.topologies[plan.topology.name].backend
        if catalog.guarantee(plan).promise is Promise.EXACT:
            found += [name] if native else [f"{name} @ transport={t}" for t in ("zeromq", "c10d")]
    return found


def test_none_is_left_out() -> None:
    names = {text.partition(" ")[0] for text in exact_plans()}
    assert names == {
        "ddp", "native", "umw", "star", "ps", "ring", "tree", "double_tree", "halving_doubling",
        "hierarchical", "gc",
    }  # fmt: skip


def test_a_few_steps_of_every_plan() -> None:
    rows = verify(
        parse_job("digits"),
        exact_plans(),
        workers=WORKERS,
        recipe=Recipe(steps=4, timeout="60s", evaluate=False),
        variants=VARIANTS[:1],
        timeout=110,
    )
    for row in rows:
        assert row["ok"], row
        assert row["difference"] <= TOLERANCE


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_twenty_steps_of_every_plan(variant: object) -> None:
    rows = verify(
        parse_job("tinygpt"),
        exact_plans(),
        workers=WORKERS,
        recipe=Recipe(steps=20, timeout="60s", evaluate=False),
        variants=[v for v in VARIANTS if v is variant],
        timeout=850,
    )
    for row in rows:
        assert row["identical"], row
        assert row["difference"] <= row["tolerance"], row
        assert row["tolerance"] == TOLERANCE or row["variant"] == "bf16 parameters"
