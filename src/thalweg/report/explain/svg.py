"""An explanation as a picture.

Under a code the tree comes first, and what everybody computes; where replicas differ, who meets
whom over one period; a plan without rounds is a star. A scene has ranks as lines, rack by rack,
time to the right, and a message as an arrow. The way of the first chunk is drawn in full colour,
everything else faintly behind it, and the picture ends when that chunk has arrived everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from xml.etree import ElementTree as ET

from thalweg.report.explain.async_plan import AsyncPlanPicture
from thalweg.report.explain.coded_plan_svg import CodedPlanPicture
from thalweg.report.explain.groups import GroupsPicture
from thalweg.report.explain.step_view import Explanation, Scene, members_text
from thalweg.report.shapes import line, tip, words
from thalweg.schedules import Arrow, MoveKind

LEFT, TOP, LINE, GAP = 130, 64, 26, 18
WIDEST_BEAT, NARROWEST_BEAT, SCENE_WIDTH_PIXELS = 44, 6, 1600
MAX_DRAWN_SLOTS = 400
MAX_DRAWN_ARROWS = 6000
SCENE_STYLE = """
svg { background: #ffffff; font: 12px system-ui, sans-serif; }
text { fill: #1b1f24; } .faint { fill: #57606a; } .title { font-size: 15px; font-weight: 600; }
.lane { stroke: #d0d7de; } .rack { fill: #f6f8fa; }
.ADD { stroke: #0969da; } .COPY { stroke: #1a7f37; } .QUORUM { stroke: #bc4c00; }
.arrow { stroke-width: 1; opacity: 0.22; } .first { stroke-width: 2.4; opacity: 1; }
@media (prefers-color-scheme: dark) {
svg { background: #0d1117; } text { fill: #e6edf3; } .faint { fill: #8d96a0; }
.lane { stroke: #30363d; } .rack { fill: #161b22; }
.ADD { stroke: #58a6ff; } .COPY { stroke: #3fb950; } .QUORUM { stroke: #f0883e; }
}
"""
LEGEND = (
    (MoveKind.ADD, "added"),
    (MoveKind.COPY, "copied"),
    (MoveKind.QUORUM, "decoded from a quorum"),
)


@dataclass(frozen=True, slots=True)
class _View:
    """The part of a scene that is shown, and how wide a beat is in it."""

    scene: Scene
    slots: tuple[tuple[Arrow, ...], ...]
    width: int

    @property
    def right(self) -> int:
        return LEFT + self.width * len(self.slots)

    @property
    def height(self) -> int:
        seats = self.scene.ranks_by_rack
        return 34 + LINE * sum(len(rack) for rack in seats) + GAP * len(seats) + 24


def draw(explanation: Explanation) -> str:
    """A code's tree, the groups or a star, and all scenes of the first bucket, one below the other,
    as an SVG document."""
    above = _above(explanation)
    scenes = [scene for scene in explanation.scenes if scene.rounds[0].bucket == 0]
    views = [_view(scene) for scene in scenes]
    width = max([640, *(view.right + 40 for view in views), *(one.width for one in above)])
    height = TOP + sum(one.height for one in above) + sum(view.height for view in views) + 30
    size = {"width": str(width), "height": str(height), "viewBox": f"0 0 {width} {height}"}
    root = ET.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", **size})
    ET.SubElement(root, "style").text = SCENE_STYLE
    title = f"{explanation.plan}: {members_text(explanation.group)}, step {explanation.step}"
    words(root, 16, 26, title, "title")
    promise = explanation.guarantee
    words(root, 16, 46, f"{promise.promise.value}: {promise.result}", "faint")
    top = TOP
    for one in above:
        one.draw(root, top)
        top += one.height
    for view in views:
        _draw_scene(root, view, top)
        top += view.height
    if views:
        _legend(root, top + 12, {arrow.kind for v in views for beat in v.slots for arrow in beat})
    ET.indent(root)
    return ET.tostring(root, encoding="unicode") + "\n"


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
    width = max(NARROWEST_BEAT, min(WIDEST_BEAT, SCENE_WIDTH_PIXELS // max(shown, 1)))
    return _View(scene, scene.slots[:shown], width)


def _first(arrow: Arrow) -> bool:
    return arrow.message.start == 0


def _draw_scene(root: ET.Element, view: _View, top: int) -> None:
    left_out = len(view.scene.slots) - len(view.slots)
    more = f" (beats 1 to {len(view.slots)} of {len(view.scene.slots)})" if left_out else ""
    words(root, 16, top + 20, view.scene.title + more)
    lanes: dict[int, int] = {}
    y = top + 34
    cluster = view.scene.rounds[0].group.cluster
    for rack in view.scene.ranks_by_rack:
        width, height = view.right + 12, LINE * len(rack)
        band = {"x": "8", "y": str(y), "width": str(width), "height": str(height)}
        ET.SubElement(root, "rect", {"class": "rack", **band})
        words(root, 14, y + LINE // 2 + 4, cluster.rack(rack[0]).name, "faint")
        for rank in rack:
            lanes[rank] = y + LINE // 2
            words(root, 74, lanes[rank] + 4, f"rank {rank}")
            line(root, LEFT, lanes[rank], view.right, lanes[rank], "lane")
            y += LINE
        y += GAP
    for beat in range(0, len(view.slots), ceil(24 / view.width)):
        words(root, LEFT + view.width * beat + view.width // 2 - 4, y + 4, str(beat + 1), "faint")
    _arrows(root, view, lanes, y)


def _arrows(root: ET.Element, view: _View, lanes: dict[int, int], below: int) -> None:
    total = sum(len(arrows) for arrows in view.slots)
    behind, front = ET.SubElement(root, "g"), ET.SubElement(root, "g")
    inset = view.width // 10
    for beat, arrows in enumerate(view.slots):
        x1 = LEFT + view.width * beat + inset
        x2 = x1 + view.width - 2 * inset
        for arrow in arrows:
            (source, target, start, stop, _), kind = arrow
            if not _first(arrow) and total > MAX_DRAWN_ARROWS:
                continue
            layer = front if _first(arrow) else behind
            name = f"arrow {kind.name}" + (" first" if _first(arrow) else "")
            drawn = line(layer, x1, lanes[source], x2, lanes[target], name)
            chunks = f"chunk {start}" if stop == start + 1 else f"chunks {start}-{stop - 1}"
            text = f"beat {beat + 1}: {chunks} from {source} to {target}, {kind.value}"
            tip(drawn, text)
            if _first(arrow):
                dot = {"cx": str(x2), "cy": str(lanes[target]), "r": "3"}
                ET.SubElement(layer, "circle", {"class": name, "fill": "none", **dot})
    if total > MAX_DRAWN_ARROWS:
        words(root, LEFT, below + 18, f"{total} messages: only chunk 0's way is drawn", "faint")


def _legend(root: ET.Element, y: int, kinds: set[MoveKind]) -> None:
    x = 16
    for kind, meaning in LEGEND:
        if kind not in kinds:
            continue
        line(root, x, y - 4, x + 22, y - 4, f"arrow first {kind.name}")
        words(root, x + 28, y, meaning, "faint")
        x += 50 + 7 * len(meaning)
    words(root, x, y, "thick: the way of chunk 0; numbers: beats", "faint")
