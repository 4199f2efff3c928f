"""A forecast by a calibration in a scenario's own place: fresh workers measure links, messages and
codecs together, and compute a few steps each for itself."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from thalweg.bench.calibrate_job import Measured, calibrate_job
from thalweg.bench.prediction_check import Forecast
from thalweg.bench.scenario import Scenario
from thalweg.bench.simulated_compute import Injection
from thalweg.catalog import parse_plan
from thalweg.facts import format_cluster, parse_cluster
from thalweg.launch.rank_assignment import find_cluster
from thalweg.launch.supervisor import Report
from thalweg.plan import Choice

if TYPE_CHECKING:
    from thalweg.bench.comparison import RunAll

SECONDS = 8.0  # of profile
FEWEST, MOST = 20, 120  # steps of it
SEED = 1009  # of who is late: not that of the runs that are compared


def forecast_at(scenario: Scenario, run_all: RunAll) -> Forecast:
    job = replace(scenario.job, batch=scenario.batch or scenario.job.batch)
    expected = scenario.compute.step.seconds or SECONDS / MOST
    steps = round(min(MOST, max(FEWEST, SECONDS / expected)))
    codecs = codecs_of(scenario.syncs)
    injection = Injection(compute=scenario.compute, cluster=scenario.cluster, seed=SEED)

    def work(rank: int, report: Report) -> dict[str, Any]:
        declared = find_cluster(scenario.cluster, scenario.cluster.workers, os.environ)
        found = calibrate_job(job, declared, codecs, steps=steps, injection=injection)
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
