"""The fit of transport costs to calibration trials: costs with which a simulation takes as long.

One cost after the other, each from the trials that depend on it most, with those found before
fixed:

    a hop          a tiny message along a chain: its latency, and its cost to the receiver
    a message      tiny messages of all to one: they arrive at once, but are handled one by one
    a byte         rings inside the hosts, without a link between ranks
    one flow       a long ring less a short one: the share of its rate that a link gives
    a burst        the time that a ring takes less than that: the burst size of links
    several flows  their joint share of a link, from trials with as many on the busiest
    slowdown       the ratio by which topologies that restart connections take longer than all this

A simulation takes longer the larger a cost is (a share: the smaller), so each is a root with one
unknown. The median of the repetitions counts, which ignores disturbed ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from thalweg.facts import Cluster, Duration, FittedValue, Machine, TransportCosts
from thalweg.facts.units import MAD_TO_DEVIATION
from thalweg.predict.calibration_trials import (
    MAX_SMALL_TRIAL_BYTES,
    SLOWDOWN_TRIAL_KINDS,
    NetworkTrial,
    concurrent_flows,
    schedules,
)
from thalweg.predict.flow_simulator import FREE_TRANSPORT_COSTS, FlowSimulator

FIT_TOLERANCE_RATIO = 1e-3  # of the measured time
LATENCY_DIGITS = 7  # decimals of the latency's seconds
MAX_ROOT_SEARCH_STEPS = 20
MIN_BANDWIDTH_SHARE_FRACTION, MAX_BANDWIDTH_SHARE_FRACTION = 0.02, 1.1
# A long ring with a lower rate has overflowing queues, which a short one hasn't.
MIN_STEADY_RATE_FRACTION = 0.95
Shares = tuple[tuple[int, FittedValue], ...]


@dataclass(frozen=True, slots=True)
class FittedCosts:
    """The cluster with the latency that messages have in use, and their costs there."""

    cluster: Cluster
    machine: Machine


def fit(cluster: Cluster, trials: Sequence[NetworkTrial]) -> FittedCosts:
    """The costs that explain the trials, whose schedules were built for `cluster`. Costs without a
    trial are 0, and listed as assumed."""
    ours = _Fit(cluster, [trial for trial in trials if trial.kind != "native"])
    native = _Fit(cluster, [trial for trial in trials if trial.kind == "native"])
    message = ours.hop()
    costs = ours.byte(TransportCosts(message=message))
    ours.burst = native.burst = ours.burst_of(costs)
    native.latency = ours.latency  # the backend's messages have the same
    machine = Machine(
        ours=ours.slowdowns(ours.crowding(costs)),
        native=native.crowding(native.native_costs()),
        burst=ours.burst,
        assumed=tuple(_assumed(trials)),
    )
    latency = Duration(round(ours.latency, LATENCY_DIGITS))
    return FittedCosts(replace(cluster, latency=latency), machine)


class _Fit:
    """The fit of one transport's costs; `latency` and `burst` are set once they are known."""

    def __init__(self, cluster: Cluster, trials: Sequence[NetworkTrial]) -> None:
        self.cluster = cluster
        self.latency = cluster.latency.seconds
        self.burst = 0.0
        self._small = {t.kind: t for t in reversed(trials) if t.nbytes <= MAX_SMALL_TRIAL_BYTES}
        large = [t for t in trials if t.nbytes > MAX_SMALL_TRIAL_BYTES]
        self._large = sorted(large, key=lambda trial: trial.nbytes)

    def hop(self) -> FittedValue:
        """Set the latency of a message; return its cost to its receiver."""
        if not {"chain", "star"} <= self._small.keys():
            return FittedValue(0.0)
        chain, star = self._simulation(self._small["chain"]), self._simulation(self._small["star"])
        hop = _root(chain, chain.measured, 0.0, chain.measured)
        message = _root(
            lambda message: star(hop - message, TransportCosts(message=FittedValue(message))),
            star.measured,
            0.0,
            max(0.0, hop - self.latency),  # the latency is at least that of a ping
        )
        self.latency = hop - message
        return FittedValue(message, star.spread)

    def byte(self, costs: TransportCosts) -> TransportCosts:
        """The costs with that of a byte, from the largest trial that crosses no link."""
        inside = [t for t in self._large if not concurrent_flows(t.kind, self.cluster)]
        if not inside:
            return costs
        simulation = self._simulation(inside[-1])
        byte = _root(
            lambda byte: simulation(self.latency, replace(costs, byte=FittedValue(byte))),
            simulation.measured,
            0.0,
            simulation.measured / inside[-1].nbytes,
        )
        return replace(costs, byte=FittedValue(byte, simulation.spread))

    def burst_of(self, costs: TransportCosts) -> float:
        """The burst size of links in bytes, if there are two large rings. Their difference gives
        the rate of a busy link; what the shorter takes less than that is the burst."""
        rings = [self._simulation(trial) for trial in self._large if trial.kind == "ring"]
        if len(rings) < 2:
            return 0.0
        short, long = rings[0], rings[-1]

        def slowed(inverse: float) -> TransportCosts:
            return replace(costs, crowding=((1, FittedValue(1 / inverse)),))

        inverse = _root(
            lambda x: long(self.latency, slowed(x)) - short(self.latency, slowed(x)),
            long.measured - short.measured,
            1 / MAX_BANDWIDTH_SHARE_FRACTION,
            1 / MIN_STEADY_RATE_FRACTION,
        )
        return -_root(
            lambda negative: short(self.latency, slowed(inverse), -negative),
            short.measured,
            -short.trial.nbytes / 2,
            0.0,
        )

    def native_costs(self) -> TransportCosts:
        """The backend's costs of a message and of a byte."""
        if (tiny := self._small.get("native")) is None:
            return TransportCosts()
        simulation = self._simulation(tiny)
        message = _root(
            lambda x: simulation(self.latency, TransportCosts(message=FittedValue(x)), self.burst),
            simulation.measured,
            0.0,
            simulation.measured,
        )
        return self.byte(TransportCosts(message=FittedValue(message, simulation.spread)))

    def crowding(self, costs: TransportCosts) -> TransportCosts:
        """The costs with the joint share of a link for each number of flows, in rising order."""
        by_flows: dict[int, dict[str, NetworkTrial]] = {}
        for trial in self._large:
            flows = concurrent_flows(trial.kind, self.cluster)
            if flows and trial.kind not in SLOWDOWN_TRIAL_KINDS:
                by_flows.setdefault(flows, {})[trial.kind] = trial  # the largest of its kind
        shares: Shares = ()
        for flows, alike in sorted(by_flows.items()):
            found = [self._share(trial, costs, shares, flows) for trial in alike.values()]
            shares = (*shares, (flows, _combined(found)))
        return replace(costs, crowding=shares) if shares else costs

    def slowdowns(self, costs: TransportCosts) -> TransportCosts:
        drag: dict[str, FittedValue] = {}
        largest = {trial.kind: trial for trial in self._large}
        for kind in SLOWDOWN_TRIAL_KINDS:
            if kind in largest:
                simulation = self._simulation(largest[kind])
                ratio = simulation.measured / simulation(self.latency, costs, self.burst)
                drag[kind] = FittedValue(max(1.0, ratio), simulation.spread)
        return replace(costs, drag=tuple(drag.items()))

    def _share(
        self, trial: NetworkTrial, costs: TransportCosts, fewer: Shares, flows: int
    ) -> FittedValue:
        simulation = self._simulation(trial)

        def crowded(inverse: float) -> TransportCosts:
            return replace(costs, crowding=(*fewer, (flows, FittedValue(1 / inverse))))

        inverse = _root(
            lambda x: simulation(self.latency, crowded(x), self.burst),
            simulation.measured,
            1 / MAX_BANDWIDTH_SHARE_FRACTION,
            1 / MIN_BANDWIDTH_SHARE_FRACTION,
        )
        return FittedValue(1 / inverse, simulation.spread)

    def _simulation(self, trial: NetworkTrial) -> _TrialSimulation:
        return _TrialSimulation(self.cluster, trial)


def _combined(found: Sequence[FittedValue]) -> FittedValue:
    """The median of several fits of one value; its spread includes their differences."""
    values = [fitted.value for fitted in found]
    apart = (max(values) - min(values)) / 2 / median(values)
    return FittedValue(median(values), max(apart, *(fitted.spread for fitted in found)))


class _TrialSimulation:
    """A trial's schedules, simulated with other costs than those they were built for."""

    def __init__(self, cluster: Cluster, trial: NetworkTrial) -> None:
        self.trial = trial
        self.measured = median(trial.seconds)
        self._cluster = cluster
        self._schedules = schedules(trial.kind, cluster, trial.nbytes)

    @property
    def spread(self) -> float:
        """The relative standard deviation of the repetitions, estimated without outliers."""
        deviations = (abs(seconds - self.measured) for seconds in self.trial.seconds)
        return MAD_TO_DEVIATION * median(deviations) / self.measured

    def __call__(
        self, latency: float, costs: TransportCosts = FREE_TRANSPORT_COSTS, burst: float = 0.0
    ) -> float:
        """The seconds of the trial with these costs."""
        flows = FlowSimulator(replace(self._cluster, latency=Duration(latency)), costs, burst)
        ends: list[float] = []
        for schedule in self._schedules:
            run = flows.exchange(schedule, lambda _: ends.append(flows.now))
            for rank in schedule.ranks:
                run.start(rank)
        flows.run()
        return max(ends)


def _root(rising: Callable[[float], float], value: float, low: float, high: float) -> float:
    """The argument at which a rising function is close to this value; the nearer end if there is
    none. False position needs a step or two where the function is nearly linear; the Illinois rule
    halves the value at an end that stays, so both ends move."""
    below, above = rising(low) - value, rising(high) - value
    if below >= 0 or above <= 0:
        return low if below >= 0 else high
    stayed = ""
    for _ in range(MAX_ROOT_SEARCH_STEPS):
        middle = low + (high - low) * below / (below - above)
        there = rising(middle) - value
        if abs(there) <= FIT_TOLERANCE_RATIO * value:
            break
        if there < 0:
            low, below = middle, there
            above = above / 2 if stayed == "high" else above
            stayed = "high"
        else:
            high, above = middle, there
            below = below / 2 if stayed == "low" else below
            stayed = "low"
    return middle


def _assumed(trials: Sequence[NetworkTrial]) -> list[str]:
    kinds = {trial.kind for trial in trials}
    missing = {"chain": "messages that cost nothing", "native": "a backend that costs nothing"}
    return [text for kind, text in missing.items() if kind not in kinds]
