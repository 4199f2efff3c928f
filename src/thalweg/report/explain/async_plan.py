"""Plans without common rounds: messages to and from one root, at each worker's own speed.

There is no schedule to draw or to check before it runs. The traffic is known all the same: each
step of each worker is one gradient up and one answer down. The picture has the root in the middle,
and the workers round it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import cos, pi, sin
from xml.etree import ElementTree as ET

from thalweg.catalog import Catalog
from thalweg.facts import Link, Workload, about
from thalweg.plan import Plan
from thalweg.redundancy import fastest, is_compensated, root_of
from thalweg.report.shapes import FACT_LINE_PIXELS, dot, facts, line, text_width, tip, words
from thalweg.schedules import Group, Traffic

ASYNC_MARGIN_PIXELS = 46
ASYNC_STYLE = """
.up { stroke: var(--c0); stroke-width: 1.6; } .down { stroke: var(--c2); stroke-width: 1.6; }
.node { fill: var(--c0); } .root { fill: var(--c1); }
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


@dataclass(frozen=True, slots=True)
class AsyncPlanPicture:
    found: AsyncPlanView
    ranks: tuple[int, ...]

    @property
    def radius(self) -> int:
        return max(90, round(34 * len(self.ranks) / (2 * pi)))

    @property
    def width(self) -> int:
        longest = max(text_width(text) for _, text in self.found.story)
        return max(2 * (self.radius + ASYNC_MARGIN_PIXELS), 140 + longest)

    @property
    def height(self) -> int:
        return 2 * (self.radius + ASYNC_MARGIN_PIXELS) + FACT_LINE_PIXELS * (
            len(self.found.story) + 2
        )

    def draw(self, parent: ET.Element, top: int) -> None:
        ET.SubElement(parent, "style").text = ASYNC_STYLE
        x, y = self.radius + ASYNC_MARGIN_PIXELS, top + self.radius + ASYNC_MARGIN_PIXELS
        others = [rank for rank in self.ranks if rank != self.found.root]
        for number, rank in enumerate(others):
            turn = 2 * pi * number / len(others) - pi / 2
            self._spoke(parent, rank, (x, y), (cos(turn), sin(turn)))
        dot(parent, x, y, 9, "root")
        y = top + 2 * (self.radius + ASYNC_MARGIN_PIXELS)
        up, down = about(self.found.up_nbytes, "B"), about(self.found.down_nbytes, "B")
        line(parent, 16, y - 4, 38, y - 4, "up")
        words(parent, 44, y, f"up, {up} per step", "faint")
        line(parent, 196, y - 4, 218, y - 4, "down")
        words(parent, 224, y, f"down, {down} per step", "faint")
        dot(parent, 392, y - 4, 6, "root")
        words(parent, 404, y, f"the root, in rank {self.found.root}", "faint")
        facts(parent, y + 6, self.found.story)

    def _spoke(
        self, parent: ET.Element, rank: int, centre: tuple[int, int], turn: tuple[float, float]
    ) -> None:
        """Draw a worker, and the two directions of its traffic side by side."""
        (x, y), (dx, dy), root = centre, turn, self.found.root
        for kind, aside, nbytes, ends in (
            ("up", 3, self.found.up_nbytes, f"{rank} to {root}"),
            ("down", -3, self.found.down_nbytes, f"{root} to {rank}"),
        ):
            points = [
                round(value, 1)
                for far in (16, self.radius)
                for value in (x + dx * far - dy * aside, y + dy * far + dx * aside)
            ]
            x1, y1, x2, y2 = points
            tip(line(parent, x1, y1, x2, y2, kind), f"{about(nbytes, 'B')} from {ends}")
        dot(parent, round(x + dx * self.radius, 1), round(y + dy * self.radius, 1), 5, "node")
        name, far = str(rank), self.radius + 16
        words(parent, round(x + dx * far - 3 * len(name)), round(y + dy * far + 4), name)
