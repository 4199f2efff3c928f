"""A calibration in a scenario's own place: fresh workers measure links, messages and codecs
together, and compute a few steps each for itself."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from thalweg.bench.calibrations import PATIENCE, Measured, profile_job
from thalweg.bench.forecast import Forecast
from thalweg.bench.injection import Injection
from thalweg.bench.scenario import Scenario
from thalweg.catalog import parse_plan
from thalweg.facts import format_cluster, parse_cluster
from thalweg.plan import Choice
from thalweg.probing.calibration import calibrate
from thalweg.runtime import Engine, World
from thalweg.runtime.launch import find_cluster
from thalweg.runtime.supervisor import Report
from thalweg.workloads.job import describe

if TYPE_CHECKING:
    from thalweg.bench.comparison import RunAll

SECONDS = 8.0  # of profile
FEWEST, MOST = 20, 120  # steps of it
SEED = 1009  # of who is late: not that of the runs that are compared


def forecast_at(scenario: Scenario, run_all: RunAll) -> Forecast:
    codecs = codecs_of(scenario.syncs)

    def work(rank: int, report: Report) -> dict[str, Any]:
        found = _measured(scenario, codecs)
        declared = find_cluster(scenario.cluster, scenario.cluster.workers, os.environ)
        return {**found.packed(), "declared": format_cluster(declared)} if rank == 0 else {}

    told = run_all(work, lambda rank, message: None, ()).results[0]
    assert told is not None
    declared = parse_cluster(told["declared"])
    found = Measured.unpacked({key: told[key] for key in told if key != "declared"})
    sleeps = scenario.compute.step.seconds > 0  # and leaves the cores to codecs
    return Forecast(
        declared=declared,
        cluster=found.cluster,
        machine=replace(found.machine, contention=0.0 if sleeps else 1.0),
        workload=found.workload,
    )


def codecs_of(syncs: Sequence[str]) -> list[Choice]:
    """The compressors of these plans; of `auto`, none."""
    precisions = [parse_plan(sync).precision for sync in syncs]
    return list(dict.fromkeys(one for one in precisions if one is not None))


def _measured(scenario: Scenario, codecs: Sequence[Choice]) -> Measured:
    """As one of the workers; the same on all."""
    job = replace(scenario.job, batch=scenario.batch or scenario.job.batch)
    world = World.join(PATIENCE)
    alarm = world.alarm()
    declared = find_cluster(scenario.cluster, world.size, os.environ)
    engine = Engine(world.transport("zeromq"), alarm, PATIENCE)
    try:
        found = calibrate(
            world,
            alarm,
            engine,
            declared,
            tensors=describe(job.name, job.model()).tensors,
            codecs=codecs,
            native=True,
        )
        world.part(PATIENCE, alarm)
    finally:
        engine.close()
    injection = Injection(compute=scenario.compute, cluster=scenario.cluster, seed=SEED)
    expected = scenario.compute.step.seconds or SECONDS / MOST
    steps = round(min(MOST, max(FEWEST, SECONDS / expected)))
    profiled = profile_job(job, steps, injection=injection)
    return Measured(
        cluster=profiled.placed(found.cluster),
        machine=found.machine,
        workload=profiled.workload,
        spread=profiled.spread,
        seconds=0.0,
    )
