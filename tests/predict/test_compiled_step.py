"""A prediction simulates what training runs: the same chains, with the same constants."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from thalweg.catalog import default_catalog, parse_plan
from thalweg.facts import Cluster, Machine, Tensor, Workload
from thalweg.predict.step_simulator import StepChains
from thalweg.schedules import Group
from thalweg.steps import DDP_FIRST_BUCKET, Chain
from thalweg.training.compiled_steps import CompiledSteps

JOB = Workload(
    name="job",
    tensors=tuple(Tensor(name=f"w{i}", shape=(64, 100 * (i + 1))) for i in range(6)),
)
RACKS = Group.everybody(Cluster.regular([3, 2], nic="1gbit", uplink="100mbit"))


def form(chain: Chain) -> tuple[Any, ...]:
    """What two compilations of a chain have in common."""
    stages = [
        (stage.work, [(r.number, r.group.ranks, r.payload, r.schedule.name) for r in stage.rounds])
        for stage in chain.stages
    ]
    return chain.bucket, chain.span, chain.delay, chain.lasts, stages


@pytest.mark.parametrize(
    "sync",
    [
        "ring @ bucket=100KB",
        "ring+int8 @ bucket=100KB",
        "hierarchical(compress=between)+powersgd",
        "dssync(delay=1) @ bucket=100KB",
        "local_sgd(every=2, levels=rack, delay=1) @ bucket=100KB",
        "codedreduce(fanout=2, stragglers=1)",
    ],
)
def test_a_rank_runs_the_chains_that_are_predicted(sync: str) -> None:
    plan = parse_plan(sync)
    predicted = StepChains(plan, RACKS, JOB, Machine(), default_catalog())
    for rank in RACKS.ranks:
        run = CompiledSteps(plan, RACKS, JOB, rank)
        for step in range(predicted.cycle):
            assert [form(priced.chain) for priced in predicted.at(step)[rank]] == [
                form(chain) for chain in run.at(step).chains
            ]


def test_the_first_bucket_of_ddp_is_torchs() -> None:
    assert vars(dist)["_DEFAULT_FIRST_BUCKET_BYTES"] == DDP_FIRST_BUCKET.nbytes
