"""`predict()`: what a step takes under a plan, on a cluster, for a workload.

A few steps are replayed, bucket by bucket, on the cluster's links (`replay.py`); of a group plan a
whole period, or as much of it as tells. Lateness comes on top: the expected maximum where all wait
for all, a recurrence where only groups or a quorum do, a queue where nobody does (`recurrence.py`).
Clusters that are too large for a replay have closed forms (`by_forms.py`).

What a step takes in the mean is in the interval four times of five: it is made of how far the model
itself is off, of the spread of what was measured, and of what was only assumed, each weighed by its
part in the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import hypot

import numpy as np

from thalweg.catalog import Catalog, default_catalog, parse_plan
from thalweg.errors import PlanError
from thalweg.facts import Cluster, Machine, TransportCosts, Workload
from thalweg.plan import Plan
from thalweg.predict import straggler_recurrence
from thalweg.predict.closed_form.step import closed_form_breakdown
from thalweg.predict.compiled_step import StepChains, assumed_of_codec, codec_cost
from thalweg.predict.estimate import Breakdown, Estimate
from thalweg.predict.step_simulator import RankTimes, SimulatedSteps, simulate_steps
from thalweg.predict.straggler_recurrence import async_step_seconds, expected_latest
from thalweg.redundancy import (
    allocation_of,
    fastest,
    is_compensated,
    is_relayed,
    root_of,
    waits_for_nobody,
)
from thalweg.schedules import Group
from thalweg.steps import travelling

MAX_SIMULATED_MESSAGES = 20_000  # of a step that is replayed
MAX_SIMULATED_STEPS = 16  # of a long period
SIMULATED_WARMUP_STEPS = 2  # steps before those that count
DEVIATIONS_OF_80_PERCENT = 1.2816  # standard deviations to either side
# Of transfers: how far a replay is off where all it is given is right.
SIMULATION_ERROR_FRACTION = 0.05
CLOSED_FORM_ERROR_FRACTION = 0.10  # the same of closed forms
COMPUTE_ERROR_FRACTION = 0.02  # of computing
WAITING_ERROR_FRACTION = 0.15  # of waiting for late workers
ASSUMED_ERROR_FRACTION = 0.20  # of transfers and codecs where something was assumed
ASYNC_ERROR_FACTOR = 1.5  # times, where nobody waits for anybody
BY_SIMULATION, BY_CLOSED_FORM = "replay", "closed form"


def predict(
    plan: Plan | str,
    cluster: Cluster,
    workload: Workload,
    machine: Machine | None = None,
    *,
    declared: Cluster | None = None,
    catalog: Catalog | None = None,
    by_form: bool = False,
) -> Estimate:
    """Seconds of a step, with an interval and what they are made of.

    machine   what messages, bytes and codecs cost there; nothing if None
    declared  the cluster that the run is given, and lays its schedules out by, if that isn't the
              one that was measured
    by_form   in closed form, however small the cluster; PlanError if the plan has none
    """
    setting = prediction_input(plan, cluster, workload, machine, declared=declared, catalog=catalog)
    return setting.estimate(by_form)


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionInput:
    """A plan on a cluster, with all that its time depends on."""

    plan: Plan
    group: Group
    cluster: Cluster
    workload: Workload
    machine: Machine
    catalog: Catalog

    @property
    def transport_costs(self) -> TransportCosts:
        native = self.catalog.is_native(self.plan)
        return self.machine.native if native else self.machine.ours

    @property
    def compute(self) -> float:
        """Of one share of the batch."""
        costs = self.workload.costs
        return costs.forward.seconds + costs.backward.seconds + costs.optimizer.seconds

    @property
    def is_large(self) -> bool:
        """Whether replaying it would take minutes."""
        buckets = self.workload.buckets(self.plan.settings.bucket)
        return _messages(self.group.size, len(buckets)) > MAX_SIMULATED_MESSAGES

    def estimate(self, by_form: bool = False) -> Estimate:
        """As in `predict`."""
        parts, form = self.parts(by_form)
        costs, cost = self.transport_costs, codec_cost(self.plan.precision, self.machine)
        assumed = (
            *self.cluster.assumed,
            *self.machine.assumed,
            *assumed_of_codec(self.plan.precision, self.machine),
        )
        measured = max(costs.byte.spread, *(figure.spread for _, figure in costs.crowding))
        drag = costs.slowdown_of(self.plan.topology.name).spread
        model, guessed = (
            SIMULATION_ERROR_FRACTION if form == BY_SIMULATION else CLOSED_FORM_ERROR_FRACTION,
            ASSUMED_ERROR_FRACTION if assumed else 0.0,
        )
        transfer = hypot(model, measured, drag, guessed)
        codec = hypot(
            max(cost.encode.spread, cost.decode.spread, SIMULATION_ERROR_FRACTION), guessed
        )
        deviation = hypot(
            COMPUTE_ERROR_FRACTION * parts.compute,
            transfer * parts.transfer,
            codec * (parts.encode + parts.decode),
            WAITING_ERROR_FRACTION * parts.waiting,
        )
        if waits_for_nobody(self.plan, self.catalog):
            deviation *= ASYNC_ERROR_FACTOR
        return Estimate(
            sync=str(self.plan),
            workers=self.group.size,
            parts=parts,
            low=max(0.0, parts.seconds - DEVIATIONS_OF_80_PERCENT * deviation),
            high=parts.seconds + DEVIATIONS_OF_80_PERCENT * deviation,
            form=form,
            assumed=assumed,
        )

    def parts(self, by_form: bool = False) -> tuple[Breakdown, str]:
        if self.group.size == 1:
            return Breakdown(compute=self.compute), BY_SIMULATION
        if by_form or self.is_large:
            measured = Group(self.group.ranks, self.cluster)
            parts = closed_form_breakdown(
                self.plan, measured, self.workload, self.transport_costs, self.machine, self.catalog
            )
            return parts, BY_CLOSED_FORM
        if self.plan.cadence.staleness is not None:
            return self._asynchronous(self.plan.cadence.staleness), BY_SIMULATION
        if is_compensated(self.plan):
            return self._of_first_k(), BY_SIMULATION
        script = StepChains(self.plan, self.group, self.workload, self.machine, self.catalog)
        if is_relayed(self.plan, self.catalog):
            return self._coded(script), BY_SIMULATION
        simulated = self.simulated(script)
        return self._with_stragglers(script, simulated), BY_SIMULATION

    def simulated(
        self, script: StepChains, shares: Mapping[int, float] | None = None
    ) -> SimulatedSteps:
        """Both ways if it isn't said whether buckets are compressed while backward runs: the run
        tries both, too."""
        steps = min(script.cycle, MAX_SIMULATED_STEPS) + SIMULATED_WARMUP_STEPS
        if script.cycle > MAX_SIMULATED_STEPS and self.plan.cadence.every > 1:
            steps = self.plan.cadence.every * 2 + SIMULATED_WARMUP_STEPS
        overlap = self.plan.settings.overlap
        choice = overlap is None and self.plan.precision is not None and script.buckets > 1
        found = [
            simulate_steps(
                script,
                self.cluster,
                self.transport_costs,
                self.machine,
                self.workload.costs,
                steps,
                skipped=SIMULATED_WARMUP_STEPS,
                serial=serial,
                shares=shares,
            )
            for serial in ((False, True) if choice else (overlap is False,))
        ]
        return min(found, key=lambda one: one.seconds)

    def _with_stragglers(self, script: StepChains, simulated: SimulatedSteps) -> Breakdown:
        parts = self._breakdown(simulated.seconds, script, self.compute)
        ranks = self.group.ranks
        if all(straggler_recurrence.is_punctual(self.cluster.host(rank).late) for rank in ranks):
            return parts
        if not self.plan.averages_parameters:
            late_hosts = [self.cluster.host(rank).late for rank in ranks]
            return replace(parts, waiting=expected_latest(late_hosts))
        late = straggler_recurrence.draw(self.cluster, ranks)
        meetings = _meetings(script, simulated, self.group)
        waiting = straggler_recurrence.group_step_seconds(meetings, self.compute, late)
        punctual = straggler_recurrence.group_step_seconds(meetings, self.compute, 0 * late)
        return replace(parts, waiting=max(0.0, waiting - punctual))

    def _coded(self, script: StepChains) -> Breakdown:
        """Everybody computes its share of the samples; a step waits for a quorum."""
        ranks = self.group.ranks
        allocation = allocation_of(self.plan, self.group, self.catalog)
        shares = straggler_recurrence.loads(allocation, ranks)
        simulated = self.simulated(script, shares)
        most = max(shares.values())
        parts = self._breakdown(simulated.seconds, script, self._computing(most))
        if all(straggler_recurrence.is_punctual(self.cluster.host(rank).late) for rank in ranks):
            return parts
        late = straggler_recurrence.draw(self.cluster, ranks)
        computing = np.array([self._computing(shares[rank]) for rank in ranks])
        exchange = max(0.0, simulated.seconds - self._computing(most))
        enough = straggler_recurrence.decodes(allocation, ranks)
        seconds = straggler_recurrence.quorum_step_seconds(enough, computing, exchange, late)
        return replace(parts, waiting=max(0.0, seconds - simulated.seconds))

    def _computing(self, shares: float) -> float:
        costs = self.workload.costs
        batch = costs.forward.seconds + costs.backward.seconds
        return shares * batch + costs.optimizer.seconds

    def _of_first_k(self) -> Breakdown:
        """As a star, whose master waits for the fastest only."""
        star = parse_plan(f"umw @ bucket={self.plan.settings.bucket}", self.catalog)
        star = replace(star, precision=self.plan.precision)
        script = StepChains(star, self.group, self.workload, self.machine, self.catalog)
        simulated = self.simulated(script)
        parts = self._breakdown(simulated.seconds, script, self.compute)
        ranks = self.group.ranks
        late = straggler_recurrence.draw(self.cluster, ranks)
        computing = np.full(len(ranks), self.compute)
        quorum = straggler_recurrence.first_k_arrival(fastest(self.plan, len(ranks)))
        exchange = max(0.0, simulated.seconds - self.compute)
        seconds = straggler_recurrence.quorum_step_seconds(quorum, computing, exchange, late)
        return replace(parts, waiting=max(0.0, seconds - simulated.seconds))

    def _asynchronous(self, staleness: int) -> Breakdown:
        ranks, root = self.group.ranks, root_of(self.plan, self.group, self.catalog)
        assert root is not None
        late = straggler_recurrence.draw(self.cluster, ranks)
        nbytes = float(self.workload.nbytes)
        pace = (self.cluster, self.transport_costs, ranks, root, nbytes, self.compute)
        punctual = async_step_seconds(*pace, 0 * late, staleness)
        waiting = async_step_seconds(*pace, late, staleness) - punctual
        parts = Breakdown(compute=self.compute, transfer=max(0.0, punctual - self.compute))
        return replace(parts, waiting=max(0.0, waiting))

    def _breakdown(self, seconds: float, script: StepChains, compute: float) -> Breakdown:
        encode, decode = self._codec(script)
        exposed = max(0.0, seconds - compute)
        shown = min(1.0, exposed / (encode + decode)) if encode + decode else 0.0
        return Breakdown(
            compute=seconds - exposed,
            encode=encode * shown,
            decode=decode * shown,
            transfer=exposed - (encode + decode) * shown,
        )

    def _codec(self, script: StepChains) -> tuple[float, float]:
        """Seconds of encoding and of decoding on the busiest rank, the mean over a period."""
        encode = decode = 0.0
        steps = min(script.cycle, MAX_SIMULATED_STEPS)
        for step in range(steps):
            chains = script.at(step)
            by_rank = {
                rank: (
                    sum(s.codec for c in own for s in c.stages),
                    sum(c.decode for c in own),
                )
                for rank, own in chains.items()
            }
            busiest = max(by_rank.values(), key=sum)
            encode, decode = encode + busiest[0] / steps, decode + busiest[1] / steps
        return encode, decode


def prediction_input(
    plan: Plan | str,
    cluster: Cluster,
    workload: Workload,
    machine: Machine | None = None,
    *,
    declared: Cluster | None = None,
    catalog: Catalog | None = None,
) -> PredictionInput:
    """As in `predict`."""
    catalog = catalog or default_catalog()
    plan = parse_plan(plan, catalog) if isinstance(plan, str) else plan
    if plan.topology.name == "auto":
        raise PlanError("auto has no time before it has chosen", "name a plan, or ask for advice")
    return PredictionInput(
        plan=plan,
        group=Group.everybody(declared or cluster),
        cluster=cluster,
        workload=travelling(plan, workload),
        machine=machine or Machine(assumed=("messages cost nothing",)),
        catalog=catalog,
    )


def _messages(ranks: int, buckets: int) -> int:
    """Of a step, about: what a ring has."""
    return 2 * ranks * ranks * buckets


def _meetings(
    script: StepChains, simulated: SimulatedSteps, group: Group
) -> list[list[straggler_recurrence.GroupExchange]]:
    """Who met at each step that was replayed, and how long it took when the last was there."""
    place = {rank: i for i, rank in enumerate(group.ranks)}
    steps = len(next(iter(simulated.marks.values())).ended)
    meetings = []
    for step in range(SIMULATED_WARMUP_STEPS, steps):
        chains = script.at(step)
        groups: dict[tuple[int, ...], int] = {}
        for own in chains.values():
            for chain in own:
                for stage in chain.stages:
                    for round_ in stage.rounds:
                        groups[round_.group.ranks] = chain.delay
        meetings.append(
            [
                straggler_recurrence.GroupExchange(
                    tuple(place[rank] for rank in members),
                    _seconds([simulated.marks[rank] for rank in members], step, late=delay > 0),
                    delay,
                )
                for members, delay in groups.items()
            ]
        )
    return meetings


def _seconds(marks: Sequence[RankTimes], step: int, *, late: bool) -> float:
    """Of a meeting, from when its last member was there; one whose result is needed later may go on
    beyond the step."""
    if not late:
        return max(mark.ended[step] for mark in marks) - max(mark.computed[step] for mark in marks)
    passages = [one for mark in marks for one in mark.passages if one.step == step]
    return max(one.ended for one in passages) - max(one.handed_in for one in passages)
