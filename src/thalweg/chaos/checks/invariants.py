"""All that must hold of a history, by what the plan promises."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from thalweg.catalog import default_catalog, parse_plan
from thalweg.chaos.checks import (
    gradient_counts,
    liveness,
    membership_epochs,
    replica_state,
    step_order,
)
from thalweg.chaos.history import MAX_EVENTS, History, Lost, Violation
from thalweg.chaos.recovery_times import FaultTimes
from thalweg.declarations import Promise
from thalweg.engine.tree_node import MAX_RESULT_HISTORY_STEPS
from thalweg.plan import Plan
from thalweg.redundancy import fastest, is_compensated, is_relayed, waits_for_nobody
from thalweg.schedules.shuffle.contended_links import MAX_WINDOW_STEPS


def violations(
    history: History,
    felt: list[FaultTimes],
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
    staleness = plan.cadence.staleness
    furthest = max((commit.step for commit in history.commits), default=0)
    told = list(islice(foretold, furthest))
    digests = {step: digest for step, (digest, _) in enumerate(told, 1)}
    checksums = {step: checksum for step, (_, checksum) in enumerate(told, 1)}
    found = [Violation(check="lost", text=event.reason) for event in history.of(Lost)]
    if history.is_full:
        text = (
            f"it holds {MAX_EVENTS} events, and the later ones were not checked; give fewer faults"
        )
        found.append(Violation(check="history", text=text))
    found += membership_epochs.one_epoch_at_a_time(history, under_way=_under_way(plan))
    found += step_order.in_order(history, jumps=waits_for_nobody(plan))
    if not waits_for_nobody(plan):
        found += step_order.batches_whole(history, batch, checksums)
    if plan.averages_parameters:
        found += replica_state.mean_preserved(history) + replica_state.close(history)
    elif staleness is not None:
        found += gradient_counts.once_each(history)
        found += gradient_counts.within_bounds(history, felt, staleness)
    else:
        found += replica_state.equal(history)
    if is_compensated(plan):
        found += gradient_counts.counted_now_or_next_step(
            history, lambda ranks: fastest(plan, ranks)
        )
    if promise is Promise.EXACT:
        found += replica_state.as_expected(history, digests)
    found += liveness.progress(felt, bound)
    found += liveness.causes_reported(history, felt, missed=not coded)
    found += liveness.checkpoints(history, felt)
    return found


def _under_way(plan: Plan) -> int:
    """How many steps a rank may take without a word from the others: until the next meeting, or
    under a plan that waits for nobody, those of which it has the results already."""
    if waits_for_nobody(plan):
        return MAX_RESULT_HISTORY_STEPS
    topology = default_catalog().topologies.get(plan.topology.name)  # auto has none
    meets = topology is not None and topology.groups is not None
    apart = MAX_WINDOW_STEPS if meets else 1  # that a contended pair is given for one averaging
    return max(plan.cadence.every, apart) + plan.cadence.delay
