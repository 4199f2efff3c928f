"""The scenarios that ship: each can be read, and all its plans compile for its cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from thalweg.bench.scenario import read_scenario
from thalweg.catalog import parse_plan
from thalweg.schedules import Group, check
from thalweg.steps import compile_step
from thalweg.workloads import describe

FOLDER = Path(__file__).parents[2] / "scenarios"
FILES = sorted(FOLDER.glob("*.toml"))


def test_the_telling_ones_are_there() -> None:
    assert {path.stem for path in FILES} == {
        "competing-flow",
        "compression-and-backward",
        "compression-on-digits",
        "compression-on-tinygpt",
        "compressed-in-a-rack",
        "contended-uplink",
        "digits-behind-a-slow-uplink",
        "eighty-four-hosts",
        "even-rack",
        "flows-through-an-uplink",
        "four-racks",
        "interleaved-ranks",
        "late-workers",
        "nic-slows-half-way",
        "one-late-host",
        "one-slow-nic",
        "oversubscribed-uplink",
        "overlap",
        "slow-nic-of-sixteen",
        "slow-uplink-and-nic",
        "slow-uplink-of-four",
        "tinygpt-on-two-racks",
        "two-sites",
        "uneven-racks",
        "uplink-recovers",
    }


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_it_says_what_it_shows_and_its_plans_compile(path: Path) -> None:
    assert path.read_text().startswith("# ")
    scenario = read_scenario(path)
    assert scenario.name == path.stem
    workload = describe(scenario.job.name, scenario.job.model())
    group = Group.everybody(scenario.cluster)
    for sync in scenario.syncs:
        for round_ in compile_step(parse_plan(sync), group, workload, step=7).rounds:
            check(round_.schedule)
