"""The trees of plans that don't wait for stragglers: the data of each worker, and its parent.

These are plans with a gradient code, and `lgc`, which takes the fastest workers' gradients and adds
the others' a step later: a star without redundancy. `asp` has no tree, only a root.

If the plan leaves fanout and tolerated stragglers open, a model of the step time chooses them:

    load x compute  +  layers x fanout x message  +  P(a node is missing) x delay

Redundancy pays only against delays that don't grow with the load: pauses, failures, the network. A
`StragglerDelay` is the probability that a worker straggles at a step, and its delay, whatever it
computes. P follows the tree from its leaves: a node is missing if it straggles itself, or if all
members of one of its teams are missing; a team is the children that send the same block.
"""

from __future__ import annotations

from functools import lru_cache
from statistics import fmean
from typing import Any

from thalweg.catalog import COMPENSATE, Catalog, default_catalog
from thalweg.codes import Allocation, allocate, refuse_inaccurate
from thalweg.codes.fractional import team_tree
from thalweg.codes.tolerance import chance_of_waiting
from thalweg.errors import LayoutError, PlanError
from thalweg.facts import Duration, StragglerDelay
from thalweg.plan import Plan
from thalweg.schedules import Group

DEFAULT_FANOUT, DEFAULT_STRAGGLER_COUNT = 4, 1  # without measured stragglers
ASSUMED_COMPUTE_SECONDS, ASSUMED_BUCKET_BYTES = 1.0, 1 << 20  # of the model
MAX_STRAGGLER_COUNT = 3
CANDIDATE_FANOUTS = (2, 3, 4, 6, 8, 12, 16)


def is_coded(plan: Plan, catalog: Catalog | None = None) -> bool:
    codes = (catalog or default_catalog()).codes
    return plan.redundancy is not None and plan.redundancy.name in codes


def is_compensated(plan: Plan) -> bool:
    """True if the slowest workers' gradients are added one step later."""
    return plan.redundancy is not None and plan.redundancy.name == COMPENSATE


def is_relayed(plan: Plan, catalog: Catalog | None = None) -> bool:
    """True if a tree of relays distributes results to the ranks that are present."""
    return is_coded(plan, catalog) or is_compensated(plan)


def waits_for_nobody(plan: Plan, catalog: Catalog | None = None) -> bool:
    return is_relayed(plan, catalog) or plan.cadence.staleness is not None


def fastest(plan: Plan, workers: int) -> int:
    """The number of workers that a compensated step waits for; by default 90 % of them."""
    assert plan.redundancy is not None
    k = plan.redundancy.arguments["k"]
    if k is None:
        return max(1, min(workers - 1, round(0.9 * workers)))
    assert isinstance(k, int)
    if k > workers:
        raise LayoutError(f"k={k} is more than the {workers} workers", f"use k={workers} or less")
    return k


def allocation_of(plan: Plan, group: Group, catalog: Catalog | None = None) -> Allocation:
    """The tree of a plan, and the data of each worker; PlanError for a plan without a code,
    LayoutError if the code doesn't fit these workers."""
    parts = catalog or default_catalog()
    if is_compensated(plan):
        fastest(plan, group.size)
        host, *others = most_reliable_first(group)
        return allocate(team_tree([host, *others], group.size, 0), host)
    topology = parts.topologies[plan.topology.name]
    if plan.redundancy is None or not is_coded(plan, parts) or topology.coded_fanout is None:
        raise PlanError(f"{plan} has no code", "try codedreduce or gc")
    family = parts.codes[plan.redundancy.name]
    redundancy: dict[str, Any] = plan.redundancy.arguments
    host, *others = most_reliable_first(group)
    is_worker = redundancy["root"] == "worker"
    workers = [host, *others] if is_worker else others
    if not workers:
        raise PlanError(f"{plan} has a root and no workers", "use more workers")
    fanout = topology.coded_fanout(len(workers), **plan.topology.arguments)
    fanout, stragglers = _settled(fanout, redundancy["stragglers"], len(workers), group)
    tree = family.build_tree(workers, fanout, stragglers)
    if is_worker and tree.depth > 1:  # the root's host has a leaf, which loads its link least
        tree = family.build_tree([*others, host], fanout, stragglers)
    allocation = allocate(tree, host)
    refuse_inaccurate(allocation, family.name)
    return allocation


def most_reliable_first(group: Group) -> list[int]:
    """The ranks by measured straggler delay, and equal ones in the order of the racks. Ranks near
    the root have most others below them."""
    late = {rank: group.cluster.host(rank).late for rank in group.order}
    return sorted(group.order, key=lambda rank: late[rank].probability * late[rank].delay.seconds)


def _settled(
    fanout: int | None, stragglers: int | None, workers: int, group: Group
) -> tuple[int, int]:
    """The fanout and the tolerated stragglers, chosen by the model if the plan leaves them open and
    straggler delays were measured."""
    if fanout is not None and stragglers is not None:
        return fanout, stragglers
    late = [group.cluster.host(rank).late for rank in group.ranks]
    probability = fmean(host.probability for host in late)
    if not probability:
        default = DEFAULT_STRAGGLER_COUNT if stragglers is None else stragglers
        return fanout or DEFAULT_FANOUT, default
    delay = fmean(host.delay.seconds for host in late if host.probability)
    return choose(
        workers,
        StragglerDelay(probability=probability, delay=Duration(delay)),
        compute=ASSUMED_COMPUTE_SECONDS,
        message=ASSUMED_BUCKET_BYTES / group.slowest_bytes_per_second(),
        fanout=fanout,
        stragglers=stragglers,
    )


def spare_ranks(plan: Plan, group: Group, catalog: Catalog | None = None) -> list[int]:
    """The ranks whose end doesn't end the run: all but the root, if the plan waits for nobody."""
    root = root_of(plan, group, catalog)
    return [] if root is None else [rank for rank in group.ranks if rank != root]


def root_of(plan: Plan, group: Group, catalog: Catalog | None = None) -> int | None:
    """The rank that all others need; None if the plan needs every rank."""
    if plan.cadence.staleness is not None:
        return most_reliable_first(group)[0]
    return allocation_of(plan, group, catalog).host if is_relayed(plan, catalog) else None


@lru_cache(maxsize=64)
def choose(
    workers: int,
    delay: StragglerDelay,
    *,
    compute: float,
    message: float,
    fanout: int | None = None,
    stragglers: int | None = None,
) -> tuple[int, int]:
    """The fanout and the tolerated stragglers of the fastest code, with these if given. `compute`
    is the seconds for all data, `message` for one message over a link."""
    fanouts = sorted(
        {f for f in (*CANDIDATE_FANOUTS, workers) if f <= workers} if fanout is None else {fanout}
    )
    numbers = range(MAX_STRAGGLER_COUNT + 1) if stragglers is None else [stragglers]
    fitting = [(f, s) for s in numbers for f in fanouts if s < min(f, workers)]
    return min(
        fitting,
        key=lambda code: estimate(workers, code[0], code[1], delay, compute, message),
        default=(fanouts[0], max(numbers)),  # building the tree raises the error
    )


def estimate(
    workers: int,
    fanout: int,
    stragglers: int,
    delay: StragglerDelay,
    compute: float,
    message: float,
) -> float:
    """The seconds of a step with this fanout and these tolerated stragglers, by the model above."""
    tree = team_tree(range(workers), fanout, stragglers)
    load = float(max(allocate(tree, 0).loads.values()))
    missed = chance_of_waiting(tree, dict.fromkeys(tree.workers, delay.probability))
    widest = max(map(len, tree.children.values()))
    return load * compute + tree.depth * widest * message + missed * delay.delay.seconds
