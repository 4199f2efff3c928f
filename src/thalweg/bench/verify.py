"""A comparison of plans with DDP: the same job from the same start on the same samples.

Exact plans must end with bitwise identical replicas, and within a relative 1e-5 of DDP's
parameters: sums are taken in another order, so the last bits differ. Parameters of two bytes are
rounded at every step to 2^-9 or 2^-12 of their value; there the plan has to be as close to DDP as
DDP is to itself in float32. Lossy and eventual plans can't be held to that: their metric on
held-out samples, of the replicas' mean, must come within a tenth of DDP's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import nn

from thalweg.bench.run_everywhere import Deployment, Progress, Report, Result, run_everywhere
from thalweg.bench.training import Recipe, flat, train
from thalweg.catalog import default_catalog
from thalweg.declarations import Promise
from thalweg.presets import BASELINE_PLAN
from thalweg.workloads import Job

VERIFY_TOLERANCE_RATIO = 1e-5
METRIC_TOLERANCE_RATIO = 0.1


VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "accumulation": {"accumulate": 2},
    "clipping": {"clip": 0.5},
    "frozen layer": {"frozen": True},
    "bf16 parameters": {"dtype": torch.bfloat16},
}
"""The training options whose handling by a plan is verified, by name."""


def verify(
    job: Job,
    syncs: Sequence[str],
    *,
    workers: int,
    recipe: Recipe,
    variants: Collection[str] = VARIANTS,
    progress: Progress = lambda done, total: None,
    timeout: float,
) -> list[dict[str, Any]]:
    """A row for each variant and plan; `ok` says whether it keeps its promise."""
    trainings = len(variants) * (len(syncs) + 1)

    def work(rank: int, report: Report) -> Result:
        done = count(1)
        return {
            "rows": _compare(job, syncs, recipe, variants, lambda: report(next(done), trainings))
        }

    by_rank = run_everywhere(Deployment(workers=workers), work, progress, timeout=timeout)
    return [
        _row([result["rows"][index] for result in by_rank])
        for index in range(len(variants) * len(syncs))
    ]


def _row(by_rank: list[dict[str, Any]]) -> dict[str, Any]:
    row = {key: value for key, value in by_rank[0].items() if key != "fingerprint"}
    row["identical"] = len({rank["fingerprint"] for rank in by_rank}) == 1
    row["difference"] = max(rank["difference"] for rank in by_rank)
    if row["promise"] == Promise.EXACT.value:
        row["ok"] = row["identical"] and row["difference"] <= row["tolerance"]
    else:
        apart = abs(row["metric"] - row["ddp_metric"])
        row["ok"] = apart <= METRIC_TOLERANCE_RATIO * abs(row["ddp_metric"])
    return row


def _compare(
    job: Job,
    syncs: Sequence[str],
    recipe: Recipe,
    variants: Collection[str],
    done: Callable[[], None],
) -> list[dict[str, Any]]:
    """Train every variant under DDP and under each plan, as one rank."""
    rows = []
    catalog = default_catalog()
    for variant in variants:
        changed = replace(recipe, **VARIANTS[variant])
        baseline_model, baseline = train(job, BASELINE_PLAN, changed)
        done()
        tolerance = VERIFY_TOLERANCE_RATIO
        if changed.dtype is not torch.float32:
            full, _ = train(job, BASELINE_PLAN, replace(changed, dtype=torch.float32))
            tolerance = difference(baseline_model, full)
        for sync in syncs:
            model, result = train(job, sync, changed)
            done()
            rows.append(
                {
                    "variant": variant,
                    "sync": sync,
                    "promise": catalog.guarantee(catalog.plan(sync)).promise.value,
                    "difference": difference(model, baseline_model),
                    "tolerance": tolerance,
                    "metric": result["metric"],
                    "ddp_metric": baseline["metric"],
                    "fingerprint": result["fingerprint"],
                }
            )
    return rows


def difference(model: nn.Module, reference: nn.Module) -> float:
    """The relative difference |x - y| / |y| over all parameters together."""
    x, y = flat(model), flat(reference)
    return float((x - y).norm() / y.norm())
