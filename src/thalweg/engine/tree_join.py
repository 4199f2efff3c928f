"""How a rank takes its place in a coded tree: it meets its neighbours, and starts its relay."""

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

CHILDREN_GRACE_SECONDS = 30.0  # seconds for those below to come, before it begins without them
MIN_POST_QUEUE_COUNT = 64  # letters that may wait for one peer, at least


def join_tree(
    world: World,
    abort_flag: AbortFlag,
    allocation: Allocation,
    schedules: Sequence[Schedule],
    forms: Sequence[ElementType],
    *,
    timeout: float,
    beyond: str = "wait",
    make: Callable[[int, Sequence[Piece], Allocation], Node] = Node,
    first: int = 0,
) -> Relay:
    """Meet the neighbours in the tree, tell them where this rank is, if it was there before, and
    start with the step `first`. Who is below may come later, or never."""
    pieces = pieces_of(schedules, forms, world.rank)
    node = make(world.rank, pieces, allocation)
    node.skip_to(first)
    queue = max(
        MIN_POST_QUEUE_COUNT, (1 + node.kept) * len(pieces)
    )  # for one who is away for a while
    transport = world.best_effort_transport(queue)
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
