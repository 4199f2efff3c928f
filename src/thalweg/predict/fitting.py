"""From trials to what messages and bytes cost: figures with which a simulation takes as long.

One figure after the other, each from the trials that tell most about it, while those found before
stay as they are:

    a hop          a tiny message along a chain: its way, and what it costs its receivers
    a message      tiny messages of all to one: they are there at once, but are taken one by one
    a byte         rings inside the hosts, where no link is between ranks
    one flow       what a longer ring takes longer: the share of its rate that a link gives
    a burst        what a ring takes less than that: what links carry at once after a rest
    several flows  what they get of a link together, from trials with so many on the busiest
    drag           what topologies that get connections going again take longer than all of that

A simulation takes longer the larger the figure is (a share: the smaller), so each is a root with
one unknown. The median of the repetitions counts, so that those which something disturbed don't.
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
from thalweg.predict.flow_simulator import FlowSimulator

FIT_TOLERANCE_RATIO = 1e-3  # of what was measured
LATENCY_DIGITS = 7  # of the latency's seconds
MAX_ROOT_SEARCH_STEPS = 20  # of a root's search, at most
MIN_BANDWIDTH_SHARE_FRACTION, MAX_BANDWIDTH_SHARE_FRACTION = 0.02, 1.1
FREE_TRANSPORT_COSTS = TransportCosts()
# A long ring that gets less has overflowing queues, which a short one hasn't.
MIN_STEADY_RATE_FRACTION = 0.95
Shares = tuple[tuple[int, FittedValue], ...]


@dataclass(frozen=True, slots=True)
class FittedCosts:
    """The cluster with the latency that messages have in use, and what they cost there."""

    cluster: Cluster
    machine: Machine


def fit(cluster: Cluster, trials: Sequence[NetworkTrial]) -> FittedCosts:
    """`cluster` is the one that the trials' schedules were made for. What no trial tells is taken
    to cost nothing, and listed as assumed."""
    ours = [trial for trial in trials if trial.kind != "native"]
    theirs = [trial for trial in trials if trial.kind == "native"]
    latency, message = _hop(cluster, ours)
    inside = _byte(cluster, latency, ours, TransportCosts(message=message))
    burst = _burst(cluster, latency, ours, inside)
    backend = _backend(cluster, latency, theirs, burst)
    machine = Machine(
        ours=_dragged(
            cluster, latency, ours, _crowding(cluster, latency, ours, inside, burst), burst
        ),
        native=_crowding(cluster, latency, theirs, backend, burst),
        burst=burst,
        assumed=tuple(_assumed(trials)),
    )
    return FittedCosts(replace(cluster, latency=Duration(round(latency, LATENCY_DIGITS))), machine)


def _hop(cluster: Cluster, trials: Sequence[NetworkTrial]) -> tuple[float, FittedValue]:
    """Seconds of a message's way, and what it costs its receiver."""
    chain, star = _tiny(trials, "chain"), _tiny(trials, "star")
    if chain is None or star is None:
        return cluster.latency.seconds, FittedValue(0.0)
    along, at_once, seconds = (
        _TrialSimulation(cluster, chain),
        _TrialSimulation(cluster, star),
        median(chain.seconds),
    )
    hop = _root(along, seconds, 0.0, seconds)
    message = _root(
        lambda message: at_once(hop - message, TransportCosts(message=FittedValue(message))),
        median(star.seconds),
        0.0,
        max(0.0, hop - cluster.latency.seconds),  # at best it travels as long as a ping
    )
    return hop - message, FittedValue(message, _spread(star))


def _byte(
    cluster: Cluster, latency: float, trials: Sequence[NetworkTrial], costs: TransportCosts
) -> TransportCosts:
    """From the largest trial that crosses no link."""
    inside = [
        t
        for t in trials
        if t.nbytes > MAX_SMALL_TRIAL_BYTES and not concurrent_flows(t.kind, cluster)
    ]
    if not inside:
        return costs
    trial = max(inside, key=lambda trial: trial.nbytes)
    replay, seconds = _TrialSimulation(cluster, trial), median(trial.seconds)
    byte = _root(
        lambda byte: replay(latency, replace(costs, byte=FittedValue(byte))),
        seconds,
        0.0,
        seconds / trial.nbytes,
    )
    return replace(costs, byte=FittedValue(byte, _spread(trial)))


def _burst(
    cluster: Cluster, latency: float, trials: Sequence[NetworkTrial], costs: TransportCosts
) -> float:
    """Bytes, if there are two large rings. Their difference tells what a byte takes once links are
    busy; what the shorter takes less than that, links have carried at once."""
    rings = sorted(
        (t for t in trials if t.kind == "ring" and t.nbytes > MAX_SMALL_TRIAL_BYTES), key=_nbytes
    )
    if len(rings) < 2:
        return 0.0
    short, long = _TrialSimulation(cluster, rings[0]), _TrialSimulation(cluster, rings[-1])

    def slowed(inverse: float) -> TransportCosts:
        return replace(costs, crowding=((1, FittedValue(1 / inverse)),))

    inverse = _root(
        lambda inverse: long(latency, slowed(inverse)) - short(latency, slowed(inverse)),
        median(rings[-1].seconds) - median(rings[0].seconds),
        1 / MAX_BANDWIDTH_SHARE_FRACTION,
        1 / MIN_STEADY_RATE_FRACTION,
    )
    return -_root(
        lambda negative: short(latency, slowed(inverse), -negative),
        median(rings[0].seconds),
        -rings[0].nbytes / 2,
        0.0,
    )


def _backend(
    cluster: Cluster, latency: float, trials: Sequence[NetworkTrial], burst: float
) -> TransportCosts:
    """Its messages travel as long as ours."""
    tiny = _tiny(trials, "native")
    if tiny is None:
        return TransportCosts()
    replay, seconds = _TrialSimulation(cluster, tiny), median(tiny.seconds)
    message = _root(
        lambda message: replay(latency, TransportCosts(message=FittedValue(message)), burst),
        seconds,
        0.0,
        seconds,
    )
    costs = TransportCosts(message=FittedValue(message, _spread(tiny)))
    return _byte(cluster, latency, trials, costs)


def _crowding(
    cluster: Cluster,
    latency: float,
    trials: Sequence[NetworkTrial],
    costs: TransportCosts,
    burst: float,
) -> TransportCosts:
    """What so many flows get of a link together, from few to many."""
    by_crowd: dict[int, dict[str, NetworkTrial]] = {}
    for trial in sorted(trials, key=_nbytes):
        flows = concurrent_flows(trial.kind, cluster)
        if (
            flows
            and trial.nbytes > MAX_SMALL_TRIAL_BYTES
            and trial.kind not in SLOWDOWN_TRIAL_KINDS
        ):
            by_crowd.setdefault(flows, {})[trial.kind] = trial  # the largest of its kind
    shares: Shares = ()
    for flows, alike in sorted(by_crowd.items()):
        found = [
            _share(_TrialSimulation(cluster, trial), latency, costs, burst, shares, flows)
            for trial in alike.values()
        ]
        shares = (*shares, (flows, _together(found)))
    return replace(costs, crowding=shares) if shares else costs


def _dragged(
    cluster: Cluster,
    latency: float,
    trials: Sequence[NetworkTrial],
    costs: TransportCosts,
    burst: float,
) -> TransportCosts:
    drag: dict[str, FittedValue] = {}
    for trial in trials:
        if trial.kind in SLOWDOWN_TRIAL_KINDS and trial.nbytes > MAX_SMALL_TRIAL_BYTES:
            replay, seconds = _TrialSimulation(cluster, trial), median(trial.seconds)
            more = seconds / replay(latency, costs, burst)
            drag[trial.kind] = FittedValue(max(1.0, more), _spread(trial))
    return replace(costs, drag=tuple(drag.items()))


def _share(
    replay: _TrialSimulation,
    latency: float,
    costs: TransportCosts,
    burst: float,
    fewer: Shares,
    flows: int,
) -> FittedValue:
    def crowded(inverse: float) -> TransportCosts:
        return replace(costs, crowding=(*fewer, (flows, FittedValue(1 / inverse))))

    inverse = _root(
        lambda inverse: replay(latency, crowded(inverse), burst),
        median(replay.trial.seconds),
        1 / MAX_BANDWIDTH_SHARE_FRACTION,
        1 / MIN_BANDWIDTH_SHARE_FRACTION,
    )
    return FittedValue(1 / inverse, _spread(replay.trial))


def _together(found: Sequence[FittedValue]) -> FittedValue:
    """Of trials that tell the same figure; where they differ it is less sure."""
    values = [figure.value for figure in found]
    apart = (max(values) - min(values)) / 2 / median(values)
    return FittedValue(median(values), max(apart, *(figure.spread for figure in found)))


class _TrialSimulation:
    """A trial's schedules, simulated with other figures than those that they were made for."""

    def __init__(self, cluster: Cluster, trial: NetworkTrial) -> None:
        self.trial = trial
        self._cluster = cluster
        self._schedules = schedules(trial.kind, cluster, trial.nbytes)

    def __call__(
        self, latency: float, costs: TransportCosts = FREE_TRANSPORT_COSTS, burst: float = 0.0
    ) -> float:
        """Seconds."""
        flows = FlowSimulator(replace(self._cluster, latency=Duration(latency)), costs, burst)
        ends: list[float] = []
        for schedule in self._schedules:
            exchange = flows.exchange(schedule, lambda _: ends.append(flows.now))
            for rank in schedule.ranks:
                exchange.start(rank)
        flows.run()
        return max(ends)


def _root(rising: Callable[[float], float], value: float, low: float, high: float) -> float:
    """Where a rising function comes close to this value; the nearer end if nowhere between. By
    false position, which needs a step or two where the function is nearly straight; an end that
    stays is taken for nearer than it is (the Illinois rule), so both ends move."""
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


def _tiny(trials: Sequence[NetworkTrial], kind: str) -> NetworkTrial | None:
    return next((t for t in trials if t.kind == kind and t.nbytes <= MAX_SMALL_TRIAL_BYTES), None)


def _nbytes(trial: NetworkTrial) -> int:
    return trial.nbytes


def _spread(trial: NetworkTrial) -> float:
    """The repetitions' standard deviation, relative to their median; outliers don't count."""
    middle = median(trial.seconds)
    return MAD_TO_DEVIATION * median(abs(s - middle) for s in trial.seconds) / middle


def _assumed(trials: Sequence[NetworkTrial]) -> list[str]:
    kinds = {trial.kind for trial in trials}
    missing = []
    if "chain" not in kinds:
        missing.append("messages that cost nothing")
    if "native" not in kinds:
        missing.append("a backend that costs nothing")
    return missing
