"""A probe by all workers of a run, started here or by a launcher."""

from __future__ import annotations

import os
from typing import Any

from thalweg.bench.site import Site
from thalweg.facts import Cluster
from thalweg.probing import Probed, measure
from thalweg.probing.measuring import Progress
from thalweg.runtime.launch import find_seat
from thalweg.runtime.supervisor import Report, run_workers

LIMIT = 3600.0  # seconds for all of it


def probe_at(
    site: Site, declared: Cluster | None, transport: str, timeout: str, progress: Progress
) -> Probed:
    """By forks of this process at that site."""

    def work(rank: int, report: Report) -> dict[str, Any]:
        def told(done: int, total: int) -> None:
            report({"done": done, "total": total})

        found = measure(declared, transport=transport, timeout=timeout, progress=told)
        return found.packed() if rank == 0 else {}

    def heard(rank: int, message: dict[str, Any]) -> None:
        progress(message["done"], message["total"])

    results = run_workers(site.workers, work, timeout=LIMIT, on_message=heard, place=site.place)
    return Probed.unpacked(results[0])


def probe_here(
    declared: Cluster | None, transport: str, timeout: str, progress: Progress
) -> Probed | None:
    """As one worker of a launcher's; what was found on rank 0, None on the others."""
    found = measure(declared, transport=transport, timeout=timeout, progress=progress)
    return found if find_seat(os.environ).rank == 0 else None
