"""Plans without common rounds: letters to and from one root, at everybody's own pace.

There is nothing to put in beats, and nothing to check before it runs. What travels is known all the
same: each step of each worker is one gradient up and one answer down.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from thalweg.catalog import Catalog
from thalweg.coding import fastest, is_compensated, root_of
from thalweg.facts import Link, Workload
from thalweg.plan import Plan
from thalweg.schedules import Group, Traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class Mailbox:
    """`story` is who sends what to whom, a line each with its name."""

    root: int
    up_nbytes: int  # of one worker's step
    down_nbytes: int
    story: tuple[tuple[str, str], ...]
    traffic: Traffic


def has_mailbox(plan: Plan) -> bool:
    return is_compensated(plan) or plan.cadence.staleness is not None


def mailbox(plan: Plan, group: Group, workload: Workload, step: int, catalog: Catalog) -> Mailbox:
    root = root_of(plan, group, catalog)
    assert root is not None
    up = _compressed(plan, workload, step, catalog)
    down = workload.nbytes
    staleness = plan.cadence.staleness
    if staleness is None:
        story = _compensated(fastest(plan, group.size), group.size, root)
    else:
        story = _asynchronous(staleness, root)
    return Mailbox(
        root=root,
        up_nbytes=up,
        down_nbytes=down,
        story=tuple(story.items()),
        traffic=_traffic(group, root, up, down),
    )


def _compensated(k: int, workers: int, root: int) -> dict[str, str]:
    rest = workers - k
    return {
        "up": f"every worker sends its gradient to rank {root}, with the number of its step",
        "at the root": (
            f"the fastest {k} of {workers} make the step: g, their mean, and c, what the "
            "others lacked a step ago"
        ),
        "down": f"rank {root} sends g + c to everybody, who takes the step with it",
        "one step late": (
            f"c = {rest}/{workers} (h - g), h the mean of the {rest} that came too late for the "
            "step before"
        ),
        "dropped": "what is older than one step",
    }


def _asynchronous(staleness: int, root: int) -> dict[str, str]:
    return {
        "push": f"a worker sends its gradient to rank {root} whenever it has one",
        "at the root": "each gradient is a step of its own, taken when it comes",
        "pull": f"rank {root} answers that worker alone, with the parameters as they are then",
        "bound": (
            f"who is more than {staleness} steps ahead of the slowest is answered when that has "
            "caught up"
        ),
    }


def _compressed(plan: Plan, workload: Workload, step: int, catalog: Catalog) -> int:
    if plan.precision is None:
        return workload.nbytes
    compressor = catalog.compressors[plan.precision.name]
    return sum(
        payload.nbytes
        for bucket in workload.buckets(plan.settings.bucket)
        for payload in compressor.payloads(bucket.tensors, step, **plan.precision.arguments)
    )


def _traffic(group: Group, root: int, up: int, down: int) -> Traffic:
    others = [rank for rank in group.ranks if rank != root]
    links: Counter[Link] = Counter()
    for rank in others:
        for link in group.cluster.path(rank, root):
            links[link] += up
        for link in group.cluster.path(root, rank):
            links[link] += down
    return Traffic(
        sent={root: len(others) * down, **dict.fromkeys(others, up)},
        received={root: len(others) * up, **dict.fromkeys(others, down)},
        messages={root: len(others), **dict.fromkeys(others, 1)},
        links=dict(links),
    )
