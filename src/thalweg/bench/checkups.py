"""A look at the set-up by all workers of a run, started here or by a launcher."""

from __future__ import annotations

from typing import Any

from thalweg.bench.site import Site
from thalweg.doctor.examine import Diagnosis, Progress, examine
from thalweg.errors import WorkerFailed
from thalweg.runtime.supervisor import Report, run_workers

LIMIT = 600.0  # seconds for all of it


def examine_at(site: Site, timeout: float, progress: Progress) -> Diagnosis:
    """By forks of this process at that site; one that is killed is found missing."""

    def work(rank: int, report: Report) -> dict[str, Any]:
        def told(done: int, total: int) -> None:
            report({"done": done, "total": total})

        return examine(timeout, told).packed()

    def heard(rank: int, message: dict[str, Any]) -> None:
        progress(message["done"], message["total"])

    results = run_workers(
        site.workers, work, timeout=LIMIT, on_message=heard, place=site.place, survives=True
    )
    for result in results:  # rank 0's, or of those who couldn't reach it
        if result and result["tells"]:
            return Diagnosis.unpacked(result)
    raise WorkerFailed("no worker tells what it found", "look at their output above")
