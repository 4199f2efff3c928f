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

TINY = 4  # bytes
SMALL = 4096  # bytes: up to there, what counts is messages
SHORT, LONG, LONGEST = 0.1, 0.25, 0.5  # seconds to take, as the links' rates have it
LARGEST = 1 << 26  # bytes: on fast links it takes less than that
INSIDE = 1 << 23  # bytes, where there is no link
FIRST_OF_DDP = 1 << 20  # bytes
DRAGGED = ("halving_doubling", "double_tree", "star")
MADE_BY: Mapping[str, tuple[str, Mapping[str, Value]]] = {  # others as their kind is called
    "chain": ("tree", {"fanout": 1}),
    "star": ("star", {"root": None}),
    "gossip": ("gossip", {"graph": "ring"}),
    "ps": ("ps", {"servers": None}),
    "hierarchical": ("hierarchical", {"form": "parallel"}),
}
ITEM = 4  # bytes
MADE_OF = 1 << 20  # elements, to see what a byte costs on the links


@dataclass(frozen=True, slots=True)
class Trial:
    """`seconds` of each repetition: the longest that any rank took by its own clock, from when it
    had met the others to its own end."""

    kind: str
    nbytes: int
    seconds: tuple[float, ...]


def schedules(kind: str, cluster: Cluster, nbytes: int) -> tuple[Schedule, ...]:
    """What runs at the same time in such a trial of so many bytes on every rank."""
    everybody, elements = Group.everybody(cluster), max(1, nbytes // ITEM)
    if kind == "local":
        shared = [everybody.subgroup(host.ranks) for host in cluster.hosts if len(host.ranks) > 1]
        return tuple(_schedule("ring", group, elements) for group in shared)
    parts = in_buckets(elements) if kind == "native" else (elements,)
    return tuple(_schedule(kind, everybody, part) for part in parts)


def _schedule(kind: str, group: Group, elements: int) -> Schedule:
    name, arguments = MADE_BY.get(kind, (kind, {}))
    return default_catalog().topologies[name].build(group, elements, ITEM, 0, **arguments)


def in_buckets(elements: int) -> tuple[int, ...]:
    """DDP's first bucket closes at 1 MiB."""
    first = FIRST_OF_DDP // ITEM
    return (elements,) if elements <= first else (first, elements - first)


def wanted(
    cluster: Cluster, *, backend: bool, typical: int | None = None
) -> Iterator[tuple[str, int]]:
    """The kinds and sizes of trials that are worth their time on this cluster. Where queues
    overflow, large messages are slower than small ones: `typical` are the bytes that rounds will
    have, if that is known."""
    if cluster.workers == 1:
        return

    def size(kind: str) -> int:
        if typical is None:
            return lasting(kind, cluster, LONG)
        least, most = lasting(kind, cluster, 2 * SHORT), lasting(kind, cluster, LONGEST)
        return max(least, min(typical, most))

    yield "chain", TINY
    yield "star", TINY
    if any(len(host.ranks) > 1 for host in cluster.hosts):
        yield "local", INSIDE
    between = len(cluster.hosts) > 1
    if between:
        yield "ring", lasting("ring", cluster, SHORT)
        yield "ring", size("ring")
    if len(cluster.hosts) > 2:
        yield "gossip", size("gossip")
        yield "ps", size("ps")
    if len(cluster.racks) > 1 and between:
        yield "hierarchical", size("hierarchical")
    if len(cluster.hosts) > 2:
        for kind in DRAGGED:
            yield kind, size(kind)
    if backend:
        yield "native", SMALL
        yield "native", size("native") if between else INSIDE


def busy(kind: str, cluster: Cluster, nbytes: int) -> float:
    """Seconds that such a trial takes at least."""
    return _busiest(kind, cluster, MADE_OF * ITEM)[1] * nbytes / (MADE_OF * ITEM)


def lasting(kind: str, cluster: Cluster, seconds: float) -> int:
    """Bytes with which such a trial keeps the busiest link so long."""
    made = MADE_OF * ITEM
    link, busy = _busiest(kind, cluster, made)
    return LARGEST if link is None else min(LARGEST, max(2 * SMALL, int(made * seconds / busy)))


def crowd(kind: str, cluster: Cluster) -> int:
    """Flows at once on the link that takes longest; 0 if it crosses none."""
    link, _ = _busiest(kind, cluster, MADE_OF * ITEM)
    pairs = {
        (rank, move.peer)
        for schedule in schedules(kind, cluster, MADE_OF * ITEM)
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
