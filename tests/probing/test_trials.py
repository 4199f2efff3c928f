"""Trials on real ranks: the backend is tried where it connects, and missed nowhere."""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo

from tests.training.workers import on_ranks, one_value
from thalweg.engine.collectives import Collectives, RoundCounter
from thalweg.engine.engine import Engine
from thalweg.facts import Cluster, Host, Rack, Situation, Size, Workload
from thalweg.members.world import World
from thalweg.predict.fitting import fit
from thalweg.probing import calibration
from thalweg.probing.calibration import run_trials
from thalweg.schedules import Group

PAIR = Cluster(racks=(Rack(name="r", hosts=(Host(name="h", ranks=(0, 1)),)),))
SITUATION = Situation(cluster=PAIR, workload=Workload.of_size(Size.parse("1MB")))
FREE = "a backend that costs nothing"


def tried(rank: int) -> dict[str, Any]:
    world = World.join(20.0)
    abort_flag = world.abort_flag()
    engine = Engine(world.transport(), abort_flag, 20.0)
    collectives = Collectives(Group.everybody(PAIR), engine, RoundCounter())
    found = run_trials(world.namespace("trials"), collectives, PAIR, native=True)
    world.leave(20.0, abort_flag)
    engine.close()
    return {
        "kinds": [trial.kind for trial in found],
        "seconds": [trial.seconds for trial in found],
        "assumed": fit(SITUATION, found).machine.assumed,
        "initialized": dist.is_initialized(),
    }


def test_the_backend_is_tried_in_a_group_of_its_own() -> None:
    results = on_ranks(2, tried)
    assert one_value(results, "kinds") == ["chain", "star", "local", "native", "native"]
    assert all(second > 0 for each in one_value(results, "seconds") for second in each)
    assert FREE not in one_value(results, "assumed")
    assert one_value(results, "initialized") is False


def test_where_gloo_does_not_connect_one_rank_nobody_tries_it() -> None:
    def gloo(*arguments: Any) -> Any:
        if os.environ["RANK"] == "1":
            raise RuntimeError("no route to host")
        return ProcessGroupGloo(*arguments)

    with (
        patch.object(calibration, "ProcessGroupGloo", gloo),
        patch.object(calibration, "BACKEND_TIMEOUT_SECONDS", 0.5),
    ):
        results = on_ranks(2, tried)
    assert one_value(results, "kinds") == ["chain", "star", "local"]
    assert FREE in one_value(results, "assumed")


@pytest.mark.parametrize(("backend", "tries"), [("cuda:nccl", False), ("cpu:gloo,cuda:nccl", True)])
def test_a_script_whose_group_is_of_another_backend(backend: str, tries: bool) -> None:
    with (
        patch.object(dist, "is_initialized", lambda: True),
        patch.object(dist, "get_backend_config", lambda: backend),
        patch.object(World, "join", joined_without_a_group),
    ):
        results = on_ranks(2, tried)
    assert ("native" in one_value(results, "kinds")) is tries


JOIN = World.join


def joined_without_a_group(timeout: float) -> World:
    with patch.object(dist, "is_initialized", lambda: False):
        return JOIN(timeout)
