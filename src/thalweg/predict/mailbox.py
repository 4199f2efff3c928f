"""What a step takes where everybody goes at its own pace (`asp`): a queue at the root.

A worker computes, sends its gradients to the root, and gets parameters back. The root's NIC serves
one worker after the other, in and out at the same time; its own worker crosses no link. Nobody may
be more than `staleness` steps ahead of the slowest.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from thalweg.facts import Cluster, Road
from thalweg.predict.recurrence import Times

KEPT = 60  # steps a worker


def own_pace(
    cluster: Cluster,
    road: Road,
    ranks: Sequence[int],
    root: int,
    nbytes: float,
    compute: float,
    late: Times,
    staleness: int,
) -> float:
    """Seconds of a step, the mean over workers."""
    rates, share = cluster.rates(), road.share(max(1, len(ranks) - 1))

    def seconds(source: int, target: int) -> float:
        links = [rates[link] for link in cluster.path(source, target) if link in rates]
        slowest = min((rate.bits_per_second / 8 for rate in links), default=0.0)
        return nbytes / (slowest * share) if slowest else nbytes * road.byte.value

    there = {rank: seconds(rank, root) if rank != root else 0.0 for rank in ranks}
    back = {rank: seconds(root, rank) if rank != root else 0.0 for rank in ranks}
    delay = {rank: cluster.seconds_between(rank, root) + road.message.value for rank in ranks}
    steps = min(KEPT, len(late))
    taken = dict.fromkeys(ranks, 0)
    ended: dict[int, list[float]] = {rank: [] for rank in ranks}
    computed: list[tuple[float, int]] = []
    waiting: list[tuple[float, int]] = []
    into = out = 0.0  # when the root's NIC is free, each way
    for place, rank in enumerate(ranks):
        heappush(computed, (compute + float(late[0][place]), rank))
    place_of = {rank: place for place, rank in enumerate(ranks)}
    while computed:
        moment, rank = heappop(computed)
        into = max(into, moment) + there[rank]
        out = max(out, into + delay[rank]) + back[rank]
        now = out + delay[rank] if rank != root else moment
        taken[rank] += 1
        ended[rank].append(now)
        waiting.append((now, rank))
        slowest = min(taken.values())
        for back_at, who in list(waiting):
            if taken[who] >= steps:
                waiting.remove((back_at, who))
            elif taken[who] <= slowest + staleness:
                waiting.remove((back_at, who))
                lateness = float(late[taken[who]][place_of[who]])
                heappush(computed, (max(back_at, moment) + compute + lateness, who))
    return sum(times[-1] for times in ended.values()) / (len(ranks) * steps)
