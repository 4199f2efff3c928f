"""Calibration: timed schedules that cover what plans do, and the fit of transport costs to them.

*Trials*:

    chain         a tiny message from rank to rank: the cost of a hop on an idle network
    star          tiny messages of all ranks to one: the cost of a message to its receiver
    ring          one flow on every link; two sizes give the rate of a link and its burst size
    gossip        two flows in each direction on every NIC
    ps            all ranks to all ranks at the same time
    hierarchical  as many flows through an uplink as there are hosts behind it
    local         rings inside the hosts, without a link between ranks
    native        the backend's own all-reduce, in the buckets that DDP would have
    others        topologies that declare it, whose connections pause and restart in one exchange,
                  which slows some networks down: their slowdown is the ratio of measured to
                  simulated time

*Fit*: costs with which a simulation takes as long. One cost after the other, each from the trials
that depend on it most, with those found before fixed:

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

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from thalweg.catalog import default_catalog
from thalweg.declarations import Value
from thalweg.facts import (
    MAD_TO_DEVIATION,
    Cluster,
    Duration,
    FittedValue,
    Link,
    Machine,
    Situation,
    TransportCosts,
)
from thalweg.predict.flow_simulator import FREE_TRANSPORT_COSTS, FlowSimulator
from thalweg.schedules import Group, Schedule, together, traffic
from thalweg.steps import DDP_FIRST_BUCKET

TINY_TRIAL_BYTES = 4
MAX_SMALL_TRIAL_BYTES = 4096  # up to this size the cost is that of messages
# Durations of a trial at the links' rates.
SHORT_TRIAL_SECONDS, LONG_TRIAL_SECONDS, MAX_TRIAL_SECONDS = 0.1, 0.25, 0.5
MAX_TRIAL_BYTES = 1 << 26  # shortens trials on fast links
LOCAL_TRIAL_BYTES = 1 << 23  # of trials that cross no link
# The topologies of kinds that differ from their name; the others have default arguments.
TRIAL_TOPOLOGIES: Mapping[str, tuple[str, Mapping[str, Value]]] = {"chain": ("tree", {"fanout": 1})}
TRIAL_ITEM_BYTES = 4
REFERENCE_TRIAL_BYTES = 1 << 22  # from which the seconds per byte are computed
FIT_TOLERANCE_RATIO = 1e-3  # of the measured time
LATENCY_DIGITS = 7  # decimals of the latency's seconds
MAX_ROOT_SEARCH_STEPS = 20
MIN_BANDWIDTH_SHARE_FRACTION, MAX_BANDWIDTH_SHARE_FRACTION = 0.02, 1.1
# A long ring with a lower rate has overflowing queues, which a short one hasn't.
MIN_STEADY_RATE_FRACTION = 0.95
FREE_BACKEND_ASSUMPTION = "a backend that costs nothing"  # as it has no trial
Shares = tuple[tuple[int, FittedValue], ...]


@dataclass(frozen=True, slots=True)
class NetworkTrial:
    """The `seconds` of each repetition: the longest time of any rank by its own clock, from a
    barrier to its own end."""

    kind: str
    nbytes: int
    seconds: tuple[float, ...]


def schedules(kind: str, cluster: Cluster, nbytes: int) -> tuple[Schedule, ...]:
    """The concurrent schedules of a trial with this many bytes on every rank."""
    everybody, elements = Group.everybody(cluster), max(1, nbytes // TRIAL_ITEM_BYTES)
    if kind == "local":
        shared = [everybody.subgroup(host.ranks) for host in cluster.hosts if len(host.ranks) > 1]
        return tuple(_schedule("ring", group, elements) for group in shared)
    parts = in_buckets(elements) if kind == "native" else (elements,)
    return tuple(_schedule(kind, everybody, part) for part in parts)


def _schedule(kind: str, group: Group, elements: int) -> Schedule:
    name, arguments = TRIAL_TOPOLOGIES.get(kind, (kind, {}))
    topology = default_catalog().topologies[name]
    return topology.build(
        group, elements, TRIAL_ITEM_BYTES, 0, **{**topology.defaults, **arguments}
    )


def slowdown_trial_kinds() -> tuple[str, ...]:
    """The topologies whose slowdown is calibrated, each in a trial of its own."""
    topologies = default_catalog().topologies.values()
    return tuple(topology.name for topology in topologies if topology.is_calibrated)


def in_buckets(elements: int) -> tuple[int, ...]:
    """The elements in DDP's buckets, of which the first closes at 1 MiB."""
    first = DDP_FIRST_BUCKET.nbytes // TRIAL_ITEM_BYTES
    return (elements,) if elements <= first else (first, elements - first)


def wanted_trials(
    cluster: Cluster, *, backend: bool, typical: int | None = None
) -> Iterator[tuple[str, int]]:
    """The kinds and sizes of trials that are worth their time on this cluster. Where queues
    overflow, large messages are slower than small ones: `typical` are the bytes that rounds will
    have, if known."""
    if cluster.workers == 1:
        return

    def size(kind: str) -> int:
        if typical is None:
            return trial_bytes_lasting(kind, cluster, LONG_TRIAL_SECONDS)
        least = trial_bytes_lasting(kind, cluster, 2 * SHORT_TRIAL_SECONDS)
        return max(least, min(typical, trial_bytes_lasting(kind, cluster, MAX_TRIAL_SECONDS)))

    yield "chain", TINY_TRIAL_BYTES
    yield "star", TINY_TRIAL_BYTES
    if any(len(host.ranks) > 1 for host in cluster.hosts):
        yield "local", LOCAL_TRIAL_BYTES
    hosts = len(cluster.hosts)
    if hosts > 1:
        yield "ring", trial_bytes_lasting("ring", cluster, SHORT_TRIAL_SECONDS)
        yield "ring", size("ring")
    if hosts > 2:
        yield "gossip", size("gossip")
        yield "ps", size("ps")
    if len(cluster.racks) > 1 and hosts > 1:
        yield "hierarchical", size("hierarchical")
    if hosts > 2:
        for kind in slowdown_trial_kinds():
            yield kind, size(kind)
    if backend:
        yield "native", MAX_SMALL_TRIAL_BYTES
        yield "native", size("native") if hosts > 1 else LOCAL_TRIAL_BYTES


def min_trial_seconds(kind: str, cluster: Cluster, nbytes: int) -> float:
    """The least seconds that such a trial takes."""
    return _busiest(kind, cluster)[1] * nbytes / REFERENCE_TRIAL_BYTES


def trial_bytes_lasting(kind: str, cluster: Cluster, seconds: float) -> int:
    """The bytes with which such a trial keeps its busiest link busy for this long."""
    link, busy = _busiest(kind, cluster)
    if link is None:
        return MAX_TRIAL_BYTES
    nbytes = int(REFERENCE_TRIAL_BYTES * seconds / busy)
    return min(MAX_TRIAL_BYTES, max(2 * MAX_SMALL_TRIAL_BYTES, nbytes))


def concurrent_flows(kind: str, cluster: Cluster) -> int:
    """The number of concurrent flows on the busiest link; 0 if the trial crosses no link."""
    link, _ = _busiest(kind, cluster)
    pairs = {
        (rank, move.peer)
        for schedule in schedules(kind, cluster, REFERENCE_TRIAL_BYTES)
        for rank in schedule.ranks
        for move in schedule.moves(rank)
        if move.kind.sends
    }
    return sum(link in cluster.path(*pair) for pair in pairs)


def _busiest(kind: str, cluster: Cluster) -> tuple[Link | None, float]:
    """The busiest link of a trial of the reference size, and for how many seconds it is busy."""
    crossed = together(
        traffic(schedule, cluster) for schedule in schedules(kind, cluster, REFERENCE_TRIAL_BYTES)
    )
    busy = cluster.busy_seconds(crossed.links).items()
    return max(busy, key=lambda item: item[1], default=(None, 0.0))


def fit(situation: Situation, trials: Sequence[NetworkTrial]) -> Situation:
    """The situation with the latency and the costs that explain the trials, whose schedules were
    built for its cluster. Costs without a trial are 0, and listed as assumed."""
    cluster = situation.cluster
    ours = _Fit(cluster, [trial for trial in trials if trial.kind != "native"])
    native = _Fit(cluster, [trial for trial in trials if trial.kind == "native"])
    kinds = {trial.kind for trial in trials}
    missing = {"chain": "messages that cost nothing", "native": FREE_BACKEND_ASSUMPTION}
    costs = ours.byte(TransportCosts(message=ours.hop()))
    ours.burst = native.burst = ours.burst_of(costs)
    native.latency = ours.latency  # the backend's messages have the same
    machine = Machine(
        ours=ours.slowdowns(ours.crowding(costs)),
        native=native.crowding(native.native_costs()),
        burst=ours.burst,
        assumed=tuple(text for kind, text in missing.items() if kind not in kinds),
    )
    latency = Duration(round(ours.latency, LATENCY_DIGITS))
    return replace(situation, cluster=replace(cluster, latency=latency), machine=machine)


class _Fit:
    """The fit of one transport's costs; `latency` and `burst` are set once they are known."""

    def __init__(self, cluster: Cluster, trials: Sequence[NetworkTrial]) -> None:
        self.cluster = cluster
        self.latency = cluster.latency.seconds
        self.burst = 0.0
        simulations = [_TrialSimulation(cluster, trial) for trial in trials]
        self._small = {one.kind: one for one in reversed(simulations) if one.is_small}
        self._large = sorted((s for s in simulations if not s.is_small), key=lambda s: s.nbytes)

    def hop(self) -> FittedValue:
        """Set the latency of a message; return its cost to its receiver."""
        if not {"chain", "star"} <= self._small.keys():
            return FittedValue(0.0)
        chain, star = self._small["chain"], self._small["star"]
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
        inside = [s for s in self._large if not concurrent_flows(s.kind, self.cluster)]
        if not inside:
            return costs
        largest = inside[-1]
        slowest = largest.measured / largest.nbytes
        byte = self._fitted(largest, lambda x: replace(costs, byte=FittedValue(x)), 0.0, slowest)
        return replace(costs, byte=FittedValue(byte, largest.spread))

    def burst_of(self, costs: TransportCosts) -> float:
        """The burst size of links in bytes, if there are two large rings. Their difference gives
        the rate of a busy link; what the shorter takes less than that is the burst."""
        rings = [simulation for simulation in self._large if simulation.kind == "ring"]
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
            -short.nbytes / 2,
            0.0,
        )

    def native_costs(self) -> TransportCosts:
        """The backend's costs of a message and of a byte."""
        if (tiny := self._small.get("native")) is None:
            return TransportCosts()
        message = self._fitted(
            tiny, lambda x: TransportCosts(message=FittedValue(x)), 0.0, tiny.measured
        )
        return self.byte(TransportCosts(message=FittedValue(message, tiny.spread)))

    def crowding(self, costs: TransportCosts) -> TransportCosts:
        """The costs with the joint share of a link for each number of flows, in rising order."""
        by_flows: dict[int, dict[str, _TrialSimulation]] = {}
        for simulation in self._large:
            flows = concurrent_flows(simulation.kind, self.cluster)
            if flows and simulation.kind not in slowdown_trial_kinds():  # the largest of its kind
                by_flows.setdefault(flows, {})[simulation.kind] = simulation
        shares: Shares = ()
        for flows, alike in sorted(by_flows.items()):
            fractions = [
                self._share(simulation, costs, shares, flows) for simulation in alike.values()
            ]
            shares = (*shares, (flows, _combined(fractions)))
        return replace(costs, crowding=shares) if shares else costs

    def slowdowns(self, costs: TransportCosts) -> TransportCosts:
        """The costs with the slowdown of the schedules that restart connections."""
        largest = {simulation.kind: simulation for simulation in self._large}
        found = [largest[kind] for kind in slowdown_trial_kinds() if kind in largest]
        ratios = (one.measured / one(self.latency, costs, self.burst) for one in found)
        drag = zip(found, ratios, strict=True)
        return replace(
            costs, drag=tuple((s.kind, FittedValue(max(1.0, x), s.spread)) for s, x in drag)
        )

    def _share(
        self, simulation: _TrialSimulation, costs: TransportCosts, fewer: Shares, flows: int
    ) -> FittedValue:
        inverse = self._fitted(
            simulation,
            lambda x: replace(costs, crowding=(*fewer, (flows, FittedValue(1 / x)))),
            1 / MAX_BANDWIDTH_SHARE_FRACTION,
            1 / MIN_BANDWIDTH_SHARE_FRACTION,
        )
        return FittedValue(1 / inverse, simulation.spread)

    def _fitted(
        self,
        simulation: _TrialSimulation,
        costs: Callable[[float], TransportCosts],
        low: float,
        high: float,
    ) -> float:
        """The value in this range with which the costs explain the trial."""
        return _root(
            lambda x: simulation(self.latency, costs(x), self.burst), simulation.measured, low, high
        )


def _combined(found: Sequence[FittedValue]) -> FittedValue:
    """The median of several fits of one value; its spread includes their differences."""
    values = [fitted.value for fitted in found]
    apart = (max(values) - min(values)) / 2 / median(values)
    return FittedValue(median(values), max(apart, *(fitted.spread for fitted in found)))


class _TrialSimulation:
    """A trial's schedules, simulated with other costs than those they were built for."""

    def __init__(self, cluster: Cluster, trial: NetworkTrial) -> None:
        self.kind, self.nbytes = trial.kind, trial.nbytes
        self.is_small = trial.nbytes <= MAX_SMALL_TRIAL_BYTES
        self.measured = median(trial.seconds)
        # The relative standard deviation of the repetitions, estimated without outliers.
        deviation = median(abs(seconds - self.measured) for seconds in trial.seconds)
        self.spread = MAD_TO_DEVIATION * deviation / self.measured
        self._cluster = cluster
        self._schedules = schedules(trial.kind, cluster, trial.nbytes)

    def __call__(
        self, latency: float, costs: TransportCosts = FREE_TRANSPORT_COSTS, burst: float = 0.0
    ) -> float:
        """The seconds of the trial with these costs."""
        cluster = replace(self._cluster, latency=Duration(latency))
        return max(FlowSimulator(cluster, costs, burst).ends(self._schedules, {}).values())


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
