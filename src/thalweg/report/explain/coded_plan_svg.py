"""A coded tree as a picture: on the left the tree, on the right the batch, from its first sample to
its last, with the parts that each worker computes.

Rows are workers, each above its children. A bracket joins a team of replicas; their bars are the
same. A weight other than one is written into its bar.
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
from thalweg.report.shapes import FACT_LINE_PIXELS, box, dot, facts, line, text_width, tip, words

ROW, INDENT, LEFT, HEAD = 22, 28, 30, 34
NARROWEST, WIDEST, ROOM_FOR_A_WEIGHT = 480, 1100, 34
TREE_STYLE = """
.edge { stroke: var(--faint); fill: none; }
.bracket { stroke: var(--c3); stroke-width: 2; fill: none; }
.node { fill: var(--c0); } .root { fill: var(--c1); } .batch { fill: var(--panel); }
.cut { stroke: var(--line); } .one { fill: var(--c0); } .plus { fill: var(--c2); }
.minus { fill: var(--c1); } .weight { fill: var(--page); font-size: 10px; text-anchor: middle; }
"""
LEGEND = (("one", "weight 1"), ("plus", "another weight"), ("minus", "a negative weight"))


@dataclass(frozen=True, slots=True)
class _PictureLayout:
    """The places of rows and bars in the picture."""

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
        longest = max(text_width(self.view.work(rank)) for rank in self.view.allocation.workers)
        facts_width = 130 + max(text_width(text) for _, text in self.view.facts())
        return max(plan.bars + plan.wide + 30 + longest, facts_width)

    @property
    def height(self) -> int:
        nodes = 1 + len(self.view.allocation.workers)
        return HEAD + ROW * nodes + 24 + FACT_LINE_PIXELS * len(self.view.facts()) + 20

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
        facts(parent, below + 6, self.view.facts(), 150)

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
        ends = [INDENT * depths[node] + text_width(_label(self.view, node)) for node in rows]
        bars = LEFT + max(ends) + 24
        weighted = 1 if self.view.plain else self.view.allocation.cells
        wide = min(WIDEST, max(NARROWEST, ROOM_FOR_A_WEIGHT * weighted))
        return _PictureLayout(self.view, rows, depths, top, max(bars, 200), wide)


def _axis(parent: ET.Element, plan: _PictureLayout) -> None:
    view, cuts = plan.view, plan.view.allocation.cuts
    bottom = plan.top + HEAD + ROW * len(plan.rows)
    words(parent, 16, plan.top + 20, root_text(view))
    top, height = plan.top + HEAD + ROW, ROW * (len(plan.rows) - 1)
    box(parent, plan.bars, top, plan.wide, height, "batch")
    ends = ("0", "1") if view.batch is None else ("sample 0", f"{view.batch - 1}")
    words(parent, plan.bars, plan.top + HEAD + 12, ends[0], "faint")
    last = plan.bars + plan.wide - text_width(ends[1])
    words(parent, last, plan.top + HEAD + 12, ends[1], "faint")
    words(parent, plan.bars + plan.wide // 2 - 30, plan.top + HEAD + 12, "the batch", "faint")
    for cut in cuts:
        x = plan.at(cut)
        tip(line(parent, x, top, x, bottom, "cut"), fraction_text(cut))


def _edges(parent: ET.Element, plan: _PictureLayout, node: int) -> None:
    children = plan.view.allocation.tree.children[node]
    if not children:
        return
    x, right = plan.x(node), plan.x(children[0])
    line(parent, x, plan.y(node), x, plan.y(children[-1]), "edge")
    for child in children:
        line(parent, x, plan.y(child), right, plan.y(child), "edge")
    for quota in plan.view.quotas(node):
        if len(quota.members) > 1 and plan.view.plain:
            first, last = plan.y(quota.members[0]), plan.y(quota.members[-1])
            path = f"M{right - 6},{first - 6} h-5 V{last + 6} h5"
            bracket = ET.SubElement(parent, "path", {"class": "bracket", "d": path})
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
    spot = dot(parent, x, y, 5, "root" if node == TREE_ROOT else "node")
    words(parent, x + 10, y + 4, _label(view, node))
    if node == TREE_ROOT:
        return
    tip(spot, _tip(view, node))
    for part in view.parts(node):
        _bar(parent, plan, part, y)
    words(parent, plan.bars + plan.wide + 10, y + 4, view.work(node), "faint")


def _bar(parent: ET.Element, plan: _PictureLayout, part: BatchPart, y: int) -> None:
    left, right = plan.at(part.start), plan.at(part.stop)
    weight = weight_text(part.weight)
    kind = "one" if weight == "1" else "plus" if part.weight > 0 else "minus"
    bar = box(parent, left, y - 8, round(right - left, 2), 16, kind)
    tip(bar, f"{fraction_text(part.start)} to {fraction_text(part.stop)}, weight {weight}")
    if kind != "one" and right - left >= text_width(weight):
        words(parent, round((left + right) / 2), y + 4, weight, "weight")


def _legend(parent: ET.Element, plan: _PictureLayout, y: int) -> None:
    x = 16
    for kind, meaning in LEGEND if not plan.view.plain else LEGEND[:1]:
        box(parent, x, y - 9, 14, 10, kind)
        words(parent, x + 20, y, meaning, "faint")
        x += 40 + text_width(meaning)
    if plan.view.plain:
        line(parent, x, y - 10, x, y + 1, "bracket")
        words(parent, x + 8, y, "a team of replicas: one on time is enough", "faint")
