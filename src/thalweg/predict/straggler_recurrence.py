"""What late workers cost: a plan's steps as a recurrence in time, with lateness drawn at random.

    in groups     t(k+1) = max over the group of [t(k) + computing + lateness] + its exchange, so a
                  late worker holds up its group now, and others when they meet one of it
    by a quorum   a step is over when enough have answered; who is late still computes an old step
                  then, and takes part again in the step that is under way when it is done

What an exchange takes is known (`replay.py`); only the waiting is found here. Draws depend on the
seed alone, so every plan meets the same late workers.

Where everybody goes at its own pace (`asp`) there is a queue at the root: a worker computes, sends
its gradients to the root, and gets parameters back. The root's NIC serves one worker after the
other, in and out at the same time; its own worker crosses no link. Nobody may be more than
`staleness` steps ahead of the slowest.

Where all wait for all, nothing need be drawn. Waiting for all of N is waiting for their maximum;
doing without s of them, for the order statistic of rank N-s. Both are integrals of the chance that
too few have come by t:

    E[k-th of N] = integral over t of P(fewer than k of N are there at t)

A host is on time, or with probability p late by its delay; hosts may differ. They are independent
of each other: what delays several at once, as a congested uplink does, is not in here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import log

import numpy as np
from numpy.typing import NDArray

from thalweg.codes import TREE_ROOT, Allocation
from thalweg.facts import Cluster, StragglerDelay, TransportCosts

MIN_SAMPLED_STEPS, MAX_SAMPLED_STEPS = 400, 4000  # steps that are drawn
SAMPLED_STRAGGLER_STEPS = 200  # of them, in which somebody is late
SAMPLED_WARMUP_STEPS = 20  # of them, which don't count
STRAGGLER_SAMPLE_SEED = 3

Times = NDArray[np.float64]
SIMULATED_STEPS_PER_WORKER = 60  # steps a worker
Quorum = Callable[[Times], float]
"""From when each rank has computed its part to when a step can do with what is there."""


@dataclass(frozen=True, slots=True)
class GroupExchange:
    """Members, by their place in the order of ranks, and the seconds of their exchange; the result
    is needed `delay` steps later."""

    members: tuple[int, ...]
    seconds: float
    delay: int = 0


def draw(
    cluster: Cluster,
    ranks: Sequence[int],
    steps: int | None = None,
    seed: int = STRAGGLER_SAMPLE_SEED,
) -> Times:
    """Seconds by which each rank is late at each step; more steps where that is rare."""
    late = [cluster.host(rank).late for rank in ranks]
    often = np.array([one.probability for one in late])
    if steps is None:
        steps = round(
            min(
                MAX_SAMPLED_STEPS,
                max(MIN_SAMPLED_STEPS, SAMPLED_STRAGGLER_STEPS / max(1e-9, float(often.sum()))),
            )
        )
    chances = np.random.default_rng(seed).random((steps, len(ranks)))
    by = np.array([one.delay.seconds for one in late])
    return np.where(chances < often, by, 0.0)


def is_punctual(delay: StragglerDelay) -> bool:
    return not delay.probability * delay.delay.seconds


def group_step_seconds(
    meetings: Sequence[Sequence[GroupExchange]], compute: float, late: Times
) -> float:
    """Seconds of a step: `meetings` are those of each step of a period."""
    steps, ranks = late.shape
    time = np.zeros(ranks)
    due: dict[int, list[tuple[list[int], float]]] = {}
    since = 0.0
    for step in range(steps):
        if step == SAMPLED_WARMUP_STEPS:
            since = float(time.mean())
        time = time + compute + late[step]
        for members, end in due.pop(step, []):
            time[members] = np.maximum(time[members], end)
        for meet in meetings[step % len(meetings)]:
            members = list(meet.members)
            end = float(time[members].max()) + meet.seconds
            if meet.delay:
                due.setdefault(step + meet.delay, []).append((members, end))
            else:
                time[members] = end
    return float((time.mean() - since) / (steps - SAMPLED_WARMUP_STEPS))


def quorum_step_seconds(enough: Quorum, compute: Times, exchange: float, late: Times) -> float:
    """Seconds of a step that waits for a quorum; `compute` is by rank."""
    steps, ranks = late.shape
    free = np.zeros(ranks)  # when each is done with what it computes
    now = since = 0.0
    for step in range(steps):
        if step == SAMPLED_WARMUP_STEPS:
            since = now
        ready = np.maximum(now, free) + compute + late[step]
        end = enough(ready)
        free = np.where(free < end, ready, free)
        now = end + exchange
    return float((now - since) / (steps - SAMPLED_WARMUP_STEPS))


def first_k_arrival(k: int) -> Quorum:
    """The k that are first."""
    return lambda ready: float(np.partition(ready, k - 1)[k - 1])


def decodes(allocation: Allocation, ranks: Sequence[int]) -> Quorum:
    """When the root of a coded tree has enough: a parent answers once it has its own part, and its
    children's answers decode."""
    tree, place = allocation.tree, {rank: i for i, rank in enumerate(ranks)}

    def answered(node: int, ready: Times) -> float:
        own = 0.0 if node == TREE_ROOT else float(ready[place[node]])
        children = tree.children.get(node, ())
        if not children:
            return own
        answers = [answered(child, ready) for child in children]
        arrived: set[int] = set()
        for member in sorted(range(len(children)), key=answers.__getitem__):
            arrived.add(member)
            if tree.codes[node].decode(frozenset(arrived)) is not None:
                return max(own, answers[member])
        return max(own, *answers)

    return lambda ready: answered(TREE_ROOT, ready)


def loads(allocation: Allocation, ranks: Sequence[int]) -> Mapping[int, float]:
    """How many N-th parts of the batch each rank computes under a code."""
    return {rank: float(len(ranks) * allocation.loads.get(rank, 0)) for rank in ranks}


def async_step_seconds(
    cluster: Cluster,
    costs: TransportCosts,
    ranks: Sequence[int],
    root: int,
    nbytes: float,
    compute: float,
    late: Times,
    staleness: int,
) -> float:
    """Seconds of a step, the mean over workers."""
    rates, share = cluster.rates(), costs.bandwidth_share(max(1, len(ranks) - 1))

    def seconds(source: int, target: int) -> float:
        links = [rates[link] for link in cluster.path(source, target) if link in rates]
        slowest = min((rate.bits_per_second / 8 for rate in links), default=0.0)
        return nbytes / (slowest * share) if slowest else nbytes * costs.byte.value

    there = {rank: seconds(rank, root) if rank != root else 0.0 for rank in ranks}
    back = {rank: seconds(root, rank) if rank != root else 0.0 for rank in ranks}
    delay = {rank: cluster.seconds_between(rank, root) + costs.message.value for rank in ranks}
    steps = min(SIMULATED_STEPS_PER_WORKER, len(late))
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


def expected_latest(hosts: Sequence[StragglerDelay]) -> float:
    """Seconds until the last of them has come."""
    return expected_arrival(hosts, len(hosts))


def expected_arrival(hosts: Sequence[StragglerDelay], number: int) -> float:
    """Seconds until so many of them have come: the delays cut time into stretches, in each of which
    the number of hosts that are still out is a sum of independent chances."""
    spare = len(hosts) - number
    seconds = start = 0.0
    for stop in sorted({host.delay.seconds for host in hosts if host.probability > 0}):
        out = [host.probability for host in hosts if host.delay.seconds >= stop]
        seconds += (stop - start) * chance_of_more(out, spare)
        start = stop
    return seconds


def chance_of_more(chances: Sequence[float], number: int) -> float:
    """That more than so many of these independent events happen."""
    happening = np.ones(1)
    for chance, times in Counter(chances).items():
        happening = np.convolve(happening, binomial(times, chance)[: number + 1])[: number + 1]
    if number >= len(chances):
        return 0.0
    return max(0.0, 1.0 - float(happening.sum()))


def binomial(trials: int, chance: float) -> NDArray[np.float64]:
    """The chance of 0, 1, ..., `trials` successes, by logarithms so that 100,000 don't underflow:
    P(k+1) / P(k) = (n-k)/(k+1) p/(1-p)."""
    if chance in (0.0, 1.0):
        certain = np.zeros(trials + 1)
        certain[round(trials * chance)] = 1.0
        return certain
    k = np.arange(trials)
    ratios = np.log((trials - k) / (k + 1.0)) + log(chance / (1 - chance))
    logs = trials * log(1 - chance) + np.concatenate(([0.0], np.cumsum(ratios)))
    return np.asarray(np.exp(logs), np.float64)
