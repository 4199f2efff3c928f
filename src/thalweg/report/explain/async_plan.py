"""Plans without common rounds: messages to and from one root, at each worker's own speed.

There is no schedule to draw or to check before it runs. The traffic is known all the same: each
step of each worker is one gradient up and one answer down. The picture has the root in the middle,
and the workers round it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import cos, pi, sin
from xml.etree import ElementTree as ET

from thalweg.catalog import Catalog
from thalweg.facts import Link, Workload, about
from thalweg.plan import Plan
from thalweg.redundancy import fastest, is_compensated, root_of
from thalweg.report.shapes import add, dot, facts, legend, line, tip, words
from thalweg.schedules import Group, Traffic

ASYNC_MARGIN_PIXELS = 46
ASYNC_STYLE = """
.up { stroke: var(--c0); stroke-width: 1.6; } .down { stroke: var(--c2); stroke-width: 1.6; }
.node { fill: var(--c0); } .root { fill: var(--c1); }
line.root { stroke: var(--c1); stroke-width: 9; }
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncPlanView:
    """The messages of a plan without rounds; `story` has a line with a name for each kind."""

    root: int
    up_nbytes: int  # per step of one worker
    down_nbytes: int
    story: tuple[tuple[str, str], ...]
    traffic: Traffic


def is_async_plan(plan: Plan) -> bool:
    return is_compensated(plan) or plan.cadence.staleness is not None


def async_plan_view(
    plan: Plan, group: Group, workload: Workload, step: int, catalog: Catalog
) -> AsyncPlanView:
    root = root_of(plan, group, catalog)
    assert root is not None
    up = _compressed(plan, workload, step, catalog)
    down = workload.nbytes
    staleness = plan.cadence.staleness
    if staleness is None:
        story = _compensated(fastest(plan, group.size), group.size, root)
    else:
        story = _asynchronous(staleness, root)
    return AsyncPlanView(
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
            f"the fastest {k} of {workers} make the step: g, their mean, and c, the correction for "
            "the step before"
        ),
        "down": f"rank {root} sends g + c to all workers, which take the step with it",
        "one step late": (
            f"c = {rest}/{workers} (h - g), h the mean of the {rest} that were too late for the "
            "step before"
        ),
        "dropped": "gradients that are older than one step",
    }


def _asynchronous(staleness: int, root: int) -> dict[str, str]:
    return {
        "push": f"a worker sends its gradient to rank {root} whenever it has one",
        "at the root": "each gradient is a step of its own, taken on arrival",
        "pull": f"rank {root} answers that worker alone, with the parameters at that time",
        "bound": (
            f"a worker more than {staleness} steps ahead of the slowest is answered when that has "
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


def draw_async_plan(parent: ET.Element, view: AsyncPlanView, ranks: Sequence[int], top: int) -> int:
    """Draw the root, the workers round it, and the story; returns the end of the picture."""
    add(parent, "style", ASYNC_STYLE)
    radius = max(90, round(34 * len(ranks) / (2 * pi)))
    x, y = radius + ASYNC_MARGIN_PIXELS, top + radius + ASYNC_MARGIN_PIXELS
    others = [rank for rank in ranks if rank != view.root]
    for number, rank in enumerate(others):
        angle = 2 * pi * number / len(others) - pi / 2
        dx, dy = cos(angle), sin(angle)
        for kind, aside, nbytes, ends in (
            ("up", 3, view.up_nbytes, f"{rank} to {view.root}"),
            ("down", -3, view.down_nbytes, f"{view.root} to {rank}"),
        ):
            x1, x2 = (round(x + dx * far - dy * aside, 1) for far in (16, radius))
            y1, y2 = (round(y + dy * far + dx * aside, 1) for far in (16, radius))
            tip(line(parent, x1, y1, x2, y2, kind), f"{about(nbytes, 'B')} from {ends}")
        dot(parent, round(x + dx * radius, 1), round(y + dy * radius, 1), 5, "node")
        name, far = str(rank), radius + 16
        words(parent, x + dx * far - 3 * len(name), y + dy * far + 4, name)
    dot(parent, x, y, 9, "root")
    y += radius + ASYNC_MARGIN_PIXELS
    entries = [
        ("up", f"up, {about(view.up_nbytes, 'B')} per step"),
        ("down", f"down, {about(view.down_nbytes, 'B')} per step"),
        ("root", f"the root, in rank {view.root}"),
    ]
    legend(parent, y, entries)
    return facts(parent, y + 6, view.story)
