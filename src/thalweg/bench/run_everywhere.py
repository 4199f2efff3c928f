"""The same work on every worker of a deployment, with the results brought to one process."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from thalweg import lab as labs
from thalweg.errors import RunError
from thalweg.facts import Cluster, counted
from thalweg.launch.launcher_variables import read_rank_assignment
from thalweg.launch.place import HERE, Place
from thalweg.launch.supervisor import SendMessage, run_workers

Result = dict[str, Any]
Report = Callable[..., None]
Progress = Callable[[int, int], None]
"""Called with the number of steps, repetitions or trials that are done, and their total number."""
NotedProgress = Callable[[int, int, str], None]
"""Called with these two numbers, and a description of the present work."""
ALONE = "alone"  # `RankAssignment.launcher` of a process that no launcher has started


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """The place of a run's workers: this machine, a lab, or wherever a launcher started them."""

    workers: int
    place: Place = HERE
    cluster: Cluster | None = None  # known only where the rates of its links are real
    notes: list[str] = field(default_factory=list)
    launcher: str | None = None  # set if this process is itself one of the workers

    @classmethod
    def of_lab(cls, lab: labs.Lab) -> Deployment:
        return cls(
            workers=lab.cluster.workers, place=lab.place, cluster=lab.cluster, notes=lab.notes
        )

    @classmethod
    def of_this_process(cls) -> Deployment:
        """The deployment of which this process is a worker; of one worker without a launcher."""
        assignment = read_rank_assignment(os.environ)
        return cls(workers=assignment.size, launcher=assignment.launcher)

    @property
    def declared(self) -> Cluster:
        """The cluster as its workers know it."""
        return self.cluster or Cluster.flat(self.workers)

    @property
    def text(self) -> str:
        """A description of the deployment for headings."""
        if self.launcher is not None:
            started = f"{self.workers} workers, started by {self.launcher}"
            return "this host, alone" if self.launcher == ALONE else started
        if self.cluster is None:
            return f"{self.workers} local workers"
        racks = [len(rack.hosts) for rack in self.cluster.racks]
        shape = " + ".join(map(str, racks)) if len({*racks}) > 1 else f"{len(racks)} x {racks[0]}"
        return f"{counted(self.workers, 'worker')} in a lab of {shape} hosts"


def run_everywhere(
    deployment: Deployment,
    work: Callable[[int, Report], Result],
    progress: Report,
    *,
    timeout: float | None,
    collect_timeout: float | None = None,
    reporting_rank: int = 0,
    **options: Any,
) -> list[Result]:
    """Run `work(rank, report)` on every worker and return the results by rank.

    Without a launcher the workers are forks of this process. `progress` is called with the reports
    of `reporting_rank`; the run fails after `timeout` seconds; `options` are those of
    `run_workers`.

    Under a launcher this process is one of the workers, and runs the work itself. Every rank calls
    its own `progress`; `timeout`, `reporting_rank` and `options` have no effect. The only result is
    that of this rank; with `collect_timeout` seconds rank 0 gets the results of all ranks, and the
    other ranks get none.
    """
    if deployment.launcher is not None:
        own = work(read_rank_assignment(os.environ).rank, progress)
        return [own] if collect_timeout is None else _collect(own, collect_timeout)

    def forked(rank: int, send: SendMessage) -> Result:
        def report(*figures: Any) -> None:
            if rank == reporting_rank:
                send({"report": figures})

        return work(rank, report)

    return run_workers(
        deployment.workers,
        forked,
        timeout=timeout,
        on_message=lambda rank, message: progress(*message["report"]),
        place=deployment.place,
        **options,
    )


def _collect(own: Result, seconds: float) -> list[Result]:
    """Publish this rank's result in the store; return those of all ranks on rank 0."""
    from thalweg.members.world import World  # torch takes a second: not at import

    world = World.join(seconds)
    world.put(f"result/{world.rank}", json.dumps(own))
    abort_flag = world.abort_flag()
    results: list[Result] = []
    if world.rank == 0:
        texts = world.read_all(
            "result",
            abort_flag,
            lambda rank: RunError(
                f"rank {rank} sent no result within {seconds:g} s", "see its output"
            ),
        )
        results = [json.loads(text) for text in texts.values()]
    world.leave(seconds, abort_flag)
    return results
