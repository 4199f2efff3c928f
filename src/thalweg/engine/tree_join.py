"""How a rank takes its place in a coded tree: it meets its neighbours, and starts its relay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic

from thalweg.codes import Allocation
from thalweg.engine.tree_node import Form, Node, Piece, pieces_of
from thalweg.engine.tree_relay import Relay, sources
from thalweg.errors import PeerLost
from thalweg.members.abort import Alarm
from thalweg.members.world import World
from thalweg.schedules import Schedule

PATIENCE_BELOW = 30.0  # seconds for those below to come, before it begins without them
SHORTEST_QUEUE = 64  # letters that may wait for one peer, at least


def join_tree(
    world: World,
    alarm: Alarm,
    allocation: Allocation,
    schedules: Sequence[Schedule],
    forms: Sequence[Form],
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
    queue = max(SHORTEST_QUEUE, (1 + node.kept) * len(pieces))  # for one who is away for a while
    post = world.post(queue)
    try:
        above, below = sources(allocation, world.rank)[:1], allocation.below[world.rank]
        post.meet(above, monotonic() + timeout)
        with suppress(PeerLost):
            post.meet(below, monotonic() + min(timeout, PATIENCE_BELOW))
        for neighbour in (*above, *below):
            post.send(post.hello(neighbour))
    except BaseException:
        post.close()
        raise
    return Relay(
        post,
        node,
        allocation,
        alarm,
        timeout=timeout,
        beyond=beyond,
        membership=world.membership,
    )
