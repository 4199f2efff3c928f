"""A scenario: a cluster, events, a job, and the plans to compare there, as a TOML file:

    [lab]
    racks = 2
    hosts = 4                   # in each rack, or a list: [5, 3, 4]
    nic = "200mbit"             # or { out = ..., in = ... }, or a list, one per host, rack by rack
    uplink = "200mbit"          # or a list, one per rack; absent: no bottleneck
    latency = "5ms"             # added by each uplink; or a list, one per rack
    rank_order = "rack"         # or "interleaved": round-robin over the racks
    loss = 0.001                # of packets, on every uplink
    [[lab.event]]               # any number; see thalweg/lab/event.py
    at_step = 20
    action = "degrade"
    rack = 0
    rate = "50mbit"
    [compute]                   # sleep per step instead of computation
    step = "50ms"
    backward = 0.67             # the fraction that backward takes
    late = { probability = 0.05, delay = "2s" }
    [workload]
    name = "digits"
    steps = 100
    batch = 128                 # of all workers together; absent: the job's own
    target = { metric = "accuracy", value = 0.95 }
    evaluate_every = 10         # steps
    [compare]
    sync = ["ddp", "ring"]
    repeats = 3                 # interleaved
    warmup = 15                 # steps that aren't counted

Instead of racks, hosts and links, `[cluster] file = "cluster.toml"` names a cluster file next to
the scenario, which the lab emulates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from thalweg.bench.simulated_compute import Compute
from thalweg.catalog import parse_plan
from thalweg.errors import LabError, ScenarioError
from thalweg.facts import Cluster, Duration, read_cluster
from thalweg.facts.cluster import MAX_WORKERS
from thalweg.facts.files import duplex, straggler_delay
from thalweg.facts.toml_reader import TomlTable, load_toml, read_toml
from thalweg.lab import Event
from thalweg.schedules import Group
from thalweg.steps import refuse_what_cannot_run
from thalweg.training.auto.request import plan_at_first
from thalweg.workloads import Job, find_job

SKIPPED_STEPS_AFTER_EVENT = 15
LAB_LAYOUT_KEYS = ("racks", "hosts", "nic", "uplink", "latency", "rank_order")
RANK_ORDERS = ("rack", "interleaved")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The target value of the job's metric, reached by a rising accuracy or a falling loss."""

    metric: str
    value: float

    def reached_by(self, value: float) -> bool:
        return value >= self.value if self.metric == "accuracy" else value <= self.value

    def __str__(self) -> str:
        return f"{self.metric} {self.value:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A cluster, its events, a job and the plans to compare, validated on creation."""

    name: str
    cluster: Cluster
    loss: float = 0.0  # fraction of packets lost on every uplink
    events: tuple[Event, ...] = ()
    compute: Compute = Compute()
    job: Job
    steps: int
    batch: int | None = None  # the job's own if None
    target: Target | None = None
    evaluate_every: int = 10  # steps, if there is a target
    syncs: tuple[str, ...]
    repeats: int = 3
    warmup: int = 15  # steps

    def __post_init__(self) -> None:
        group = Group.everybody(self.cluster)
        for sync in self.syncs:
            refuse_what_cannot_run(plan_at_first(parse_plan(sync)), group, has_data=True)
            if self.syncs.count(sync) > 1:
                raise ScenarioError(f"{sync} is listed twice under [compare]", "list it once")
        for event in self.events:
            if event.at_step is not None and event.at_step >= self.steps:
                raise ScenarioError(
                    f"{event}: the scenario has only {self.steps} steps",
                    f"give at_step up to {self.steps - 1}, or more steps",
                )
            try:
                event.links(self.cluster)
            except LabError as error:
                raise ScenarioError(f"{event}: {error.problem}", error.remedy) from None
        self._refuse_unsuitable_job()
        if not self.counted(event.at_step for event in self.events):
            raise ScenarioError(
                f"none of {self.steps} steps is counted: {self.warmup} are warm-up, and "
                f"{SKIPPED_STEPS_AFTER_EVENT} after each event are skipped",
                "give more steps, or a shorter warmup",
            )

    def counted(self, happened: Iterable[int | None]) -> list[int]:
        """The steps, from 1, that count for the step time, given the steps after which events came.

        None stands for an event that wasn't applied, or at an unknown step.
        """
        after = [step for step in happened if step is not None]
        return [
            step
            for step in range(self.warmup + 1, self.steps + 1)
            if not any(event < step <= event + SKIPPED_STEPS_AFTER_EVENT for event in after)
        ]

    def _refuse_unsuitable_job(self) -> None:
        if self.target is not None and self.target.metric != self.job.metric:
            raise ScenarioError(
                f"the metric of {self.job.name} is {self.job.metric}, not {self.target.metric}",
                f'write target = {{ metric = "{self.job.metric}", value = ... }}',
            )
        batch, workers = self.batch or self.job.batch, self.cluster.workers
        if batch < workers:
            raise ScenarioError(
                f"a batch of {batch} has no sample for each of {workers} workers",
                f"write batch = {workers} or more under [workload]",
            )


def read_scenario(path: Path) -> Scenario:
    return read_toml(path, lambda text: parse_scenario(text, path), ScenarioError)


def parse_scenario(text: str, path: Path) -> Scenario:
    """The scenario that this text describes; files that it names are relative to `path`."""
    file = load_toml(text, ScenarioError)
    file.only("lab", "cluster", "compute", "workload", "compare")
    lab, compute = _section(file, "lab"), _section(file, "compute")
    workload, compare = _section(file, "workload"), _section(file, "compare")
    lab.only(*LAB_LAYOUT_KEYS, "loss", "event")
    workload.only("name", "steps", "batch", "target", "evaluate_every")
    compare.only("sync", "repeats", "warmup")
    return Scenario(
        name=path.stem,
        cluster=_cluster(file, lab, path.parent),
        loss=lab.number("loss", 0, 1, 0.0),
        events=tuple(
            Event.parse(table.data, f"[[lab.event]] {number}")
            for number, table in enumerate(lab.tables("event", "[[lab.event]] above each"))
        ),
        compute=_compute(compute),
        job=find_job(workload.text("name", '"digits"')),
        steps=workload.whole("steps", 1),
        batch=workload.whole("batch", 1) if "batch" in workload else None,
        target=_target(workload),
        evaluate_every=workload.whole("evaluate_every", 1, 10),
        syncs=_syncs(compare),
        repeats=compare.whole("repeats", 1, 3),
        warmup=compare.whole("warmup", 0, 15),
    )


def _section(file: TomlTable, name: str) -> TomlTable:
    return TomlTable(file.data.get(name, {}), f"[{name}]", ScenarioError)


def _cluster(file: TomlTable, lab: TomlTable, folder: Path) -> Cluster:
    if "cluster" not in file:
        return _layout(lab)
    for key in LAB_LAYOUT_KEYS:
        if key in lab:
            raise ScenarioError(
                f"[cluster] and {key} of [lab] both describe the lab", "leave one out"
            )
    table = _section(file, "cluster")
    table.only("file")
    return read_cluster(folder / table.text("file", '"cluster.toml"'))


def _layout(lab: TomlTable) -> Cluster:
    none = Duration(0.0)
    order = lab.data.get("rank_order", "rack")
    if order not in RANK_ORDERS:
        raise ScenarioError(
            f"[lab] has no rank_order {order!r}", f"give {' or '.join(RANK_ORDERS)}"
        )
    return Cluster.regular(
        _rack_sizes(lab),
        nic=_each(lab, "nic", lambda table: duplex(table, "nic")),
        uplink=_each(lab, "uplink", lambda table: duplex(table, "uplink")),
        uplink_latency=_each(lab, "latency", lambda table: table.duration("latency", none)),
        interleaved=order == "interleaved",
    )


def _rack_sizes(lab: TomlTable) -> list[int]:
    hosts = lab.data.get("hosts")
    if not isinstance(hosts, list):
        # a larger number is refused below, without a list of that size
        return [lab.whole("hosts", 1)] * min(lab.whole("racks", 1, 1), MAX_WORKERS + 1)
    sizes = list(lab.whole_numbers("hosts", 1, "hosts = [5, 3, 4]"))
    if lab.whole("racks", 1, len(sizes)) != len(sizes):
        raise ScenarioError(
            f"hosts of [lab] lists {len(sizes)} racks, and racks says {lab.data['racks']}",
            "leave racks out",
        )
    return sizes


def _each(lab: TomlTable, key: str, read: Callable[[TomlTable], Any]) -> Any:
    """The value under this key, or a list of values if it has one."""
    values = lab.data.get(key)
    if not isinstance(values, list):
        return read(lab)
    tables = (
        TomlTable({key: value}, f"[lab], entry {number}", ScenarioError)
        for number, value in enumerate(values)
    )
    return [read(table) for table in tables]


def _compute(table: TomlTable) -> Compute:
    table.only("step", "backward", "late")
    default = Compute()
    return Compute(
        step=table.duration("step", default.step),
        backward=table.number("backward", 0, 1, default.backward),
        late=straggler_delay(table.table("late")) if "late" in table else default.late,
    )


def _target(workload: TomlTable) -> Target | None:
    if "target" not in workload:
        if "evaluate_every" in workload:
            raise ScenarioError("evaluate_every of [workload] has no target", "give a target")
        return None
    table = workload.table("target")
    table.only("metric", "value")
    if "value" not in table:
        raise ScenarioError(f"{table.where} lacks 'value'", "give the value to reach")
    return Target(
        metric=table.text("metric", '"accuracy"'), value=table.number("value", -inf, inf, 0)
    )


def _syncs(compare: TomlTable) -> tuple[str, ...]:
    syncs: Any = compare.data.get("sync")
    if not isinstance(syncs, list) or not syncs or not all(isinstance(s, str) for s in syncs):
        raise ScenarioError(
            "sync of [compare] isn't a list of plans", 'write sync = ["ddp", "ring"]'
        )
    return tuple(syncs)
