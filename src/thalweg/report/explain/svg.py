"""An explanation as a picture.

Under a code the tree comes first, with the parts of the batch; where replicas differ, the averaging
groups of one period; a plan without rounds is a star. A scene has ranks as lines, rack by rack,
time to the right, and a message as an arrow. The moves of the first chunk are drawn in full colour,
all others faintly behind them, and the picture ends when that chunk has arrived everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, cos, pi, sin
from xml.etree import ElementTree as ET

from thalweg.codes import TREE_ROOT
from thalweg.facts import about
from thalweg.report.explain.coded_plan import (
    BatchPart,
    CodedPlanView,
    fraction_text,
    root_text,
    weight_text,
)
from thalweg.report.explain.groups import draw_groups
from thalweg.report.explain.step_view import AsyncPlanView, Explanation, Scene, members_text
from thalweg.report.shapes import (
    add,
    box,
    document,
    document_text,
    dot,
    facts,
    lanes,
    legend,
    line,
    text_width,
    tip,
    words,
)
from thalweg.schedules import Arrow, MoveKind

LEFT, TOP = 130, 64
WIDEST_SLOT, NARROWEST_SLOT, SCENE_WIDTH_PIXELS = 44, 6, 1600
MAX_DRAWN_SLOTS = 400
MAX_DRAWN_ARROWS = 6000
SCENE_STYLE = """
.lane { stroke: var(--line); } .ADD { stroke: var(--c0); } .COPY { stroke: var(--c2); }
.QUORUM { stroke: var(--c1); } .arrow { stroke-width: 1; opacity: 0.22; }
.first { stroke-width: 2.4; opacity: 1; }
"""
LEGEND = {
    MoveKind.ADD: "added",
    MoveKind.COPY: "copied",
    MoveKind.QUORUM: "decoded from a quorum",
}
Slots = tuple[tuple[Arrow, ...], ...]
ROW, INDENT, TREE_LEFT, HEAD = 22, 28, 30, 34
NARROWEST, WIDEST, ROOM_FOR_A_WEIGHT = 480, 1100, 34
ASYNC_MARGIN_PIXELS = 46
ASYNC_STYLE = """
.up { stroke: var(--c0); stroke-width: 1.6; } .down { stroke: var(--c2); stroke-width: 1.6; }
.node { fill: var(--c0); } .root { fill: var(--c1); }
line.root { stroke: var(--c1); stroke-width: 9; }
"""
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


def draw(explanation: Explanation) -> str:
    """An SVG document: a code's tree, the groups or a star, and all scenes of the first bucket."""
    title = f"{explanation.plan}: {members_text(explanation.group)}, step {explanation.step}"
    promise = explanation.guarantee
    lead = f"{promise.promise.value}: {promise.result}"
    root, top = document(SCENE_STYLE, title=title, lead=lead), TOP
    if explanation.coded is not None:
        top = draw_coded_plan(root, explanation.coded, top)
    elif explanation.groups is not None:
        top = draw_groups(root, explanation.groups, top)
    elif explanation.async_plan is not None:
        top = _draw_async_plan(root, explanation.async_plan, explanation.group.order, top)
    kinds: set[MoveKind] = set()
    for scene in explanation.scenes:
        if scene.bucket == 0:
            slots = _shown_slots(scene)
            kinds |= {arrow.kind for arrows in slots for arrow in arrows}
            top = _draw_scene(root, scene, slots, top)
    if explanation.scenes:
        entries = [(f"arrow first {kind.name}", LEGEND[kind]) for kind in LEGEND if kind in kinds]
        entries.append(("first lane", "thick: moves of chunk 0; numbers: time slots"))
        legend(root, top + 12, entries)
    return document_text(root)


def _shown_slots(scene: Scene) -> Slots:
    first = [i for i, arrows in enumerate(scene.slots) if any(_first(arrow) for arrow in arrows)]
    return scene.slots[: min(max(first, default=-1) + 2, MAX_DRAWN_SLOTS)]


def _first(arrow: Arrow) -> bool:
    return arrow.message.start == 0


def _draw_scene(root: ET.Element, scene: Scene, slots: Slots, top: int) -> int:
    """Draw the lanes of the ranks and the arrows between them; returns the end of the scene."""
    wide = max(NARROWEST_SLOT, min(WIDEST_SLOT, SCENE_WIDTH_PIXELS // max(len(slots), 1)))
    right = LEFT + wide * len(slots)
    shown = f" (slots 1 to {len(slots)} of {len(scene.slots)})"
    words(root, 16, top + 20, scene.title + (shown if len(slots) < len(scene.slots) else ""))
    cluster = scene.rounds[0].group.cluster
    racks = {
        cluster.rack(rack[0]).name: {rank: f"rank {rank}" for rank in rack}
        for rack in scene.ranks_by_rack
    }
    middles, y = lanes(root, racks, top + 34, right + 12)
    for middle in middles.values():
        line(root, LEFT, middle, right, middle, "lane")
    for slot in range(0, len(slots), ceil(24 / wide)):
        words(root, LEFT + wide * slot + wide // 2 - 4, y + 4, str(slot + 1), "faint")
    total = sum(map(len, slots))
    if total > MAX_DRAWN_ARROWS:
        words(root, LEFT, y + 18, f"{total} messages: only the moves of chunk 0 are drawn", "faint")
    behind, front = add(root, "g"), add(root, "g")
    for slot, arrows in enumerate(slots):
        x1 = LEFT + wide * slot + wide // 10
        x2 = x1 + wide - 2 * (wide // 10)
        for arrow in arrows:
            (source, target, start, stop, _), kind = arrow
            ends = (x1, middles[source], x2, middles[target])
            if _first(arrow):
                name = f"arrow {kind.name} first"
                drawn = line(front, *ends, name)
                dot(front, x2, middles[target], 3, name).set("fill", "none")
            elif total <= MAX_DRAWN_ARROWS:
                drawn = line(behind, *ends, f"arrow {kind.name}")
            else:
                continue
            chunks = f"chunk {start}" if stop == start + 1 else f"chunks {start}-{stop - 1}"
            tip(drawn, f"slot {slot + 1}: {chunks} from {source} to {target}, {kind.value}")
    return y + 24


def draw_coded_plan(parent: ET.Element, view: CodedPlanView, top: int) -> int:
    """Draw the tree and the batch, with the facts below them; returns the end of the picture."""
    add(parent, "style", TREE_STYLE)
    allocation, tree = view.allocation, view.allocation.tree
    depths = _depths(view, TREE_ROOT)
    first = top + HEAD + ROW // 2
    places = {
        node: (TREE_LEFT + INDENT * depth, first + ROW * row)
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


def _draw_async_plan(
    parent: ET.Element, view: AsyncPlanView, ranks: Sequence[int], top: int
) -> int:
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
    return facts(parent, y + 6, view.story.items())
