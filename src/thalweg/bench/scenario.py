"""A scenario: a cluster, what happens to it, a job, and the plans to compare there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from thalweg.bench.injection import Compute
from thalweg.catalog import parse_plan
from thalweg.errors import LabError, ScenarioError
from thalweg.facts import Cluster
from thalweg.lab import Event
from thalweg.lab.event import links_of
from thalweg.schedules import Group
from thalweg.training.asked import plan_at_first
from thalweg.training.averager import refuse_what_cannot_run
from thalweg.workloads import Job

SETTLING = 15  # steps after an event that don't count
RISING = ("accuracy",)  # metrics whose target is reached from below


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What the job's metric is to reach: an accuracy from below, a loss from above."""

    metric: str
    value: float

    def reached_by(self, value: float) -> bool:
        return value >= self.value if self.metric in RISING else value <= self.value

    def __str__(self) -> str:
        return f"{self.metric} {self.value:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What can't be done in it is refused when it is made."""

    name: str
    cluster: Cluster
    loss: float = 0.0  # of packets, on every uplink
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
                raise ScenarioError(f"{sync} is to be compared with itself", "list it once")
        for event in self.events:
            if event.at_step is not None and event.at_step >= self.steps:
                raise ScenarioError(
                    f"{event}: there are {self.steps} steps only",
                    f"give at_step up to {self.steps - 1}, or more steps",
                )
            try:
                links_of(self.cluster, rack=event.rack, host=event.host)
            except LabError as stranger:
                raise ScenarioError(f"{event}: {stranger.problem}", stranger.remedy) from None
        self._refuse_unsuitable_job()
        if not self.counted(event.at_step for event in self.events):
            raise ScenarioError(
                f"none of {self.steps} steps counts: {self.warmup} warm up, and so do "
                f"{SETTLING} after each event",
                "give more steps, or a shorter warmup",
            )

    def counted(self, happened: Iterable[int | None]) -> list[int]:
        """The steps, from 1, that count for the time of a step, if events came after these; None
        for one that hasn't come, or nobody knows when."""
        after = [step for step in happened if step is not None]
        return [
            step
            for step in range(self.warmup + 1, self.steps + 1)
            if not any(event < step <= event + SETTLING for event in after)
        ]

    def _refuse_unsuitable_job(self) -> None:
        if self.target is not None and self.target.metric != self.job.metric:
            raise ScenarioError(
                f"{self.job.name} isn't judged by its {self.target.metric}",
                f'write target = {{ metric = "{self.job.metric}", value = ... }}',
            )
        batch, workers = self.batch or self.job.batch, self.cluster.workers
        if batch < workers:
            raise ScenarioError(
                f"a batch of {batch} has no sample for each of {workers} workers",
                f"write batch = {workers} or more under [workload]",
            )
