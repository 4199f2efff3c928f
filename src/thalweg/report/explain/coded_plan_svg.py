"""A coded tree as a picture: on the left who answers whom, on the right the batch, from its first
sample to its last, and what each worker computes of it.

Rows are workers, each above those who answer it. A bracket holds a team of replicas together; their
bars are the same. A weight that isn't one is written into its bar.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from itertools import count
from xml.etree import ElementTree as ET

from thalweg.codes import TREE_ROOT
from thalweg.report.explain.coded_plan import (
    BatchPart,
    CodedPlanView,
    fraction_text,
    root_text,
    weight_text,
)
from thalweg.report.shapes import line, tip, words

ROW, INDENT, LEFT, HEAD = 22, 28, 30, 34
NARROWEST, WIDEST, ROOM_FOR_A_WEIGHT = 480, 1100, 34
TREE_CHARACTER_PIXELS = 6.4  # width of a letter, about
FACT = 18
TREE_STYLE = """
.edge { stroke: #8c959f; fill: none; } .bracket { stroke: #8250df; stroke-width: 2; fill: none; }
.node { fill: #0969da; } .root { fill: #bc4c00; } .batch { fill: #f6f8fa; }
.cut { stroke: #d0d7de; } .one { fill: #0969da; } .plus { fill: #1a7f37; } .minus { fill: #bc4c00; }
.weight { fill: #ffffff; font-size: 10px; text-anchor: middle; }
@media (prefers-color-scheme: dark) {
.edge { stroke: #6e7681; } .bracket { stroke: #a371f7; } .batch { fill: #161b22; }
.cut { stroke: #30363d; }
}
"""
LEGEND = (
    ("one", "weight 1"),
    ("plus", "another weight"),
    ("minus", "a negative weight"),
)


@dataclass(frozen=True, slots=True)
class _PictureLayout:
    """Where things are."""

    view: CodedPlanView
    rows: dict[int, int]  # nodes, in the order of their rows
    depths: dict[int, int]
    top: int
    bars: int  # x where the batch begins
    wide: int  # and how wide it is

    def x(self, node: int) -> int:
        return LEFT + INDENT * self.depths[node]

    def y(self, node: int) -> int:
        return self.top + HEAD + ROW * self.rows[node] + ROW // 2

    def at(self, part: Fraction) -> float:
        return round(self.bars + float(part) * self.wide, 2)


@dataclass(frozen=True, slots=True)
class CodedPlanPicture:
    view: CodedPlanView

    @property
    def width(self) -> int:
        plan = self._plan(0)
        longest = max([len(self.view.work(rank)) for rank in self.view.allocation.workers])
        return max(
            plan.bars + plan.wide + 30 + round(TREE_CHARACTER_PIXELS * longest), self._words_width()
        )

    @property
    def height(self) -> int:
        nodes = 1 + len(self.view.allocation.workers)
        return HEAD + ROW * nodes + 24 + FACT * len(self.view.facts()) + 20

    def draw(self, parent: ET.Element, top: int) -> None:
        plan = self._plan(top)
        ET.SubElement(parent, "style").text = TREE_STYLE
        _axis(parent, plan)
        for node in plan.rows:
            _edges(parent, plan, node)
        for node in plan.rows:
            _node(parent, plan, node)
        below = top + HEAD + ROW * len(plan.rows) + 16
        _legend(parent, plan, below)
        for number, (name, text) in enumerate(self.view.facts(), start=1):
            y = below + 6 + FACT * number
            words(parent, 16, y, name, "faint")
            words(parent, 110, y, text)

    def _plan(self, top: int) -> _PictureLayout:
        tree = self.view.allocation.tree
        rows: dict[int, int] = {}
        depths = {TREE_ROOT: 0}
        numbers = count()
        waiting = [TREE_ROOT]
        while waiting:
            node = waiting.pop()
            rows[node] = next(numbers)
            for child in reversed(tree.children[node]):
                depths[child] = depths[node] + 1
                waiting.append(child)
        ends = [
            INDENT * depths[node] + TREE_CHARACTER_PIXELS * len(_label(self.view, node))
            for node in rows
        ]
        bars = LEFT + round(max(ends)) + 24
        weighted = 1 if self.view.plain else self.view.allocation.cells
        wide = min(WIDEST, max(NARROWEST, ROOM_FOR_A_WEIGHT * weighted))
        return _PictureLayout(self.view, rows, depths, top, max(bars, 200), wide)

    def _words_width(self) -> int:
        longest = max(len(text) for _, text in self.view.facts())
        return 130 + round(TREE_CHARACTER_PIXELS * longest)


def _axis(parent: ET.Element, plan: _PictureLayout) -> None:
    view, cuts = plan.view, plan.view.allocation.cuts
    bottom = plan.top + HEAD + ROW * len(plan.rows)
    words(parent, 16, plan.top + 20, root_text(view))
    scale = {"class": "batch", "x": str(plan.bars), "width": str(plan.wide)}
    band = {"y": str(plan.top + HEAD + ROW), "height": str(ROW * (len(plan.rows) - 1))}
    ET.SubElement(parent, "rect", {**scale, **band})
    ends = ("0", "1") if view.batch is None else ("sample 0", f"{view.batch - 1}")
    words(parent, plan.bars, plan.top + HEAD + 12, ends[0], "faint")
    last = plan.bars + plan.wide - round(TREE_CHARACTER_PIXELS * len(ends[1]))
    words(parent, last, plan.top + HEAD + 12, ends[1], "faint")
    words(parent, plan.bars + plan.wide // 2 - 30, plan.top + HEAD + 12, "the batch", "faint")
    for cut in cuts:
        x = plan.at(cut)
        mark = line(parent, x, plan.top + HEAD + ROW, x, bottom, "cut")
        tip(mark, fraction_text(cut))


def _edges(parent: ET.Element, plan: _PictureLayout, node: int) -> None:
    children = plan.view.allocation.tree.children[node]
    if not children:
        return
    x, right = plan.x(node), plan.x(children[0])
    line(parent, x, plan.y(node), x, plan.y(children[-1]), "edge")
    for child in children:
        line(parent, x, plan.y(child), right, plan.y(child), "edge")
    for quota in plan.view.quotas(node):
        together = len(quota.members) > 1 and plan.view.plain
        if together:
            first, last = plan.y(quota.members[0]), plan.y(quota.members[-1])
            way = f"M{right - 6},{first - 6} h-5 V{last + 6} h5"
            bracket = ET.SubElement(parent, "path", {"class": "bracket", "d": way})
            team = ", ".join(map(str, quota.members))
            tip(bracket, f"a team of replicas: one of {team} is enough")


def _label(view: CodedPlanView, node: int) -> str:
    host = view.allocation.host
    if node == TREE_ROOT:
        return f"root, in rank {host}" if host in view.allocation.weights else f"root, rank {host}"
    return f"rank {node}, has the root" if node == host else f"rank {node}"


def _tip(view: CodedPlanView, node: int) -> str:
    text = f"rank {node} computes {view.work(node)}"
    if node != view.allocation.host:
        return text
    above = view.root_answers
    return f"{text}, has the root" + (f", and answers rank {above}" if above is not None else "")


def _node(parent: ET.Element, plan: _PictureLayout, node: int) -> None:
    x, y, view = plan.x(node), plan.y(node), plan.view
    kind = "root" if node == TREE_ROOT else "node"
    dot = ET.SubElement(parent, "circle", {"class": kind, "cx": str(x), "cy": str(y), "r": "5"})
    words(parent, x + 10, y + 4, _label(view, node))
    if node == TREE_ROOT:
        return
    tip(dot, _tip(view, node))
    for part in view.parts(node):
        _bar(parent, plan, part, y)
    words(parent, plan.bars + plan.wide + 10, y + 4, view.work(node), "faint")


def _bar(parent: ET.Element, plan: _PictureLayout, part: BatchPart, y: int) -> None:
    left, right = plan.at(part.start), plan.at(part.stop)
    weight = weight_text(part.weight)
    kind = "one" if weight == "1" else "plus" if part.weight > 0 else "minus"
    size = {"x": str(left), "y": str(y - 8), "width": f"{right - left:.2f}", "height": "16"}
    bar = ET.SubElement(parent, "rect", {"class": kind, **size})
    tip(bar, f"{fraction_text(part.start)} to {fraction_text(part.stop)}, weight {weight}")
    if kind != "one" and right - left >= TREE_CHARACTER_PIXELS * len(weight):
        words(parent, round((left + right) / 2), y + 4, weight, "weight")


def _legend(parent: ET.Element, plan: _PictureLayout, y: int) -> None:
    x = 16
    for kind, meaning in LEGEND if not plan.view.plain else LEGEND[:1]:
        box = {"x": str(x), "y": str(y - 9), "width": "14", "height": "10"}
        ET.SubElement(parent, "rect", {"class": kind, **box})
        words(parent, x + 20, y, meaning, "faint")
        x += 40 + round(TREE_CHARACTER_PIXELS * len(meaning))
    if plan.view.plain:
        line(parent, x, y - 10, x, y + 1, "bracket")
        words(parent, x + 8, y, "a team of replicas: one on time is enough", "faint")
