"""A calibration in a scenario's own place: fresh workers compute a few steps each for itself, then
measure links, messages and codecs together."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean, median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from thalweg.bench.forecast import Forecast
from thalweg.bench.injection import Injection
from thalweg.bench.scenario import Scenario
from thalweg.bench.training import Recipe, train
from thalweg.catalog import parse_plan
from thalweg.facts import (
    Cluster,
    Costs,
    Duration,
    Lateness,
    Tensor,
    Workload,
    format_cluster,
    format_machine,
    parse_cluster,
    parse_machine,
)
from thalweg.plan import Choice
from thalweg.probing.calibration import calibrate
from thalweg.runtime import Engine, World
from thalweg.runtime.launch import find_cluster
from thalweg.runtime.supervisor import Report
from thalweg.training import Run

if TYPE_CHECKING:
    from thalweg.bench.comparison import RunAll

ALONE = "local_sgd(every=1000000)"  # nobody meets anybody
SETTLING = 4  # steps that don't count
SECONDS = 8.0  # of profile
FEWEST, MOST = 20, 120  # steps of it
SEED = 1009  # of who is late: not that of the runs that are compared
TIMEOUT = 300.0  # seconds
UNUSUAL = 0.2  # of a step: so much later than usual is late
Row = dict[str, Any]


def forecast_at(scenario: Scenario, run_all: RunAll) -> Forecast:
    codecs = _codecs(scenario.syncs)

    def work(rank: int, report: Report) -> dict[str, Any]:
        watch = _Watch()
        job = replace(scenario.job, model=watch.watched(scenario.job.model))
        train(job, ALONE, _recipe(scenario), watch.stepped, watch.begin)
        found = _measured(scenario, watch.tensors, codecs)
        return {**found, "rows": watch.rows(), "tensors": watch.shapes}

    told = run_all(work, lambda rank, message: None, ()).told
    rows = [result["rows"] for result in told]
    workload = _workload(scenario, told[0]["tensors"], [row for each in rows for row in each])
    machine = parse_machine(told[0]["machine"])
    sleeps = scenario.compute.step.seconds > 0  # and leaves the cores to codecs
    return Forecast(
        declared=parse_cluster(told[0]["declared"]),
        cluster=_with_lateness(parse_cluster(told[0]["cluster"]), rows),
        machine=replace(machine, contention=0.0 if sleeps else 1.0),
        workload=workload,
    )


def _recipe(scenario: Scenario) -> Recipe:
    expected = scenario.compute.step.seconds or SECONDS / MOST
    return Recipe(
        steps=SETTLING + round(min(MOST, max(FEWEST, SECONDS / expected))),
        batch=scenario.batch,
        evaluate=False,
        injection=Injection(compute=scenario.compute, cluster=scenario.cluster, seed=SEED),
    )


def _codecs(syncs: Sequence[str]) -> list[Choice]:
    precisions = [parse_plan(sync).precision for sync in syncs]
    return list(dict.fromkeys(one for one in precisions if one is not None))


def _measured(
    scenario: Scenario, tensors: Sequence[Tensor], codecs: Sequence[Choice]
) -> dict[str, str]:
    world = World.join(TIMEOUT)
    alarm = world.alarm()
    declared = find_cluster(scenario.cluster, world.size, os.environ)
    engine = Engine(world.transport("zeromq"), alarm, TIMEOUT)
    try:
        found = calibrate(
            world, alarm, engine, declared, tensors=tensors, codecs=codecs, native=True
        )
        world.part(TIMEOUT, alarm)
    finally:
        engine.close()
    return {
        "declared": format_cluster(declared),
        "cluster": format_cluster(found.cluster),
        "machine": format_machine(found.machine),
    }


class _Watch:
    """When each step of a training began, and each of its gradients was there."""

    def __init__(self) -> None:
        self._ends: list[float] = []
        self._gradients: list[list[tuple[str, float]]] = [[]]
        self.shapes: list[tuple[str, list[int]]] = []

    def watched(self, make: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        """Makes the same models, of which every gradient is noted."""

        def made(*seed: int) -> nn.Module:
            model = make(*seed)
            for name, parameter in model.named_parameters():
                self.shapes.append((name, list(parameter.shape)))
                _when_ready(parameter, partial(self._ready, name))
            return model

        return made

    def begin(self, run: Run) -> None:
        self._ends.append(perf_counter())

    def stepped(self, message: Mapping[str, Any]) -> None:
        self._ends.append(perf_counter())
        self._gradients.append([])

    def _ready(self, name: str, parameter: torch.Tensor) -> None:
        self._gradients[-1].append((name, perf_counter()))

    @property
    def tensors(self) -> list[Tensor]:
        return [Tensor(name=name, shape=tuple(shape)) for name, shape in self.shapes]

    def rows(self) -> list[Row]:
        """The parts of every step."""
        steps = zip(self._ends, self._ends[1:], self._gradients, strict=False)
        found = []
        for start, end, gradients in list(steps)[SETTLING:]:
            first, last = gradients[0][1], gradients[-1][1]
            found.append(
                {
                    "forward": first - start,
                    "backward": last - first,
                    "optimizer": end - last,
                    "ready": {name: moment - first for name, moment in gradients},
                }
            )
        return found


def _when_ready(parameter: nn.Parameter, act: Callable[[torch.Tensor], None]) -> None:
    register: Callable[[Any], Any] = parameter.register_post_accumulate_grad_hook
    register(act)


def _workload(
    scenario: Scenario, shapes: Sequence[tuple[str, Sequence[int]]], rows: Sequence[Row]
) -> Workload:
    def usual(part: str) -> Duration:
        return Duration(median(row[part] for row in rows))

    ready = {name: Duration(median(row["ready"][name] for row in rows)) for name, _ in shapes}
    return Workload(
        name=scenario.job.name,
        tensors=tuple(
            Tensor(name=name, shape=tuple(shape), ready=ready[name]) for name, shape in shapes
        ),
        costs=Costs(
            forward=usual("forward"), backward=usual("backward"), optimizer=usual("optimizer")
        ),
    )


def _with_lateness(cluster: Cluster, rows: Sequence[Sequence[Row]]) -> Cluster:
    """How often steps took much longer than usual, and by how much: of all hosts together, since
    few steps were seen of each."""
    steps = [sum(row[part] for part in ("forward", "backward")) for own in rows for row in own]
    usual = median(steps)
    deviation = median(abs(step - usual) for step in steps)
    beyond = [s - usual for s in steps if s - usual > max(UNUSUAL * usual, 5 * deviation)]
    if len(beyond) < 2:
        return cluster
    late = Lateness(probability=len(beyond) / len(steps), delay=Duration(fmean(beyond)))
    racks = tuple(
        replace(rack, hosts=tuple(replace(host, late=late) for host in rack.hosts))
        for rack in cluster.racks
    )
    return replace(cluster, racks=racks)
