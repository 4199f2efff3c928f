"""What `--model` names: a well-known model, one of our jobs, or a workload file."""

from __future__ import annotations

from pathlib import Path

from thalweg.declarations import listed, nearest
from thalweg.errors import WorkloadError
from thalweg.facts import MODELS, Workload, model_named, read_workload


def workload_of(text: str) -> Workload:
    """WorkloadError if nothing is called so."""
    name = text.strip()
    if name.endswith(".toml"):
        return read_workload(Path(name))
    return model_named(name) if name in MODELS else _of_job(name)


def _of_job(name: str) -> Workload:
    from thalweg.workloads import all_jobs, describe, find_job  # torch takes a second

    known = [*MODELS, *all_jobs()]
    if name.split("(")[0].strip() not in known and not name.endswith(".py"):
        raise WorkloadError(
            f"there is no model {name!r}",
            f"there are {listed(known)}, or name a workload file (TOML)" + nearest(name, known),
        )
    job = find_job(name)
    return describe(job.name, job.model())
