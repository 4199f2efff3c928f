"""Does a plan train as DDP does? The same job twice, from the same start on the same samples.

Exact plans must end with the same bits on all ranks, and within a relative 1e-5 of DDP's
parameters: sums are taken in another order, so the last bits differ. Parameters of two bytes round
at every step to 2^-9 or 2^-12 of their value; there the plan has to be as close to DDP as DDP is
to itself in float32. Plans that are lossy or let replicas differ can't be held to that: their
metric on held-out samples, of the replicas' mean, must come within a tenth of DDP's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import nn

from thalweg.bench.site import Deployment, run_on_all
from thalweg.bench.training import Recipe, train
from thalweg.catalog import default_catalog
from thalweg.declarations import Promise
from thalweg.presets import BASELINE_PLAN
from thalweg.workloads import Job

VERIFY_TOLERANCE_RATIO = 1e-5
METRIC_TOLERANCE_RATIO = 0.1


@dataclass(frozen=True, slots=True)
class Variant:
    """A way of training that plans have got wrong elsewhere."""

    name: str
    change: Callable[[Recipe], Recipe]


VARIANTS = (
    Variant("plain", lambda recipe: recipe),
    Variant("accumulation", lambda recipe: replace(recipe, accumulate=2)),
    Variant("clipping", lambda recipe: replace(recipe, clip=0.5)),
    Variant("frozen layer", lambda recipe: replace(recipe, frozen=True)),
    Variant("bf16 parameters", lambda recipe: replace(recipe, dtype=torch.bfloat16)),
)
Progress = Callable[[int, int], None]


def verify(
    job: Job,
    syncs: Sequence[str],
    *,
    workers: int,
    recipe: Recipe,
    variants: Sequence[Variant] = VARIANTS,
    progress: Progress = lambda done, total: None,
    timeout: float,
) -> list[dict[str, Any]]:
    """A row for each variant and plan; `ok` says whether it keeps its promise."""
    trainings = len(variants) * (len(syncs) + 1)

    def work(rank: int, tell: Progress) -> dict[str, Any]:
        done = count(1)
        rows = _compare(job, syncs, recipe, variants, lambda: tell(next(done), trainings))
        return {"rows": rows}

    by_rank = run_on_all(Deployment(workers=workers), work, progress, limit=timeout)
    return [
        _row([result["rows"][index] for result in by_rank])
        for index in range(len(variants) * len(syncs))
    ]


def _row(by_rank: list[dict[str, Any]]) -> dict[str, Any]:
    row = dict(by_rank[0])
    prints = [rank.pop("fingerprint") for rank in by_rank]
    row.pop("fingerprint", None)
    row["identical"] = len(set(prints)) == 1
    worst = max(rank["difference"] for rank in by_rank)
    row["difference"] = worst
    if row["promise"] == Promise.EXACT.value:
        row["ok"] = row["identical"] and worst <= row["tolerance"]
    else:
        apart = abs(row["metric"] - row["ddp_metric"])
        row["ok"] = apart <= METRIC_TOLERANCE_RATIO * abs(row["ddp_metric"])
    return row


def _compare(
    job: Job,
    syncs: Sequence[str],
    recipe: Recipe,
    variants: Sequence[Variant],
    done: Callable[[], None],
) -> list[dict[str, Any]]:
    """In a worker."""
    rows = []
    catalog = default_catalog()
    for variant in variants:
        changed = variant.change(recipe)
        reference = train(job, BASELINE_PLAN, changed)
        done()
        tolerance = VERIFY_TOLERANCE_RATIO
        if changed.dtype is not torch.float32:
            full = train(job, BASELINE_PLAN, replace(changed, dtype=torch.float32))
            tolerance = difference(reference.model, full.model)
        for sync in syncs:
            outcome = train(job, sync, changed)
            done()
            rows.append(
                {
                    "variant": variant.name,
                    "sync": sync,
                    "promise": catalog.guarantee(catalog.plan(sync)).promise.value,
                    "difference": difference(outcome.model, reference.model),
                    "tolerance": tolerance,
                    "metric": outcome.metric,
                    "ddp_metric": reference.metric,
                    "fingerprint": outcome.fingerprint,
                }
            )
    return rows


def difference(model: nn.Module, reference: nn.Module) -> float:
    """|x - y| / |y| over all parameters together."""
    apart = whole = 0.0
    for own, other in zip(_values(model), _values(reference), strict=True):
        apart += float((own - other).square().sum())
        whole += float(other.square().sum())
    return float((apart / whole) ** 0.5)


def _values(model: nn.Module) -> Iterator[torch.Tensor]:
    return (parameter.detach().double() for parameter in model.parameters())
