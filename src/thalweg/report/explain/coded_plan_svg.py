"""A coded tree as a picture: on the left the tree, on the right the batch, from its first sample to
its last, with the parts that each worker computes.

Rows are workers, each above its children. A bracket joins a team of replicas; their bars are the
same. A weight other than one is written into its bar.
"""

from __future__ import annotations

from collections.abc import Mapping
from xml.etree import ElementTree as ET

from thalweg.codes import TREE_ROOT
from thalweg.report.explain.coded_plan import (
    BatchPart,
    CodedPlanView,
    fraction_text,
    root_text,
    weight_text,
)
from thalweg.report.shapes import add, box, dot, facts, legend, line, text_width, tip, words

ROW, INDENT, LEFT, HEAD = 22, 28, 30, 34
NARROWEST, WIDEST, ROOM_FOR_A_WEIGHT = 480, 1100, 34
TREE_STYLE = """
.edge { stroke: var(--faint); fill: none; }
.bracket { stroke: var(--c3); stroke-width: 2; fill: none; }
.node { fill: var(--c0); } .root { fill: var(--c1); } .batch { fill: var(--panel); }
.cut { stroke: var(--line); } .one { fill: var(--c0); } .plus { fill: var(--c2); }
.minus { fill: var(--c1); } line.one { stroke: var(--c0); stroke-width: 9; }
line.plus { stroke: var(--c2); stroke-width: 9; } line.minus { stroke: var(--c1); stroke-width: 9; }
.weight { fill: var(--page); font-size: 10px; text-anchor: middle; }
"""
WEIGHTS_LEGEND = (("one", "weight 1"), ("plus", "another weight"), ("minus", "a negative weight"))
PLAIN_LEGEND = (("one", "weight 1"), ("bracket", "a team of replicas: one on time is enough"))


def draw_coded_plan(parent: ET.Element, view: CodedPlanView, top: int) -> int:
    """Draw the tree and the batch, with the facts below them; returns the end of the picture."""
    add(parent, "style", TREE_STYLE)
    allocation, tree = view.allocation, view.allocation.tree
    depths = _depths(view, TREE_ROOT)
    first = top + HEAD + ROW // 2
    places = {
        node: (LEFT + INDENT * depth, first + ROW * row)
        for row, (node, depth) in enumerate(depths.items())
    }
    names = (places[node][0] + text_width(_label(view, node)) for node in depths)
    bars = max(200, max(names) + 24)
    weighted = 1 if view.plain else allocation.cells
    wide = min(WIDEST, max(NARROWEST, ROOM_FOR_A_WEIGHT * weighted))
    words(parent, 16, top + 20, root_text(view))
    bottom = _draw_batch(parent, view, (bars, wide), top + HEAD + ROW)
    for node, children in tree.children.items():
        if children:
            _draw_edges(parent, view, node, places)
    for node, (x, y) in places.items():
        spot = dot(parent, x, y, 5, "root" if node == TREE_ROOT else "node")
        words(parent, x + 10, y + 4, _label(view, node))
        if node != TREE_ROOT:
            tip(spot, _tip(view, node))
            for part in view.parts(node):
                _draw_bar(parent, part, (bars, wide), y)
            words(parent, bars + wide + 10, y + 4, view.work(node), "faint")
    legend(parent, bottom + 16, PLAIN_LEGEND if view.plain else WEIGHTS_LEGEND)
    return facts(parent, bottom + 22, view.facts())


def _depths(view: CodedPlanView, node: int, depth: int = 0) -> dict[int, int]:
    """The layers of a node and of all below it, each node before its children."""
    depths = {node: depth}
    for child in view.allocation.tree.children[node]:
        depths |= _depths(view, child, depth + 1)
    return depths


def _draw_batch(parent: ET.Element, view: CodedPlanView, bars: tuple[int, int], top: int) -> int:
    """Draw the batch behind the bars, with the cuts between its cells; returns its lower end."""
    (left, wide), bottom = bars, top + ROW * len(view.allocation.workers)
    box(parent, left, top, wide, bottom - top, "batch")
    first, last = ("0", "1") if view.batch is None else ("sample 0", f"{view.batch - 1}")
    words(parent, left, top - ROW + 12, first, "faint")
    words(parent, left + wide - text_width(last), top - ROW + 12, last, "faint")
    words(parent, left + wide // 2 - 30, top - ROW + 12, "the batch", "faint")
    for cut in view.allocation.cuts:
        x = round(left + float(cut) * wide, 2)
        tip(line(parent, x, top, x, bottom, "cut"), fraction_text(cut))
    return bottom


def _draw_edges(
    parent: ET.Element, view: CodedPlanView, node: int, places: Mapping[int, tuple[int, int]]
) -> None:
    children = view.allocation.tree.children[node]
    (x, y), right = places[node], places[children[0]][0]
    line(parent, x, y, x, places[children[-1]][1], "edge")
    for child in children:
        line(parent, x, places[child][1], right, places[child][1], "edge")
    for quota in view.quotas(node):
        if len(quota.members) > 1 and view.plain:
            first, last = places[quota.members[0]][1], places[quota.members[-1]][1]
            path = f"M{right - 6},{first - 6} h-5 V{last + 6} h5"
            team = ", ".join(map(str, quota.members))
            tip(
                add(parent, "path", name="bracket", d=path),
                f"a team of replicas: one of {team} is enough",
            )


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


def _draw_bar(parent: ET.Element, part: BatchPart, bars: tuple[int, int], y: int) -> None:
    left, right = (round(bars[0] + float(end) * bars[1], 2) for end in (part.start, part.stop))
    weight = weight_text(part.weight)
    kind = "one" if weight == "1" else "plus" if part.weight > 0 else "minus"
    bar = box(parent, left, y - 8, round(right - left, 2), 16, kind)
    tip(bar, f"{fraction_text(part.start)} to {fraction_text(part.stop)}, weight {weight}")
    if kind != "one" and right - left >= text_width(weight):
        words(parent, (left + right) / 2, y + 4, weight, "weight")
