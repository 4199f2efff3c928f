"""`predict()`: the step time of a plan in a situation.

A few steps are simulated, bucket by bucket, on the cluster's links (`step_simulator.py`): of a plan
with changing groups a whole period, or its first steps. Straggler delays come on top: the expected
maximum where all wait for all, a recurrence where only groups or a quorum do, a queue where nobody
does (`straggler_recurrence.py`). Clusters that are too large to simulate have closed forms.

The 80 % prediction interval combines the error of the model itself, the spread of the measurements
and the error of assumptions, each weighted by its part of the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import hypot

import numpy as np

from thalweg.catalog import default_catalog, parse_plan
from thalweg.errors import PlanError
from thalweg.facts import Situation, TransportCosts
from thalweg.plan import Plan
from thalweg.predict import straggler_recurrence as stragglers
from thalweg.predict.closed_form import closed_form_breakdown, shown_delays
from thalweg.predict.estimate import Breakdown, Estimate
from thalweg.predict.step_simulator import (
    SIMULATED_WARMUP_STEPS,
    RankTimes,
    StepChains,
    codec_cost,
    mean_step_seconds,
    simulate_steps,
)
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

MAX_SIMULATED_MESSAGES = 20_000  # per step
MAX_SIMULATED_STEPS = 16  # of a long period
DEVIATIONS_OF_80_PERCENT = 1.2816  # standard deviations to either side
SIMULATION_ERROR_FRACTION = 0.05  # of communication, if all inputs are exact
CLOSED_FORM_ERROR_FRACTION = 0.10  # of communication
COMPUTE_ERROR_FRACTION = 0.02
WAITING_ERROR_FRACTION = 0.15  # of the straggler wait
ASSUMED_ERROR_FRACTION = 0.20  # of communication and codecs, if an input is assumed
ASYNC_ERROR_FACTOR = 1.5  # of plans that don't wait for all workers
BY_SIMULATION, BY_CLOSED_FORM = "replay", "closed form"


def predict(plan: Plan | str, situation: Situation, *, by_form: bool = False) -> Estimate:
    """The predicted step time, with its 80 % interval and its breakdown.

    by_form   use the closed form, however small the cluster; PlanError if the plan has none
    """
    return PredictionInput(plan, situation).estimate(by_form)


class PredictionInput:
    """A plan, and all that its step time depends on, from the arguments of `predict`."""

    def __init__(self, plan: Plan | str, situation: Situation) -> None:
        self.plan = parse_plan(plan) if isinstance(plan, str) else plan
        if self.plan.topology.name == "auto":
            raise PlanError(
                "auto has no step time before it has chosen", "name a plan, or use advise"
            )
        self.group = Group.everybody(situation.laid_out_for)
        self.cluster = situation.cluster
        self.workload = travelling(self.plan, situation.workload)
        self.machine = situation.machine

    @property
    def transport_costs(self) -> TransportCosts:
        native = default_catalog().is_native(self.plan)
        return self.machine.native if native else self.machine.ours

    @property
    def is_large(self) -> bool:
        """True if simulating the plan would take minutes."""
        buckets = len(self.workload.buckets(self.plan.settings.bucket))
        messages = 2 * self.group.size**2 * buckets  # of a ring
        return messages > MAX_SIMULATED_MESSAGES

    def compute(self, shares: float = 1.0) -> float:
        """The compute time of a rank with this many N-th parts of the batch."""
        costs = self.workload.costs
        batch = costs.forward.seconds + costs.backward.seconds
        return shares * batch + costs.optimizer.seconds

    def chains(self, plan: Plan | None = None) -> StepChains:
        return StepChains(
            plan or self.plan, self.group, self.workload, self.machine, default_catalog()
        )

    def estimate(self, by_form: bool = False) -> Estimate:
        """The result of `predict`."""
        by_form = self.group.size > 1 and (by_form or self.is_large)
        parts, costs = self.parts(by_form), self.transport_costs
        codec, assumed_of_codec = codec_cost(self.plan.precision, self.machine)
        assumed = (*self.cluster.assumed, *self.machine.assumed, *assumed_of_codec)
        transfer_error = hypot(
            CLOSED_FORM_ERROR_FRACTION if by_form else SIMULATION_ERROR_FRACTION,
            max(costs.byte.spread, *(share.spread for _, share in costs.crowding)),
            costs.slowdown_of(self.plan.topology.name).spread,
            ASSUMED_ERROR_FRACTION if assumed else 0.0,
        )
        codec_error = hypot(
            max(codec.encode.spread, codec.decode.spread, SIMULATION_ERROR_FRACTION),
            ASSUMED_ERROR_FRACTION if assumed else 0.0,
        )
        deviation = hypot(
            COMPUTE_ERROR_FRACTION * parts.compute,
            transfer_error * parts.transfer,
            codec_error * (parts.encode + parts.decode),
            WAITING_ERROR_FRACTION * parts.waiting,
        )
        if waits_for_nobody(self.plan):
            deviation *= ASYNC_ERROR_FACTOR
        return Estimate(
            plan=self.plan,
            parts=parts,
            low=max(0.0, parts.seconds - DEVIATIONS_OF_80_PERCENT * deviation),
            high=parts.seconds + DEVIATIONS_OF_80_PERCENT * deviation,
            form=BY_CLOSED_FORM if by_form else BY_SIMULATION,
            assumed=assumed,
        )

    def parts(self, by_form: bool) -> Breakdown:
        if self.group.size == 1:
            return Breakdown(compute=self.compute())
        if by_form:
            measured = Group(self.group.ranks, self.cluster)
            costs, catalog = self.transport_costs, default_catalog()
            return closed_form_breakdown(
                self.plan, measured, self.workload, costs, self.machine, catalog
            )
        if self.plan.cadence.staleness is not None:
            return self._asynchronous(self.plan.cadence.staleness)
        return self._until_quorum() if is_relayed(self.plan) else self._until_all()

    def simulated(
        self,
        chains: StepChains,
        shares: Mapping[int, float] | None = None,
        delays: Mapping[int, float] | None = None,
    ) -> Mapping[int, RankTimes]:
        """The simulated steps. If the plan leaves open whether compression overlaps with backward,
        both are simulated and the faster counts, as in a run."""
        steps = min(chains.cycle, MAX_SIMULATED_STEPS)
        if chains.cycle > MAX_SIMULATED_STEPS and self.plan.cadence.every > 1:
            steps = self.plan.cadence.every * 2
        overlap = self.plan.settings.overlap
        both = overlap is None and self.plan.precision is not None and len(chains.buckets) > 1
        found = [
            simulate_steps(
                chains,
                self.cluster,
                self.transport_costs,
                steps,
                serial=serial,
                shares=shares,
                delays=delays,
            )
            for serial in ((False, True) if both else (overlap is False,))
        ]
        return min(found, key=mean_step_seconds)

    @property
    def _has_stragglers(self) -> bool:
        delays = [self.cluster.host(rank).late for rank in self.group.ranks]
        return any(late.probability * late.delay.seconds for late in delays)

    def _until_all(self) -> Breakdown:
        """The breakdown of a plan whose rounds wait for all of their members."""
        chains, ranks, compute = self.chains(), self.group.ranks, self.compute()
        simulated = self.simulated(chains)
        parts = self._breakdown(mean_step_seconds(simulated), chains, compute)
        if not self._has_stragglers:
            return parts
        if not self.plan.averages_parameters:
            shown = partial(self._shown, chains, mean_step_seconds(simulated))
            delays = shown_delays(self.plan, self.group, self.cluster, default_catalog(), shown)
            return replace(parts, waiting=stragglers.expected_latest(delays))
        delay = stragglers.draw(self.cluster, ranks)
        exchanges = _group_exchanges(chains, simulated, self.group)
        late = stragglers.group_step_seconds(exchanges, compute, delay)
        punctual = stragglers.group_step_seconds(exchanges, compute, 0 * delay)
        return replace(parts, waiting=max(0.0, late - punctual))

    def _shown(self, chains: StepChains, punctual: float, rank: int, delay: float) -> float:
        """The part of a rank's delay in which the others have nothing to do."""
        delayed = mean_step_seconds(self.simulated(chains, delays={rank: delay}))
        return min(delay, max(0.0, delayed - punctual))

    def _until_quorum(self) -> Breakdown:
        """The breakdown of a plan whose steps wait for a quorum: of a coded tree, or of the first k
        ranks of a star."""
        ranks = self.group.ranks
        if is_compensated(self.plan):
            star = parse_plan(f"umw @ bucket={self.plan.settings.bucket}")
            chains = self.chains(replace(star, precision=self.plan.precision))
            shares: Mapping[int, float] = dict.fromkeys(ranks, 1.0)
            quorum = stragglers.first_k_arrival(fastest(self.plan, len(ranks)))
        else:
            chains = self.chains()
            allocation = allocation_of(self.plan, self.group)
            shares = stragglers.loads(allocation, ranks)
            quorum = stragglers.decodes(allocation, ranks)
        seconds = mean_step_seconds(self.simulated(chains, shares))
        compute = np.array([self.compute(shares[rank]) for rank in ranks])
        longest = float(compute.max())
        parts = self._breakdown(seconds, chains, longest)
        if not self._has_stragglers:
            return parts
        delay, exchange = stragglers.draw(self.cluster, ranks), max(0.0, seconds - longest)
        late = stragglers.quorum_step_seconds(quorum, compute, exchange, delay)
        return replace(parts, waiting=max(0.0, late - seconds))

    def _asynchronous(self, staleness: int) -> Breakdown:
        ranks, root = self.group.ranks, root_of(self.plan, self.group)
        assert root is not None
        delay, compute = stragglers.draw(self.cluster, ranks), self.compute()
        nbytes = float(self.workload.nbytes)
        fixed = (self.cluster, self.transport_costs, ranks, root, nbytes, compute)
        punctual = stragglers.async_step_seconds(*fixed, 0 * delay, staleness)
        waiting = stragglers.async_step_seconds(*fixed, delay, staleness) - punctual
        transfer = max(0.0, punctual - compute)
        return Breakdown(compute=compute, transfer=transfer, waiting=max(0.0, waiting))

    def _breakdown(self, seconds: float, chains: StepChains, compute: float) -> Breakdown:
        encode, decode = self._codec_seconds(chains)
        exposed = max(0.0, seconds - compute)
        shown = min(1.0, exposed / (encode + decode)) if encode + decode else 0.0
        return Breakdown(
            compute=seconds - exposed,
            encode=encode * shown,
            decode=decode * shown,
            transfer=exposed - (encode + decode) * shown,
        )

    def _codec_seconds(self, chains: StepChains) -> tuple[float, float]:
        """The seconds of encoding and of decoding on the busiest rank, averaged over a period."""
        steps = min(chains.cycle, MAX_SIMULATED_STEPS)
        busiest = []
        for step in range(steps):
            by_rank = []
            for own in chains.at(step).values():
                work = [(p.codec_seconds(s), s.rounds) for p in own for s in p.chain.stages]
                before = sum(seconds for seconds, rounds in work if rounds)
                by_rank.append((before, sum(seconds for seconds, rounds in work if not rounds)))
            busiest.append(max(by_rank, key=sum))
        return sum(e / steps for e, _ in busiest), sum(d / steps for _, d in busiest)


def _group_exchanges(
    chains: StepChains, simulated: Mapping[int, RankTimes], group: Group
) -> list[list[stragglers.GroupExchange]]:
    """The groups of each simulated step, and the seconds of their exchange after the last arrival
    of a member."""
    index = {rank: i for i, rank in enumerate(group.ranks)}
    steps = len(next(iter(simulated.values())).ended)
    exchanges = []
    for step in range(SIMULATED_WARMUP_STEPS, steps):
        delays = {
            round_.group.ranks: priced.chain.delay
            for own in chains.at(step).values()
            for priced in own
            for round_ in priced.chain.rounds
        }
        exchanges.append(
            [
                stragglers.GroupExchange(
                    tuple(index[rank] for rank in members),
                    _seconds([simulated[rank] for rank in members], step, delayed=delay > 0),
                    delay,
                )
                for members, delay in delays.items()
            ]
        )
    return exchanges


def _seconds(marks: Sequence[RankTimes], step: int, *, delayed: bool) -> float:
    """The seconds of an exchange after its last member's arrival; one whose result is applied
    later may last beyond the step."""
    if not delayed:
        return max(mark.ended[step] for mark in marks) - max(mark.computed[step] for mark in marks)
    passages = [passage for mark in marks for passage in mark.passages if passage.step == step]
    return max(passage.ended for passage in passages) - max(
        passage.handed_in for passage in passages
    )
