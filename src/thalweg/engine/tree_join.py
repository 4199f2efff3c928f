"""A rank joins a coded tree: it connects to its parent and children and starts its relay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic

from thalweg.codes import Allocation
from thalweg.engine.tree_node import ElementType, Node, Piece, pieces_of
from thalweg.engine.tree_relay import Relay, sources
from thalweg.errors import PeerLost
from thalweg.members.abort import AbortFlag
from thalweg.members.world import World
from thalweg.schedules import Schedule

CHILDREN_GRACE_SECONDS = 30.0  # a rank starts without children that need longer to connect
MIN_POST_QUEUE_COUNT = 64  # messages queued for one peer


def join_tree(
    world: World,
    abort_flag: AbortFlag,
    allocation: Allocation,
    schedules: Sequence[Schedule],
    element_types: Sequence[ElementType],
    *,
    timeout: float,
    beyond: str = "wait",
    make: Callable[[int, Sequence[Piece], Allocation], Node] = Node,
    first: int = 0,
) -> Relay:
    """Connect to parent and children, send them this rank's address in case it rejoins, and start
    with the step `first`. Children may connect later, or never."""
    pieces = pieces_of(schedules, element_types, world.rank)
    node = make(world.rank, pieces, allocation)
    node.skip_to(first)
    # The queue bridges a peer's absence.
    queue_length = max(MIN_POST_QUEUE_COUNT, (1 + node.kept) * len(pieces))
    transport = world.best_effort_transport(queue_length)
    try:
        above, below = sources(allocation, world.rank)[:1], allocation.below[world.rank]
        transport.wait_for_peers(above, monotonic() + timeout)
        with suppress(PeerLost):
            transport.wait_for_peers(below, monotonic() + min(timeout, CHILDREN_GRACE_SECONDS))
        for neighbour in (*above, *below):
            transport.send(transport.hello(neighbour))
    except BaseException:
        transport.close()
        raise
    return Relay(
        transport,
        node,
        allocation,
        abort_flag,
        timeout=timeout,
        beyond=beyond,
        membership=world.membership,
    )
