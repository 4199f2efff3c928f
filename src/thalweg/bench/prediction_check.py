"""What a scenario's plans are predicted to take, from a probe and a profile in its own place.

Before plans are compared, fresh workers train a few steps without meeting (what computing takes,
when gradients are ready, who is late), and then measure links, messages and codecs together. Every
plan is predicted from that alone: nothing of the runs that are compared is known to it.

An event that changes a link's rate changes the prediction from its step on, in the proportion that
was measured; those at step 0 come before the probe, which has seen them. Where something else
happens, nothing is predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any, Literal

from thalweg.bench.scenario import Scenario
from thalweg.catalog import parse_plan
from thalweg.declarations import Promise
from thalweg.facts import Cluster, Duplex, Link, Machine, Rate, Workload
from thalweg.lab import Event
from thalweg.plan import Plan
from thalweg.predict import Breakdown, Estimate, predict

RATE_EVENT_ACTIONS = ("degrade", "restore")  # events that change nothing but a link's rate
MAX_PREDICTION_ERROR_RATIO = 0.15
STEADY_TAIL_STEPS = 25  # steps at the end, when `auto` has chosen
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioPrediction:
    """What was found out before; `declared` is what the workers are told of the links."""

    declared: Cluster
    cluster: Cluster
    machine: Machine
    workload: Workload

    def of(self, scenario: Scenario, sync: str) -> Estimate | None:
        """The mean over the steps that count."""
        if any(
            event.action not in RATE_EVENT_ACTIONS or event.at_step is None
            for event in scenario.events
        ):
            return None
        counted = scenario.counted(event.at_step for event in scenario.events)
        phases = [
            (cluster, [step for step in steps if step in counted])
            for cluster, steps in self._phases(scenario)
        ]
        plan = parse_plan(sync)
        adjusts = bool(plan.topology.arguments.get("adjust"))  # to what has happened
        estimates = [
            predict(
                plan,
                cluster,
                self.workload,
                self.machine,
                declared=None if adjusts and number else self.declared,
            )
            for number, (cluster, _) in enumerate(phases)
        ]
        return _mean(
            [
                (_as_often(plan, steps, estimate), len(steps))
                for (_, steps), estimate in zip(phases, estimates, strict=True)
                if steps
            ]
        )

    def _phases(self, scenario: Scenario) -> Iterator[tuple[Cluster, range]]:
        """The links between two events, and the steps there."""
        declared = self.declared.rates()
        then = dict(declared)  # when it was measured
        for event in scenario.events:
            then |= {} if event.at_step else self._declared_after(event)
        rates = self._rates(then)
        full = {
            link: rates[link].bits_per_second / then[link].bits_per_second * rate.bits_per_second
            for link, rate in declared.items()
        }
        first = 1
        for event in sorted(scenario.events, key=lambda event: event.at_step or 0):
            if not event.at_step:
                continue
            yield with_rates(self.cluster, rates), range(first, event.at_step + 1)
            first = event.at_step + 1
            for link, rate in self._declared_after(event).items():
                change = rate.bits_per_second / declared[link].bits_per_second
                rates[link] = Rate(full[link] * change)
        yield with_rates(self.cluster, rates), range(first, scenario.steps + 1)

    def _rates(self, then: Mapping[Link, Rate]) -> dict[Link, Rate]:
        """As measured; of a link that was never full, what others of its rate would give."""
        found = self.cluster.rates()
        usual = median(found[link].bits_per_second / then[link].bits_per_second for link in found)
        return {
            link: found.get(link, Rate(rate.bits_per_second * usual)) for link, rate in then.items()
        }

    def _declared_after(self, event: Event) -> dict[Link, Rate]:
        """Of the links that it happens to."""
        declared = self.declared.rates()
        return {
            link: declared[link] if event.rate is None else event.rate
            for link in event.links(self.declared)
        }


def _as_often(plan: Plan, steps: Sequence[int], estimate: Estimate) -> Estimate:
    """With as many exchanges as there are at these steps, of those that come every few steps."""
    every, parts = plan.cadence.every, estimate.parts
    if every == 1 or plan.cadence.inside:
        return estimate
    often = every * fmean(step % every == 0 for step in steps)
    changed = replace(parts, transfer=parts.transfer * often)
    more = changed.seconds - parts.seconds
    return replace(estimate, parts=changed, low=estimate.low + more, high=estimate.high + more)


def _mean(estimates: Sequence[tuple[Estimate, int]]) -> Estimate:
    """By how many steps each holds for."""
    steps = sum(number for _, number in estimates)

    def mean(figure: Callable[[Estimate], float]) -> float:
        return sum(figure(estimate) * number for estimate, number in estimates) / steps

    return replace(
        estimates[0][0],
        parts=Breakdown(
            compute=mean(lambda one: one.parts.compute),
            encode=mean(lambda one: one.parts.encode),
            decode=mean(lambda one: one.parts.decode),
            transfer=mean(lambda one: one.parts.transfer),
            waiting=mean(lambda one: one.parts.waiting),
        ),
        low=mean(lambda one: one.low),
        high=mean(lambda one: one.high),
    )


def with_rates(cluster: Cluster, rates: dict[Link, Rate]) -> Cluster:
    """The same cluster with these rates of its links."""

    def duplex(kind: Literal["nic", "uplink"], owner: str) -> Duplex:
        return Duplex(rates[Link(kind, owner, "out")], rates[Link(kind, owner, "in")])

    racks = tuple(
        replace(
            rack,
            uplink=duplex("uplink", rack.name)
            if Link("uplink", rack.name, "out") in rates
            else None,
            hosts=tuple(replace(h, nic=duplex("nic", h.name)) for h in rack.hosts),
        )
        for rack in cluster.racks
    )
    return replace(cluster, racks=racks)


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionOutcome:
    """A prediction, and what was measured afterwards."""

    scenario: str
    sync: str
    predicted: float
    low: float
    high: float
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def covered(self) -> bool:
        return self.low <= self.measured <= self.high


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Of many: the median of the errors' sizes, how many are within 15 %, and in their interval."""

    predictions: int
    median: float
    within: float
    covered: float

    @classmethod
    def of(cls, checked: Sequence[PredictionOutcome]) -> Accuracy:
        return cls(
            predictions=len(checked),
            median=median(abs(one.error) for one in checked),
            within=fmean(abs(one.error) <= MAX_PREDICTION_ERROR_RATIO for one in checked),
            covered=fmean(one.covered for one in checked),
        )


def auto_plans(scenario: Scenario) -> list[str]:
    """The plans that are `auto`, which has none of its own."""
    return [sync for sync in scenario.syncs if parse_plan(sync).topology.name == "auto"]


def prediction_outcomes(scenario: Scenario, rows: Sequence[Row]) -> list[PredictionOutcome]:
    """Of all plans that were named and predicted."""
    automatic = auto_plans(scenario)
    return [
        PredictionOutcome(
            scenario=scenario.name,
            sync=row["sync"],
            predicted=row["predicted_seconds_per_step"],
            low=row["predicted_low"],
            high=row["predicted_high"],
            measured=row["seconds_per_step"],
        )
        for row in rows
        if row["sync"] not in automatic
        and row["seconds_per_step"]
        and row.get("predicted_seconds_per_step")
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoVsBest:
    """What `auto` came to, beside the best of the named plans that it might have taken; both by
    their last steps."""

    scenario: str
    sync: str
    chosen: str
    seconds: float
    best: str
    best_seconds: float

    @property
    def behind(self) -> float:
        return self.seconds / self.best_seconds - 1


def auto_choices(scenario: Scenario, rows: Sequence[Row]) -> list[AutoVsBest]:
    """Of all `auto`s that there is something to compare with."""
    promises = list(Promise)
    named = [row for row in rows if row["sync"] not in auto_plans(scenario) and not row["error"]]
    found = []
    for row in rows:
        if row["sync"] not in auto_plans(scenario) or row["error"]:
            continue
        allowed = promises.index(Promise(row["promise"]))
        others = [r for r in named if promises.index(Promise(r["promise"])) <= allowed]
        if not others:
            continue
        best = min(others, key=steady_step_seconds)
        chosen = row["choices"][0][-1]["sync"] if row["choices"][0] else "ring"
        found.append(
            AutoVsBest(
                scenario=scenario.name,
                sync=row["sync"],
                chosen=chosen,
                seconds=steady_step_seconds(row),
                best=best["sync"],
                best_seconds=steady_step_seconds(best),
            )
        )
    return found


def steady_step_seconds(row: Row) -> float:
    """Of a step, the mean over the last ones."""
    return fmean(row["seconds"][-STEADY_TAIL_STEPS:])
