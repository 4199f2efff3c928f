"""A forecast by a calibration in a scenario's own place: fresh workers measure links, messages and
codecs together, and compute a few steps each for itself."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from thalweg.bench.calibrate_job import JobCalibration, calibrate_job
from thalweg.bench.prediction_check import ScenarioPrediction
from thalweg.bench.scenario import Scenario
from thalweg.bench.simulated_compute import SimulatedCompute
from thalweg.catalog import parse_plan
from thalweg.facts import format_cluster, parse_cluster
from thalweg.launch.rank_assignment import find_cluster
from thalweg.launch.supervisor import SendMessage
from thalweg.plan import Choice

if TYPE_CHECKING:
    from thalweg.bench.comparison import RunAll

PROFILE_SECONDS = 8.0  # of profile
MIN_PROFILE_STEPS, MAX_PROFILE_STEPS = 20, 120  # steps of it
PROFILE_STRAGGLER_SEED = 1009  # of who is late: not that of the runs that are compared


def predict_scenario_at(scenario: Scenario, run_all: RunAll) -> ScenarioPrediction:
    job = replace(scenario.job, batch=scenario.batch or scenario.job.batch)
    expected = scenario.compute.step.seconds or PROFILE_SECONDS / MAX_PROFILE_STEPS
    steps = round(min(MAX_PROFILE_STEPS, max(MIN_PROFILE_STEPS, PROFILE_SECONDS / expected)))
    codecs = codecs_of(scenario.syncs)
    injection = SimulatedCompute(
        compute=scenario.compute, cluster=scenario.cluster, seed=PROFILE_STRAGGLER_SEED
    )

    def work(rank: int, report: SendMessage) -> dict[str, Any]:
        declared = find_cluster(scenario.cluster, scenario.cluster.workers, os.environ)
        found = calibrate_job(job, declared, codecs, steps=steps, injection=injection)
        return {**found.packed(), "declared": format_cluster(declared)} if rank == 0 else {}

    told = run_all(work, lambda rank, message: None, ()).results[0]
    assert told is not None
    declared = parse_cluster(told["declared"])
    found = JobCalibration.unpacked({key: told[key] for key in told if key != "declared"})
    sleeps = scenario.compute.step.seconds > 0  # and leaves the cores to codecs
    return ScenarioPrediction(
        declared=declared,
        cluster=found.cluster,
        machine=replace(found.machine, contention=0.0 if sleeps else 1.0),
        workload=found.workload,
    )


def codecs_of(syncs: Sequence[str]) -> list[Choice]:
    """The compressors of these plans; of `auto`, none."""
    precisions = [parse_plan(sync).precision for sync in syncs]
    return list(dict.fromkeys(one for one in precisions if one is not None))
