"""Calibration trials: timed schedules that cover what plans do, from which costs are fitted.

chain         a tiny message from rank to rank: the cost of a hop on an idle network
star          tiny messages of all ranks to one: the cost of a message to its receiver
ring          one flow on every link; two sizes give the rate of a link and its burst size
gossip        two flows in each direction on every NIC
ps            all ranks to all ranks at the same time
hierarchical  as many flows through an uplink as there are hosts behind it
local         rings inside the hosts, without a link between ranks
native        the backend's own all-reduce, in the buckets that DDP would have
others        topologies that declare it, whose connections pause and restart in one exchange, which
              slows some networks down: their slowdown is the ratio of measured to simulated time
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from thalweg.catalog import default_catalog
from thalweg.declarations import Value
from thalweg.facts import Cluster, Link
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
    rates = cluster.rates()
    crossed = together(
        traffic(schedule, cluster) for schedule in schedules(kind, cluster, REFERENCE_TRIAL_BYTES)
    )
    busy = {link: rates[link].seconds(n) for link, n in crossed.links.items() if link in rates}
    return max(busy.items(), key=lambda item: item[1], default=(None, 0.0))
