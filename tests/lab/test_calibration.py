"""Real networks, calibrated: rates in a few seconds, and what schedules take that were never tried,
as they are simulated with what was found."""

from __future__ import annotations

from time import monotonic, perf_counter
from typing import Any

import numpy as np
import pytest

from thalweg.engine.collectives import Collectives, RoundCounter
from thalweg.engine.engine import Engine
from thalweg.facts import (
    Cluster,
    Rate,
    Size,
    Workload,
    format_situation,
    parse_situation,
)
from thalweg.lab import Lab
from thalweg.launch.worker_process import SendMessage
from thalweg.members.world import World
from thalweg.predict.flow_simulator import simulate
from thalweg.probing.calibration import calibrate
from thalweg.schedules import Group, Schedule
from thalweg.schedules.topologies.halving_doubling import halving_doubling

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.usefixtures("needs_lab")]
TIMEOUT = 60.0
ELEMENTS = 1 << 17
SLOW = 5


def untried(cluster: Cluster) -> Schedule:
    return halving_doubling(Group.everybody(cluster), ELEMENTS, 4, 0)


def test_a_calibration_predicts_what_it_has_not_tried(name: str) -> None:
    nics = ["100mbit"] * 8
    nics[SLOW] = "50mbit"
    real = Cluster.regular([8], nic=nics)

    workload = Workload.of_size(Size.parse("1MB"))

    def work(rank: int, report: SendMessage) -> dict[str, Any]:
        world = World.join(TIMEOUT)
        abort_flag = world.abort_flag()
        engine = Engine(world.transport(), abort_flag, TIMEOUT)
        clock = RoundCounter()
        start = monotonic()
        found = calibrate(world, abort_flag, engine, real, workload, clock=clock)
        took = monotonic() - start
        collectives = Collectives(Group.everybody(found.cluster), engine, clock)
        part = collectives.program(untried(found.cluster))
        seconds = []
        for _ in range(4):
            collectives.barrier()
            begin = perf_counter()
            collectives.run(part, np.zeros(ELEMENTS, np.float32))
            seconds.append(perf_counter() - begin)
        slowest = collectives.all_gather(seconds[1:]).max(axis=0)
        world.leave(TIMEOUT, abort_flag)
        engine.close()
        return {
            "situation": format_situation(found),
            "measured": float(np.median(slowest)),
            "took": took,
        }

    with Lab.of(real, name=name) as lab:
        results = lab.run(work, process_group=False)
    assert all(result["situation"] == results[0]["situation"] for result in results)
    situation = parse_situation(results[0]["situation"])
    found, machine = situation.cluster, situation.machine
    for rank, host in enumerate(found.hosts):
        wanted = Rate.parse(nics[rank]).bits_per_second
        for way in (host.nic.out, host.nic.into):
            assert 0.9 <= way.bits_per_second / wanted <= 1.03, host
    schedule = untried(found)
    ends = simulate(schedule, found, machine.ours, burst=machine.burst)
    print(
        f"{results[0]['took']:.1f} s; {max(ends.values())} as simulated, {results[0]['measured']}"
    )
    assert max(ends.values()) == pytest.approx(results[0]["measured"], rel=0.15)
