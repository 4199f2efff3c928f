"""The cost of stragglers: a plan's steps as a recurrence in time, with delays drawn at random.

    in groups     t(k+1) = max over the group of [t(k) + compute + delay] + its exchange, so a
                  straggler delays its group now, and others when they synchronise with a member
    by a quorum   a step ends when enough ranks have answered; a straggler then still computes an
                  old step, and takes part again in the step that is current when it has ended

The seconds of an exchange are given (`step_simulator.py`); only the waiting is computed here. Draws
depend on the seed alone, so every plan has the same stragglers.

Asynchronous plans (`asp`) have a queue at the root: a worker computes, sends its gradients to the
root, and receives parameters. The root's NIC serves one worker after the other, in both directions
at the same time; its own worker crosses no link. No worker may be more than `staleness` steps ahead
of the slowest.

Where all wait for all, nothing need be drawn. The wait is the expected maximum of all N, an
integral over time:

    E[last of N] = integral over t of P(not all of N have arrived at t)

A host is on time, or with probability p late by its delay; hosts may differ. They are independent:
a common cause, like a congested uplink, is not modelled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import log, prod

import numpy as np
from numpy.typing import NDArray

from thalweg.codes import TREE_ROOT, Allocation
from thalweg.facts import Cluster, StragglerDelay, TransportCosts

MIN_SAMPLED_STEPS, MAX_SAMPLED_STEPS = 400, 4000
SAMPLED_STRAGGLER_STEPS = 200  # expected number of delays in the sample
SAMPLED_WARMUP_STEPS = 20
STRAGGLER_SAMPLE_SEED = 3
SIMULATED_STEPS_PER_WORKER = 60  # of asynchronous plans

Times = NDArray[np.float64]
Quorum = Callable[[Times], float]
"""Maps the times at which ranks have computed to the time at which a step has enough of them."""


@dataclass(frozen=True, slots=True)
class GroupExchange:
    """The members of a group by index, and the seconds of their exchange, whose result is needed
    `delay` steps later."""

    members: tuple[int, ...]
    seconds: float
    delay: int = 0


def draw(cluster: Cluster, ranks: Sequence[int], steps: int | None = None) -> Times:
    """The delay of each rank at each step in seconds; more steps where stragglers are rare."""
    late = [cluster.host(rank).late for rank in ranks]
    probability = np.array([delay.probability for delay in late])
    if steps is None:
        enough = SAMPLED_STRAGGLER_STEPS / max(1e-9, float(probability.sum()))
        steps = round(min(MAX_SAMPLED_STEPS, max(MIN_SAMPLED_STEPS, enough)))
    chances = np.random.default_rng(STRAGGLER_SAMPLE_SEED).random((steps, len(ranks)))
    return np.where(chances < probability, np.array([delay.delay.seconds for delay in late]), 0.0)


def group_step_seconds(
    exchanges: Sequence[Sequence[GroupExchange]], compute: float, late: Times
) -> float:
    """The mean step time, from the exchanges of each step of a period."""
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
        for exchange in exchanges[step % len(exchanges)]:
            members = list(exchange.members)
            end = float(time[members].max()) + exchange.seconds
            if exchange.delay:
                due.setdefault(step + exchange.delay, []).append((members, end))
            else:
                time[members] = end
    return float((time.mean() - since) / (steps - SAMPLED_WARMUP_STEPS))


def quorum_step_seconds(enough: Quorum, compute: Times, exchange: float, late: Times) -> float:
    """The mean step time of a plan that waits for a quorum; `compute` is by rank."""
    steps, ranks = late.shape
    free = np.zeros(ranks)  # the time at which each rank has computed
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
    """The quorum of the first k ranks."""
    return lambda ready: float(np.partition(ready, k - 1)[k - 1])


def decodes(allocation: Allocation, ranks: Sequence[int]) -> Quorum:
    """The quorum of a coded tree: a parent answers once it has its own part and its children's
    answers decode."""
    tree, index = allocation.tree, {rank: i for i, rank in enumerate(ranks)}

    def answered(node: int, ready: Times) -> float:
        own = 0.0 if node == TREE_ROOT else float(ready[index[node]])
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
    """The number of N-th parts of the batch that each rank computes under a code."""
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
    """The mean step time of an asynchronous plan over workers."""
    rates, share = cluster.rates(), costs.bandwidth_share(len(ranks) - 1)

    def seconds(source: int, target: int) -> float:
        links = [rates[link] for link in cluster.path(source, target) if link in rates]
        slowest = min((rate.bits_per_second / 8 for rate in links), default=0.0)
        return nbytes / (slowest * share) if slowest else nbytes * costs.byte.value

    there = {rank: seconds(rank, root) if rank != root else 0.0 for rank in ranks}
    back = {rank: seconds(root, rank) if rank != root else 0.0 for rank in ranks}
    delay = {rank: cluster.seconds_between(rank, root) + costs.message.value for rank in ranks}
    steps = min(SIMULATED_STEPS_PER_WORKER, len(late))
    taken, ended = dict.fromkeys(ranks, 0), dict.fromkeys(ranks, 0.0)
    index = {rank: i for i, rank in enumerate(ranks)}
    computed = [(compute + float(late[0][index[rank]]), rank) for rank in ranks]
    heapify(computed)
    waiting: list[tuple[float, int]] = []
    into = out = 0.0  # the times from which the root's NIC is free, in each direction
    while computed:
        moment, rank = heappop(computed)
        into = max(into, moment) + there[rank]
        out = max(out, into + delay[rank]) + back[rank]
        ended[rank] = out + delay[rank] if rank != root else moment
        taken[rank] += 1
        if taken[rank] < steps:
            waiting.append((ended[rank], rank))
        limit = min(taken.values()) + staleness
        for back_at, worker in [one for one in waiting if taken[one[1]] <= limit]:
            waiting.remove((back_at, worker))
            delayed = float(late[taken[worker]][index[worker]])
            heappush(computed, (max(back_at, moment) + compute + delayed, worker))
    return sum(ended.values()) / (len(ranks) * steps)


def expected_latest(hosts: Sequence[StragglerDelay]) -> float:
    """The expected seconds until the last host has arrived: the delays divide time into intervals,
    in each of which no host is missing with a product of independent probabilities."""
    seconds = start = 0.0
    for stop in sorted({host.delay.seconds for host in hosts if host.probability > 0}):
        late = Counter(host.probability for host in hosts if host.delay.seconds >= stop)
        none = (float(np.exp(n * log(1 - p))) if p < 1 else 0.0 for p, n in late.items())
        seconds += (stop - start) * max(0.0, 1.0 - prod(none))
        start = stop
    return seconds
