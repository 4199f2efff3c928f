"""All that must hold of a history, by what the plan promises."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from thalweg.catalog import default_catalog, parse_plan
from thalweg.chaos import checkpoints, promptness, replicas, steps
from thalweg.chaos.history import History, Lost
from thalweg.chaos.timing import Felt
from thalweg.chaos.verdicts import Violation
from thalweg.coding import is_relayed
from thalweg.declarations import Promise


def violations(
    history: History,
    felt: list[Felt],
    *,
    sync: str,
    batch: int,
    foretold: Iterator[tuple[str, int]],
    bound: float,
) -> list[Violation]:
    """`foretold` are digests and checksums, step after step; `bound` is in seconds."""
    plan = parse_plan(sync)
    promise = default_catalog().guarantee(plan).promise
    coded = is_relayed(plan)
    furthest = max((commit.step for commit in history.commits), default=0)
    told = list(islice(foretold, furthest))
    digests = {step: digest for step, (digest, _) in enumerate(told, 1)}
    checksums = {step: checksum for step, (_, checksum) in enumerate(told, 1)}
    found = [Violation(check="lost", text=event.reason) for event in history.of(Lost)]
    found += steps.in_order(history, jumps=coded)
    if not coded:
        found += steps.batches_whole(history, batch, checksums)
    if plan.averages_parameters:
        found += replicas.mean_kept(history) + replicas.close(history)
    else:
        found += replicas.equal(history)
    if promise is Promise.EXACT:
        found += replicas.as_foretold(history, digests)
    found += promptness.progress(felt, bound)
    found += promptness.culprits(history, felt, missed=not coded)
    found += checkpoints.told(history, felt)
    return found
