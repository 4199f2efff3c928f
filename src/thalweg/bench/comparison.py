"""A scenario's plans against one another: the same job, the same start, the same mishaps.

Every run has fresh workers. The plans take turns and the whole is repeated, so that the noise of
the machine meets them all alike. A plan that fails in the scenario is left out of the remaining
turns, and its row says why; the others go on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import monotonic
from typing import Any

from thalweg.bench.figures import Trial, row_of, row_of_failure
from thalweg.bench.injection import Injection
from thalweg.bench.jobs import result_of
from thalweg.bench.scenario import Scenario
from thalweg.bench.training import Recipe, train
from thalweg.catalog import default_catalog, parse_plan
from thalweg.declarations import Promise
from thalweg.errors import LabError, ThalwegError
from thalweg.lab import Event
from thalweg.runtime.supervisor import Report, Work
from thalweg.training.averager import is_native

Row = dict[str, Any]
OnMessage = Callable[[int, dict[str, Any]], None]
RunAll = Callable[[Work, OnMessage], Sequence[Mapping[str, Any] | None]]
"""Runs fresh workers in the scenario's cluster and returns their results by rank; nothing, or
None, for one that an event has ended."""
Progress = Callable[[int, int, str], None]
"""Called with how many steps are done, of how many, and under which plan."""
TIMEOUT = "5min"  # for a worker to wait for another


def compare(scenario: Scenario, run_all: RunAll, progress: Progress) -> list[Row]:
    """A row for each plan, in the scenario's order."""
    trials: dict[str, list[Trial]] = {sync: [] for sync in scenario.syncs}
    errors: dict[str, str] = {}
    total = scenario.repeats * len(scenario.syncs) * scenario.steps
    done = 0
    for repeat in range(scenario.repeats):
        for sync in scenario.syncs:
            if sync not in errors:
                watch = _Watch(scenario.events, partial(_tell, progress, done, total, sync))
                try:
                    trials[sync].append(_trial(scenario, sync, repeat, run_all, watch))
                except LabError:
                    raise
                except ThalwegError as error:
                    errors[sync] = str(error)
            done += scenario.steps
    return [_row(scenario, sync, trials[sync], errors.get(sync)) for sync in scenario.syncs]


def _tell(progress: Progress, before: int, total: int, sync: str, step: int) -> None:
    progress(before + step, total, sync)


def _trial(scenario: Scenario, sync: str, repeat: int, run_all: RunAll, watch: _Watch) -> Trial:
    recipe = Recipe(
        steps=scenario.steps,
        batch=scenario.batch,
        timeout=TIMEOUT,
        evaluate_every=scenario.evaluate_every if scenario.target else None,
        injection=Injection(compute=scenario.compute, cluster=scenario.cluster, seed=repeat),
    )

    def work(rank: int, report: Report) -> dict[str, Any]:
        return result_of(train(scenario.job, sync, recipe, report))

    results = run_all(work, watch.hear)
    alive = {rank: result for rank, result in enumerate(results) if result}
    return Trial(results=alive, happened={rank: watch.happened(rank) for rank in alive})


class _Watch:
    """Hears every rank's steps, and so knows at which one each event came."""

    def __init__(self, events: Sequence[Event], progress: Callable[[int], None]) -> None:
        self._events = events
        self._progress = progress
        self._start = monotonic()
        self._heard: dict[int, list[tuple[float, int]]] = {}  # by rank: when it ended a step

    def hear(self, rank: int, message: Mapping[str, Any]) -> None:
        step = message["step"]
        self._heard.setdefault(rank, []).append((monotonic() - self._start, step))
        self._progress(step)

    def happened(self, rank: int) -> list[int | None]:
        """After how many of this rank's steps each event came; None if it hasn't."""
        heard = self._heard.get(rank, [])
        return [_steps_before(event, heard) for event in self._events]


def _steps_before(event: Event, heard: Sequence[tuple[float, int]]) -> int | None:
    ended, last = heard[-1] if heard else (0.0, 0)
    if event.at is None:
        return event.at_step if (event.at_step or 0) < last else None
    if event.at.seconds >= ended:
        return None
    return max((step for at, step in heard if at <= event.at.seconds), default=0)


def _row(scenario: Scenario, sync: str, trials: Sequence[Trial], error: str | None) -> Row:
    row = row_of_failure(sync, error) if error else row_of(sync, scenario, trials)
    plan, catalog = parse_plan(sync), default_catalog()
    promise = catalog.guarantee(plan).promise
    if not error and promise is Promise.EXACT and not row["replicas_equal"]:
        row["error"] = "replicas differ under an exact plan; please report this"
    transport = "gloo" if is_native(plan) else plan.settings.transport or "zeromq"
    return {**row, "promise": promise.value, "transport": transport}
