"""`auto` in two racks with slow uplinks: it leaves what sends everything through them, and asks
again when one of them becomes slower still."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from thalweg.bench.comparison import compare
from thalweg.bench.scenario import read_scenario
from thalweg.lab import Lab

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("needs_lab")]
RACKS = """
[lab]
racks = 2
hosts = 4
nic = "100mbit"
uplink = "25mbit"
[compute]
step = "50ms"
[compare]
sync = ["auto"]
repeats = 1
"""
DEGRADED = """
[[lab.event]]
at_step = 50
action = "degrade"
rack = 0
rate = "8mbit"
"""


def row(name: str, path: Path, text: str) -> dict[str, Any]:
    path.write_text(text)
    scenario = read_scenario(path)
    lab = Lab.of(scenario.cluster, name=name)
    try:
        lab.up()
        [found] = compare(scenario, lab, lambda *_: None)
    finally:
        lab.down()
    assert found["error"] is None
    return found


def test_it_leaves_the_ring(name: str, tmp_path: Path) -> None:
    job = '[workload]\nname = "synthetic(params=500k)"\nsteps = 50\n'
    found = row(name, tmp_path / "racks.toml", RACKS + job)
    [choices] = found["choices"]
    assert choices[-1]["sync"].partition(" @")[0] not in ("ddp", "ring")
    assert choices[-1]["measured"] < 1.2 * choices[-1]["high"]
    assert found["replicas_equal"]


def test_it_asks_again_when_an_uplink_becomes_slower(name: str, tmp_path: Path) -> None:
    job = '[workload]\nname = "synthetic(params=200k)"\nsteps = 110\n'
    found = row(name, tmp_path / "degraded.toml", RACKS + DEGRADED + job)
    [choices] = found["choices"]
    first, *_ = choices
    later = [chosen for chosen in choices if chosen["step"] > 50]
    assert later, choices
    assert later[0]["predicted"] > first["predicted"]  # of a slower network
    assert found["replicas_equal"]
