"""Trials of a network: timed schedules that span what plans do, from which a road is fitted.

chain         a tiny message from rank to rank: what a hop costs while others rest
star          tiny messages of everybody to one: what a message costs its receiver
ring          one flow on every link; in two sizes, which tell what a link carries, and how much
              of that at once after a rest
gossip        two flows each way on every NIC
ps            everybody to everybody at the same time
hierarchical  as many flows through an uplink as there are hosts behind it
local         rings inside the hosts, where no link is between ranks
native        the backend's own all-reduce, in the buckets that DDP would have
others        topologies whose connections rest and get going again in one exchange, which some
              networks take badly: how much longer than simulated is their drag
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from thalweg.catalog import default_catalog
from thalweg.declarations import Value
from thalweg.facts import Cluster, Link
from thalweg.schedules import Group, Schedule, traffic

TINY_TRIAL_BYTES = 4  # bytes
MAX_SMALL_TRIAL_BYTES = 4096  # bytes: up to there, what counts is messages
SHORT_TRIAL_SECONDS, LONG_TRIAL_SECONDS, MAX_TRIAL_SECONDS = (
    0.1,
    0.25,
    0.5,
)  # seconds to take, as the links' rates have it
MAX_TRIAL_BYTES = 1 << 26  # bytes: on fast links it takes less than that
LOCAL_TRIAL_BYTES = 1 << 23  # bytes, where there is no link
DDP_FIRST_BUCKET_BYTES = 1 << 20  # bytes
SLOWDOWN_TRIAL_KINDS = ("halving_doubling", "double_tree", "star")
TRIAL_TOPOLOGIES: Mapping[
    str, tuple[str, Mapping[str, Value]]
] = {  # others as their kind is called
    "chain": ("tree", {"fanout": 1}),
    "star": ("star", {"root": None}),
    "gossip": ("gossip", {"graph": "ring"}),
    "ps": ("ps", {"servers": None}),
    "hierarchical": ("hierarchical", {"form": "parallel"}),
}
TRIAL_ITEM_BYTES = 4  # bytes
REFERENCE_TRIAL_ELEMENTS = 1 << 20  # elements, to see what a byte costs on the links


@dataclass(frozen=True, slots=True)
class NetworkTrial:
    """`seconds` of each repetition: the longest that any rank took by its own clock, from when it
    had met the others to its own end."""

    kind: str
    nbytes: int
    seconds: tuple[float, ...]


def schedules(kind: str, cluster: Cluster, nbytes: int) -> tuple[Schedule, ...]:
    """What runs at the same time in such a trial of so many bytes on every rank."""
    everybody, elements = Group.everybody(cluster), max(1, nbytes // TRIAL_ITEM_BYTES)
    if kind == "local":
        shared = [everybody.subgroup(host.ranks) for host in cluster.hosts if len(host.ranks) > 1]
        return tuple(_schedule("ring", group, elements) for group in shared)
    parts = in_buckets(elements) if kind == "native" else (elements,)
    return tuple(_schedule(kind, everybody, part) for part in parts)


def _schedule(kind: str, group: Group, elements: int) -> Schedule:
    name, arguments = TRIAL_TOPOLOGIES.get(kind, (kind, {}))
    return (
        default_catalog().topologies[name].build(group, elements, TRIAL_ITEM_BYTES, 0, **arguments)
    )


def in_buckets(elements: int) -> tuple[int, ...]:
    """DDP's first bucket closes at 1 MiB."""
    first = DDP_FIRST_BUCKET_BYTES // TRIAL_ITEM_BYTES
    return (elements,) if elements <= first else (first, elements - first)


def wanted_trials(
    cluster: Cluster, *, backend: bool, typical: int | None = None
) -> Iterator[tuple[str, int]]:
    """The kinds and sizes of trials that are worth their time on this cluster. Where queues
    overflow, large messages are slower than small ones: `typical` are the bytes that rounds will
    have, if that is known."""
    if cluster.workers == 1:
        return

    def size(kind: str) -> int:
        if typical is None:
            return trial_bytes_lasting(kind, cluster, LONG_TRIAL_SECONDS)
        least, most = (
            trial_bytes_lasting(kind, cluster, 2 * SHORT_TRIAL_SECONDS),
            trial_bytes_lasting(kind, cluster, MAX_TRIAL_SECONDS),
        )
        return max(least, min(typical, most))

    yield "chain", TINY_TRIAL_BYTES
    yield "star", TINY_TRIAL_BYTES
    if any(len(host.ranks) > 1 for host in cluster.hosts):
        yield "local", LOCAL_TRIAL_BYTES
    between = len(cluster.hosts) > 1
    if between:
        yield "ring", trial_bytes_lasting("ring", cluster, SHORT_TRIAL_SECONDS)
        yield "ring", size("ring")
    if len(cluster.hosts) > 2:
        yield "gossip", size("gossip")
        yield "ps", size("ps")
    if len(cluster.racks) > 1 and between:
        yield "hierarchical", size("hierarchical")
    if len(cluster.hosts) > 2:
        for kind in SLOWDOWN_TRIAL_KINDS:
            yield kind, size(kind)
    if backend:
        yield "native", MAX_SMALL_TRIAL_BYTES
        yield "native", size("native") if between else LOCAL_TRIAL_BYTES


def min_trial_seconds(kind: str, cluster: Cluster, nbytes: int) -> float:
    """Seconds that such a trial takes at least."""
    return (
        _busiest(kind, cluster, REFERENCE_TRIAL_ELEMENTS * TRIAL_ITEM_BYTES)[1]
        * nbytes
        / (REFERENCE_TRIAL_ELEMENTS * TRIAL_ITEM_BYTES)
    )


def trial_bytes_lasting(kind: str, cluster: Cluster, seconds: float) -> int:
    """Bytes with which such a trial keeps the busiest link so long."""
    made = REFERENCE_TRIAL_ELEMENTS * TRIAL_ITEM_BYTES
    link, busy = _busiest(kind, cluster, made)
    return (
        MAX_TRIAL_BYTES
        if link is None
        else min(MAX_TRIAL_BYTES, max(2 * MAX_SMALL_TRIAL_BYTES, int(made * seconds / busy)))
    )


def concurrent_flows(kind: str, cluster: Cluster) -> int:
    """Flows at once on the link that takes longest; 0 if it crosses none."""
    link, _ = _busiest(kind, cluster, REFERENCE_TRIAL_ELEMENTS * TRIAL_ITEM_BYTES)
    pairs = {
        (rank, move.peer)
        for schedule in schedules(kind, cluster, REFERENCE_TRIAL_ELEMENTS * TRIAL_ITEM_BYTES)
        for rank in schedule.ranks
        for move in schedule.moves(rank)
        if move.kind.sends
    }
    return sum(link in cluster.path(*pair) for pair in pairs)


def _busiest(kind: str, cluster: Cluster, nbytes: int) -> tuple[Link | None, float]:
    """And how many seconds it is busy at its rate."""
    rates = cluster.rates()
    busy = {
        link: 8 * crossed / rates[link].bits_per_second
        for schedule in schedules(kind, cluster, nbytes)
        for link, crossed in traffic(schedule, cluster).links.items()
        if link in rates
    }
    longest = max(busy, key=lambda link: busy[link], default=None)
    return longest, 0.0 if longest is None else busy[longest]
