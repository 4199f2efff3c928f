"""DS-Sync among four racks: what becomes slow is named and kept apart, and nobody else waits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from thalweg.bench.comparison import compare
from thalweg.bench.scenario import read_scenario
from thalweg.lab import Lab

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("needs_lab")]
SCENARIOS = Path(__file__).parents[2] / "scenarios"
EVENT, SOON = 20, 15  # steps


def row(name: str, scenario_name: str) -> dict[str, Any]:
    scenario = read_scenario(SCENARIOS / f"{scenario_name}.toml")
    lab = Lab.of(scenario.cluster, name=name)
    try:
        lab.up()
        rows = compare(replace(scenario, syncs=("dssync",)), lab, lambda *_: None)
    finally:
        lab.down()
    [found] = rows
    assert found["error"] is None
    print(scenario_name, found["adjustments"], [p["after"] / p["before"] for p in found["pace"]])
    return found


@pytest.mark.parametrize(
    ("scenario", "named"),
    [
        ("slow-uplink-of-four", {"rack0"}),
        ("slow-nic-of-sixteen", {"host5"}),
        ("flows-through-an-uplink", {"rack0"}),
        ("slow-uplink-and-nic", {"rack0", "host1"}),
    ],
)
def test_what_becomes_slow_is_named_and_nothing_else(
    name: str, scenario: str, named: set[str]
) -> None:
    found = row(name, scenario)
    [adjustments] = found["adjustments"]
    first = adjustments[0]
    assert EVENT < first["step"] <= EVENT + SOON
    kept = {part.split(" every ")[0] for part in first["kept_apart"].split(", ")}
    assert kept - {"racks in pairs"} == named
    assert all(host in first["reason"] for host in named)


def test_nothing_is_named_where_nothing_is_slow(name: str) -> None:
    scenario = read_scenario(SCENARIOS / "four-racks.toml")
    lab = Lab.of(scenario.cluster, name=name)
    try:
        lab.up()
        quiet = replace(scenario, syncs=("dssync",), events=())
        [found] = compare(quiet, lab, lambda *_: None)
    finally:
        lab.down()
    [adjustments] = found["adjustments"]
    assert [made for made in adjustments if "every" in made["kept_apart"]] == []
