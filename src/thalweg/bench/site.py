"""Where something is measured: local workers, or a lab that is there meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from thalweg.facts import Cluster, counted
from thalweg.launch.place import HERE, Place
from thalweg.launch.supervisor import SendMessage, run_workers

if TYPE_CHECKING:
    from thalweg.lab import Lab


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    workers: int
    place: Place = HERE
    cluster: Cluster | None = None  # as its workers are told, if the rates of its links are real
    notes: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """In words, for headings."""
        if self.cluster is None:
            return f"{self.workers} local workers"
        racks = [len(rack.hosts) for rack in self.cluster.racks]
        shape = (
            f"{len(racks)} x {racks[0]}" if len(set(racks)) == 1 else " + ".join(map(str, racks))
        )
        return f"{counted(self.workers, 'worker')} in a lab of {shape} hosts"


def run_on_all(
    deployment: Deployment,
    work: Callable[[int, Callable[..., None]], dict[str, Any]],
    progress: Callable[..., None],
    *,
    limit: float,
    survives: bool = False,
) -> list[dict[str, Any]]:
    """What every worker's `work` returned, by forks of this process at that site. Work is called
    with its rank and with a function that tells how far it is; what rank 0 tells is passed on to
    `progress`. After `limit` seconds it fails; one that is killed too, unless the others are to
    survive it."""

    def told(rank: int, report: SendMessage) -> dict[str, Any]:
        return work(rank, lambda *figures: report({"told": figures}) if rank == 0 else None)

    return run_workers(
        deployment.workers,
        told,
        timeout=limit,
        on_message=lambda rank, message: progress(*message["told"]),
        place=deployment.place,
        survives=survives,
    )


def lab_deployment(lab: Lab) -> Deployment:
    return Deployment(
        workers=lab.cluster.workers, place=lab.place, cluster=lab.cluster, notes=lab.notes
    )
