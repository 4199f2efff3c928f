"""An explanation as a picture.

Under a code the tree comes first, with the parts of the batch; where replicas differ, the averaging
groups of one period; a plan without rounds is a star. A scene has ranks as lines, rack by rack,
time to the right, and a message as an arrow. The moves of the first chunk are drawn in full colour,
all others faintly behind them, and the picture ends when that chunk has arrived everywhere.
"""

from __future__ import annotations

from math import ceil
from xml.etree import ElementTree as ET

from thalweg.report.explain.async_plan import draw_async_plan
from thalweg.report.explain.coded_plan_svg import draw_coded_plan
from thalweg.report.explain.groups import draw_groups
from thalweg.report.explain.step_view import Explanation, Scene, members_text
from thalweg.report.shapes import add, box, document, document_text, dot, legend, line, tip, words
from thalweg.schedules import Arrow, MoveKind

LEFT, TOP, LINE, GAP = 130, 64, 26, 18
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
        top = draw_async_plan(root, explanation.async_plan, explanation.group.order, top)
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
    lanes: dict[int, int] = {}
    y = top + 34
    cluster = scene.rounds[0].group.cluster
    for rack in scene.ranks_by_rack:
        box(root, 8, y, right + 12, LINE * len(rack), "rack")
        words(root, 14, y + LINE // 2 + 4, cluster.rack(rack[0]).name, "faint")
        for rank in rack:
            lanes[rank] = y + LINE // 2
            words(root, 74, lanes[rank] + 4, f"rank {rank}")
            line(root, LEFT, lanes[rank], right, lanes[rank], "lane")
            y += LINE
        y += GAP
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
            ends = (x1, lanes[source], x2, lanes[target])
            if _first(arrow):
                name = f"arrow {kind.name} first"
                drawn = line(front, *ends, name)
                dot(front, x2, lanes[target], 3, name).set("fill", "none")
            elif total <= MAX_DRAWN_ARROWS:
                drawn = line(behind, *ends, f"arrow {kind.name}")
            else:
                continue
            chunks = f"chunk {start}" if stop == start + 1 else f"chunks {start}-{stop - 1}"
            tip(drawn, f"slot {slot + 1}: {chunks} from {source} to {target}, {kind.value}")
    return y + 24
