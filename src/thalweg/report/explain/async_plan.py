"""Plans without common rounds: letters to and from one root, at everybody's own pace.

There is nothing to put in beats, and nothing to check before it runs. What travels is known all the
same: each step of each worker is one gradient up and one answer down. The picture has the root in
the middle, and everybody round it.
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
from thalweg.report.shapes import line, tip, words
from thalweg.schedules import Group, Traffic

ASYNC_CHARACTER_PIXELS, FACT, ASYNC_MARGIN_PIXELS = 6.4, 18, 46
ASYNC_STYLE = """
.up { stroke: #0969da; stroke-width: 1.6; } .down { stroke: #1a7f37; stroke-width: 1.6; }
.node { fill: #0969da; } .root { fill: #bc4c00; }
@media (prefers-color-scheme: dark) { .up { stroke: #58a6ff; } .down { stroke: #3fb950; } }
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncPlanView:
    """`story` is who sends what to whom, a line each with its name."""

    root: int
    up_nbytes: int  # of one worker's step
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


@dataclass(frozen=True, slots=True)
class AsyncPlanPicture:
    found: AsyncPlanView
    ranks: tuple[int, ...]

    @property
    def radius(self) -> int:
        return max(90, round(34 * len(self.ranks) / (2 * pi)))

    @property
    def width(self) -> int:
        longest = max(len(text) for _, text in self.found.story)
        return max(
            2 * (self.radius + ASYNC_MARGIN_PIXELS), 140 + round(ASYNC_CHARACTER_PIXELS * longest)
        )

    @property
    def height(self) -> int:
        return 2 * (self.radius + ASYNC_MARGIN_PIXELS) + FACT * (len(self.found.story) + 2)

    def draw(self, parent: ET.Element, top: int) -> None:
        ET.SubElement(parent, "style").text = ASYNC_STYLE
        x, y = self.radius + ASYNC_MARGIN_PIXELS, top + self.radius + ASYNC_MARGIN_PIXELS
        others = [rank for rank in self.ranks if rank != self.found.root]
        for number, rank in enumerate(others):
            turn = 2 * pi * number / len(others) - pi / 2
            self._spoke(parent, rank, (x, y), (cos(turn), sin(turn)))
        ET.SubElement(parent, "circle", {"class": "root", "cx": str(x), "cy": str(y), "r": "9"})
        y = top + 2 * (self.radius + ASYNC_MARGIN_PIXELS)
        up, down = about(self.found.up_nbytes, "B"), about(self.found.down_nbytes, "B")
        line(parent, 16, y - 4, 38, y - 4, "up")
        words(parent, 44, y, f"up, {up} a step", "faint")
        line(parent, 196, y - 4, 218, y - 4, "down")
        words(parent, 224, y, f"down, {down} a step", "faint")
        ET.SubElement(parent, "circle", {"class": "root", "cx": "392", "cy": str(y - 4), "r": "6"})
        words(parent, 404, y, f"the root, in rank {self.found.root}", "faint")
        for number, (name, text) in enumerate(self.found.story, start=1):
            words(parent, 16, y + 6 + FACT * number, name, "faint")
            words(parent, 116, y + 6 + FACT * number, text)

    def _spoke(
        self,
        parent: ET.Element,
        rank: int,
        centre: tuple[int, int],
        way: tuple[float, float],
    ) -> None:
        """The worker, and the two directions side by side."""
        (x, y), (dx, dy) = centre, way
        for kind, aside in (("up", 3), ("down", -3)):
            ends = [
                (x + dx * far - dy * aside, y + dy * far + dx * aside) for far in (16, self.radius)
            ]
            (x1, y1), (x2, y2) = [(round(a, 1), round(b, 1)) for a, b in ends]
            arrow = line(parent, x1, y1, x2, y2, kind)
            nbytes = self.found.up_nbytes if kind == "up" else self.found.down_nbytes
            ends_text = f"{rank} to {self.found.root}"
            if kind == "down":
                ends_text = f"{self.found.root} to {rank}"
            tip(arrow, f"{about(nbytes, 'B')} from {ends_text}")
        spot = {"cx": f"{x + dx * self.radius:.1f}", "cy": f"{y + dy * self.radius:.1f}"}
        ET.SubElement(parent, "circle", {"class": "node", "r": "5", **spot})
        name = f"{rank}"
        far = self.radius + 16
        words(parent, round(x + dx * far - 3 * len(name)), round(y + dy * far + 4), name)
