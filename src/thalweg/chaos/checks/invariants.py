"""All checks that the history of a run must pass under its plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from thalweg.catalog import default_catalog, parse_plan
from thalweg.chaos.checks import (
    gradient_counts,
    liveness,
    membership_epochs,
    replica_state,
    step_order,
)
from thalweg.chaos.history import MAX_RECORDS, History, Lost, Problem, Violation
from thalweg.chaos.recovery_times import FaultTimes
from thalweg.declarations import Promise
from thalweg.engine.tree_node import MAX_RESULT_HISTORY_STEPS
from thalweg.plan import Plan
from thalweg.redundancy import fastest, is_compensated, is_relayed, waits_for_nobody
from thalweg.schedules.shuffle.contended_links import MAX_WINDOW_STEPS


def violations(
    history: History,
    faults: list[FaultTimes],
    *,
    sync: str,
    batch: int,
    expected: Iterator[tuple[str, int]],
    recovery_limit: float,
) -> list[Violation]:
    """The violations in a history. `expected` are the digest and the checksum of each step; the
    recovery limit is in seconds."""
    plan = parse_plan(sync)
    promise = default_catalog().guarantee(plan).promise
    staleness = plan.cadence.staleness
    steps = max((commit.step for commit in history.commits), default=0)
    states = list(islice(expected, steps))
    digests = {step: digest for step, (digest, _) in enumerate(states, 1)}
    checksums = {step: checksum for step, (_, checksum) in enumerate(states, 1)}
    found = [Violation("lost", record.reason) for record in history.of(Lost)]
    if history.is_full:
        text = f"records after the first {MAX_RECORDS} were not checked; give fewer faults"
        found.append(Violation("history", text))
    found += named(
        "members", membership_epochs.one_epoch_at_a_time(history, under_way=_under_way(plan))
    )
    found += named("steps", step_order.in_order(history, jumps=waits_for_nobody(plan)))
    if not waits_for_nobody(plan):
        found += named("samples", step_order.batches_whole(history, batch, checksums))
    if plan.averages_parameters:
        found += named("mean", replica_state.mean_preserved(history)) + named(
            "drift", replica_state.close(history)
        )
    elif staleness is not None:
        found += named("counted", gradient_counts.once_each(history))
        found += named("counted", gradient_counts.within_bounds(history, faults, staleness))
    else:
        found += named("equal", replica_state.equal(history))
    if is_compensated(plan):
        found += named(
            "counted",
            gradient_counts.counted_now_or_next_step(history, lambda ranks: fastest(plan, ranks)),
        )
    if promise is Promise.EXACT:
        found += named("foretold", replica_state.as_expected(history, digests))
    found += named("progress", liveness.progress(faults, recovery_limit))
    found += named(
        "culprit", liveness.causes_reported(history, faults, missed=not is_relayed(plan))
    )
    found += named("checkpoints", liveness.checkpoints(history, faults))
    return found


def named(check: str, problems: Iterable[Problem]) -> list[Violation]:
    """The problems that the check of this name has found, as violations."""
    return [Violation(check, *((p,) if isinstance(p, str) else p)) for p in problems]


def _under_way(plan: Plan) -> int:
    """The number of steps that a rank may take without a message from the others: until the next
    averaging or, under a plan that waits for no rank, those whose results it has already."""
    if waits_for_nobody(plan):
        return MAX_RESULT_HISTORY_STEPS
    topology = default_catalog().topologies.get(plan.topology.name)  # auto has none
    grouped = topology is not None and topology.groups is not None
    window = MAX_WINDOW_STEPS if grouped else 1
    return max(plan.cadence.every, window) + plan.cadence.delay
