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

from thalweg.facts import Cluster, Duration, Figure, Machine, Road
from thalweg.predict.calibration_trials import DRAGGED, SMALL, Trial, crowd, schedules
from thalweg.predict.flow_simulator import Flows

CLOSE = 1e-3  # of what was measured
DIGITS = 7  # of the latency's seconds
STEPS = 20  # of a root's search, at most
MAD_TO_DEVIATION = 1.4826  # of a normal distribution
LEAST_SHARE, LARGEST_SHARE = 0.02, 1.1
FREE = Road()
LEAST_STEADY = 0.95  # a long ring that gets less has overflowing queues, which a short one hasn't
Shares = tuple[tuple[int, Figure], ...]


@dataclass(frozen=True, slots=True)
class Fitted:
    """The cluster with the latency that messages have in use, and what they cost there."""

    cluster: Cluster
    machine: Machine


def fit(cluster: Cluster, trials: Sequence[Trial]) -> Fitted:
    """`cluster` is the one that the trials' schedules were made for. What no trial tells is taken
    to cost nothing, and listed as assumed."""
    ours = [trial for trial in trials if trial.kind != "native"]
    theirs = [trial for trial in trials if trial.kind == "native"]
    latency, message = _hop(cluster, ours)
    inside = _byte(cluster, latency, ours, Road(message=message))
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
    return Fitted(replace(cluster, latency=Duration(round(latency, DIGITS))), machine)


def _hop(cluster: Cluster, trials: Sequence[Trial]) -> tuple[float, Figure]:
    """Seconds of a message's way, and what it costs its receiver."""
    chain, star = _tiny(trials, "chain"), _tiny(trials, "star")
    if chain is None or star is None:
        return cluster.latency.seconds, Figure(0.0)
    along, at_once, seconds = _Replay(cluster, chain), _Replay(cluster, star), median(chain.seconds)
    hop = _root(along, seconds, 0.0, seconds)
    message = _root(
        lambda message: at_once(hop - message, Road(message=Figure(message))),
        median(star.seconds),
        0.0,
        max(0.0, hop - cluster.latency.seconds),  # at best it travels as long as a ping
    )
    return hop - message, Figure(message, _spread(star))


def _byte(cluster: Cluster, latency: float, trials: Sequence[Trial], road: Road) -> Road:
    """From the largest trial that crosses no link."""
    inside = [t for t in trials if t.nbytes > SMALL and not crowd(t.kind, cluster)]
    if not inside:
        return road
    trial = max(inside, key=lambda trial: trial.nbytes)
    replay, seconds = _Replay(cluster, trial), median(trial.seconds)
    byte = _root(
        lambda byte: replay(latency, replace(road, byte=Figure(byte))),
        seconds,
        0.0,
        seconds / trial.nbytes,
    )
    return replace(road, byte=Figure(byte, _spread(trial)))


def _burst(cluster: Cluster, latency: float, trials: Sequence[Trial], road: Road) -> float:
    """Bytes, if there are two large rings. Their difference tells what a byte takes once links are
    busy; what the shorter takes less than that, links have carried at once."""
    rings = sorted((t for t in trials if t.kind == "ring" and t.nbytes > SMALL), key=_nbytes)
    if len(rings) < 2:
        return 0.0
    short, long = _Replay(cluster, rings[0]), _Replay(cluster, rings[-1])

    def slowed(inverse: float) -> Road:
        return replace(road, crowding=((1, Figure(1 / inverse)),))

    inverse = _root(
        lambda inverse: long(latency, slowed(inverse)) - short(latency, slowed(inverse)),
        median(rings[-1].seconds) - median(rings[0].seconds),
        1 / LARGEST_SHARE,
        1 / LEAST_STEADY,
    )
    return -_root(
        lambda negative: short(latency, slowed(inverse), -negative),
        median(rings[0].seconds),
        -rings[0].nbytes / 2,
        0.0,
    )


def _backend(cluster: Cluster, latency: float, trials: Sequence[Trial], burst: float) -> Road:
    """Its messages travel as long as ours."""
    tiny = _tiny(trials, "native")
    if tiny is None:
        return Road()
    replay, seconds = _Replay(cluster, tiny), median(tiny.seconds)
    message = _root(
        lambda message: replay(latency, Road(message=Figure(message)), burst), seconds, 0.0, seconds
    )
    road = Road(message=Figure(message, _spread(tiny)))
    return _byte(cluster, latency, trials, road)


def _crowding(
    cluster: Cluster, latency: float, trials: Sequence[Trial], road: Road, burst: float
) -> Road:
    """What so many flows get of a link together, from few to many."""
    by_crowd: dict[int, dict[str, Trial]] = {}
    for trial in sorted(trials, key=_nbytes):
        flows = crowd(trial.kind, cluster)
        if flows and trial.nbytes > SMALL and trial.kind not in DRAGGED:
            by_crowd.setdefault(flows, {})[trial.kind] = trial  # the largest of its kind
    shares: Shares = ()
    for flows, alike in sorted(by_crowd.items()):
        found = [
            _share(_Replay(cluster, trial), latency, road, burst, shares, flows)
            for trial in alike.values()
        ]
        shares = (*shares, (flows, _together(found)))
    return replace(road, crowding=shares) if shares else road


def _dragged(
    cluster: Cluster, latency: float, trials: Sequence[Trial], road: Road, burst: float
) -> Road:
    drag: dict[str, Figure] = {}
    for trial in trials:
        if trial.kind in DRAGGED and trial.nbytes > SMALL:
            replay, seconds = _Replay(cluster, trial), median(trial.seconds)
            more = seconds / replay(latency, road, burst)
            drag[trial.kind] = Figure(max(1.0, more), _spread(trial))
    return replace(road, drag=tuple(drag.items()))


def _share(
    replay: _Replay, latency: float, road: Road, burst: float, fewer: Shares, flows: int
) -> Figure:
    def crowded(inverse: float) -> Road:
        return replace(road, crowding=(*fewer, (flows, Figure(1 / inverse))))

    inverse = _root(
        lambda inverse: replay(latency, crowded(inverse), burst),
        median(replay.trial.seconds),
        1 / LARGEST_SHARE,
        1 / LEAST_SHARE,
    )
    return Figure(1 / inverse, _spread(replay.trial))


def _together(found: Sequence[Figure]) -> Figure:
    """Of trials that tell the same figure; where they differ it is less sure."""
    values = [figure.value for figure in found]
    apart = (max(values) - min(values)) / 2 / median(values)
    return Figure(median(values), max(apart, *(figure.spread for figure in found)))


class _Replay:
    """A trial's schedules, simulated with other figures than those that they were made for."""

    def __init__(self, cluster: Cluster, trial: Trial) -> None:
        self.trial = trial
        self._cluster = cluster
        self._schedules = schedules(trial.kind, cluster, trial.nbytes)

    def __call__(self, latency: float, road: Road = FREE, burst: float = 0.0) -> float:
        """Seconds."""
        flows = Flows(replace(self._cluster, latency=Duration(latency)), road, burst)
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
    for _ in range(STEPS):
        middle = low + (high - low) * below / (below - above)
        there = rising(middle) - value
        if abs(there) <= CLOSE * value:
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


def _tiny(trials: Sequence[Trial], kind: str) -> Trial | None:
    return next((t for t in trials if t.kind == kind and t.nbytes <= SMALL), None)


def _nbytes(trial: Trial) -> int:
    return trial.nbytes


def _spread(trial: Trial) -> float:
    """The repetitions' standard deviation, relative to their median; outliers don't count."""
    middle = median(trial.seconds)
    return MAD_TO_DEVIATION * median(abs(s - middle) for s in trial.seconds) / middle


def _assumed(trials: Sequence[Trial]) -> list[str]:
    kinds = {trial.kind for trial in trials}
    missing = []
    if "chain" not in kinds:
        missing.append("messages that cost nothing")
    if "native" not in kinds:
        missing.append("a backend that costs nothing")
    return missing
