"""An explanation as a picture.

Under a code the tree comes first, with the parts of the batch; where replicas differ, the averaging
groups of one period; a plan without rounds is a star. A scene has ranks as lines, rack by rack,
time to the right, and a message as an arrow. The moves of the first chunk are drawn in full colour,
all others faintly behind them, and the picture ends when that chunk has arrived everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from xml.etree import ElementTree as ET

from thalweg.report.explain.async_plan import AsyncPlanPicture
from thalweg.report.explain.coded_plan_svg import CodedPlanPicture
from thalweg.report.explain.groups import GroupsPicture
from thalweg.report.explain.step_view import Explanation, Scene, members_text
from thalweg.report.shapes import box, document, document_text, dot, line, tip, words
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
LEGEND = (
    (MoveKind.ADD, "added"),
    (MoveKind.COPY, "copied"),
    (MoveKind.QUORUM, "decoded from a quorum"),
)


@dataclass(frozen=True, slots=True)
class _View:
    """The slots of a scene that are shown, and the width of one."""

    scene: Scene
    slots: tuple[tuple[Arrow, ...], ...]
    width: int

    @property
    def right(self) -> int:
        return LEFT + self.width * len(self.slots)

    @property
    def height(self) -> int:
        racks = self.scene.ranks_by_rack
        return 34 + LINE * sum(map(len, racks)) + GAP * len(racks) + 24


def draw(explanation: Explanation) -> str:
    """An SVG document: a code's tree, the groups or a star, and all scenes of the first bucket."""
    above = _above(explanation)
    scenes = [scene for scene in explanation.scenes if scene.rounds[0].bucket == 0]
    views = [_view(scene) for scene in scenes]
    width = max([640, *(view.right + 40 for view in views), *(one.width for one in above)])
    height = TOP + sum(one.height for one in above) + sum(view.height for view in views) + 30
    title = f"{explanation.plan}: {members_text(explanation.group)}, step {explanation.step}"
    promise = explanation.guarantee
    lead = f"{promise.promise.value}: {promise.result}"
    root = document(width, height, SCENE_STYLE, title=title, lead=lead)
    top = TOP
    for one in above:
        one.draw(root, top)
        top += one.height
    for view in views:
        _draw_scene(root, view, top)
        top += view.height
    if views:
        _legend(root, top + 12, {arrow.kind for v in views for slot in v.slots for arrow in slot})
    return document_text(root)


def _above(explanation: Explanation) -> list[CodedPlanPicture | GroupsPicture | AsyncPlanPicture]:
    if explanation.coded is not None:
        return [CodedPlanPicture(explanation.coded)]
    if explanation.groups is not None:
        return [GroupsPicture(explanation.groups)]
    if explanation.async_plan is not None:
        return [AsyncPlanPicture(explanation.async_plan, explanation.group.order)]
    return []


def _view(scene: Scene) -> _View:
    first = [i for i, arrows in enumerate(scene.slots) if any(_first(arrow) for arrow in arrows)]
    shown = min(max(first, default=-1) + 2, len(scene.slots), MAX_DRAWN_SLOTS)
    width = max(NARROWEST_SLOT, min(WIDEST_SLOT, SCENE_WIDTH_PIXELS // max(shown, 1)))
    return _View(scene, scene.slots[:shown], width)


def _first(arrow: Arrow) -> bool:
    return arrow.message.start == 0


def _draw_scene(root: ET.Element, view: _View, top: int) -> None:
    left_out = len(view.scene.slots) - len(view.slots)
    more = f" (slots 1 to {len(view.slots)} of {len(view.scene.slots)})" if left_out else ""
    words(root, 16, top + 20, view.scene.title + more)
    lanes: dict[int, int] = {}
    y = top + 34
    cluster = view.scene.rounds[0].group.cluster
    for rack in view.scene.ranks_by_rack:
        box(root, 8, y, view.right + 12, LINE * len(rack), "rack")
        words(root, 14, y + LINE // 2 + 4, cluster.rack(rack[0]).name, "faint")
        for rank in rack:
            lanes[rank] = y + LINE // 2
            words(root, 74, lanes[rank] + 4, f"rank {rank}")
            line(root, LEFT, lanes[rank], view.right, lanes[rank], "lane")
            y += LINE
        y += GAP
    for slot in range(0, len(view.slots), ceil(24 / view.width)):
        words(root, LEFT + view.width * slot + view.width // 2 - 4, y + 4, str(slot + 1), "faint")
    _arrows(root, view, lanes, y)


def _arrows(root: ET.Element, view: _View, lanes: dict[int, int], below: int) -> None:
    total = sum(len(arrows) for arrows in view.slots)
    behind, front = ET.SubElement(root, "g"), ET.SubElement(root, "g")
    inset = view.width // 10
    for slot, arrows in enumerate(view.slots):
        x1 = LEFT + view.width * slot + inset
        x2 = x1 + view.width - 2 * inset
        for arrow in arrows:
            (source, target, start, stop, _), kind = arrow
            if not _first(arrow) and total > MAX_DRAWN_ARROWS:
                continue
            layer = front if _first(arrow) else behind
            name = f"arrow {kind.name}" + (" first" if _first(arrow) else "")
            drawn = line(layer, x1, lanes[source], x2, lanes[target], name)
            chunks = f"chunk {start}" if stop == start + 1 else f"chunks {start}-{stop - 1}"
            tip(drawn, f"slot {slot + 1}: {chunks} from {source} to {target}, {kind.value}")
            if _first(arrow):
                dot(layer, x2, lanes[target], 3, name).set("fill", "none")
    if total > MAX_DRAWN_ARROWS:
        words(
            root,
            LEFT,
            below + 18,
            f"{total} messages: only the moves of chunk 0 are drawn",
            "faint",
        )


def _legend(root: ET.Element, y: int, kinds: set[MoveKind]) -> None:
    x = 16
    for kind, meaning in LEGEND:
        if kind not in kinds:
            continue
        line(root, x, y - 4, x + 22, y - 4, f"arrow first {kind.name}")
        words(root, x + 28, y, meaning, "faint")
        x += 50 + 7 * len(meaning)
    words(root, x, y, "thick: moves of chunk 0; numbers: time slots", "faint")
