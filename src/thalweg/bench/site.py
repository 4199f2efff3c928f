"""Where something is measured: local workers, or a lab that is there meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from thalweg.facts import Cluster
from thalweg.runtime.place import HERE, Place

if TYPE_CHECKING:
    from thalweg.lab.fabric import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
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
        return f"{self.workers} workers in a lab of {shape} hosts"


@contextmanager
def lab_site(cluster: Cluster, progress: Progress) -> Iterator[Site]:
    """A lab like this cluster, until the context ends; without what the kernel lacks."""
    from thalweg.lab import Lab  # where there is one

    lab = Lab.of(cluster, without_netem="go on")
    try:
        lab.up(progress=progress)
        yield Site(workers=cluster.workers, place=lab.place, cluster=lab.cluster, notes=lab.notes)
    finally:
        lab.down()
