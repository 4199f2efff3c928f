"""A scene as a picture: ranks as lines, rack by rack, time to the right, a message as an arrow.

The way of the first chunk is drawn in full colour, everything else faintly behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree as ET

from thalweg.report.explanation import Explanation, Scene
from thalweg.schedules import Arrow, Kind

LEFT, TOP, LINE, BEAT, GAP = 130, 64, 26, 44, 18
MOST_ARROWS = 6000
STYLE = """
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
LEGEND = ((Kind.ADD, "added"), (Kind.COPY, "copied"), (Kind.QUORUM, "decoded from a quorum"))


def draw(explanation: Explanation) -> str:
    """All scenes of the first bucket, one below the other, as an SVG document."""
    scenes = [scene for scene in explanation.scenes if scene.rounds[0].bucket == 0]
    width = LEFT + BEAT * max((len(scene.beats) for scene in scenes), default=1) + 40
    height = TOP + sum(_height(scene) for scene in scenes) + 30
    size = {"width": str(max(width, 640)), "height": str(height)}
    root = ET.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", **size})
    ET.SubElement(root, "style").text = STYLE
    racks = f" in {len(explanation.group.racks)} racks" if len(explanation.group.racks) > 1 else ""
    title = f"{explanation.plan}: {explanation.group.size} workers{racks}, step {explanation.step}"
    _text(root, 16, 26, title, "title")
    promise = explanation.guarantee
    _text(root, 16, 46, f"{promise.promise.value}: {promise.result}", "faint")
    top = TOP
    for scene in scenes:
        _draw_scene(root, scene, top)
        top += _height(scene)
    _legend(root, top + 12)
    ET.indent(root)
    return ET.tostring(root, encoding="unicode") + "\n"


def _height(scene: Scene) -> int:
    ranks = sum(len(rack) for rack in scene.seats)
    return 34 + LINE * ranks + GAP * len(scene.seats) + 24


def _draw_scene(root: ET.Element, scene: Scene, top: int) -> None:
    _text(root, 16, top + 20, scene.title)
    lanes: dict[int, int] = {}
    y = top + 34
    right = LEFT + BEAT * len(scene.beats)
    cluster = scene.rounds[0].group.cluster
    for rack in scene.seats:
        band = {"x": "8", "y": str(y), "width": str(right + 12), "height": str(LINE * len(rack))}
        ET.SubElement(root, "rect", {"class": "rack", **band})
        _text(root, 14, y + LINE // 2 + 4, cluster.rack(rack[0]).name, "faint")
        for rank in rack:
            lanes[rank] = y + LINE // 2
            _text(root, 74, lanes[rank] + 4, f"rank {rank}")
            _line(root, LEFT, lanes[rank], right, lanes[rank], "lane")
            y += LINE
        y += GAP
    for beat in range(len(scene.beats)):
        _text(root, LEFT + BEAT * beat + BEAT // 2 - 4, y + 4, str(beat + 1), "faint")
    _arrows(root, scene.beats, lanes, y)


def _arrows(
    root: ET.Element, beats: Sequence[Sequence[Arrow]], lanes: dict[int, int], below: int
) -> None:
    total = sum(len(arrows) for arrows in beats)
    behind, front = ET.SubElement(root, "g"), ET.SubElement(root, "g")
    for beat, arrows in enumerate(beats):
        x = LEFT + BEAT * beat
        for (source, target, start, stop), kind in arrows:
            first = start == 0
            if not first and total > MOST_ARROWS:
                continue
            name = f"arrow {kind.name}" + (" first" if first else "")
            layer = front if first else behind
            line = _line(layer, x + 4, lanes[source], x + BEAT - 4, lanes[target], name)
            chunks = f"chunk {start}" if stop == start + 1 else f"chunks {start}-{stop - 1}"
            ET.SubElement(
                line, "title"
            ).text = f"beat {beat + 1}: {chunks} from {source} to {target}, {kind.value}"
            if first:
                dot = {"cx": str(x + BEAT - 4), "cy": str(lanes[target]), "r": "3.2"}
                ET.SubElement(layer, "circle", {"class": name, "fill": "none", **dot})
    if total > MOST_ARROWS:
        _text(root, LEFT, below + 18, f"{total} messages: only chunk 0's way is drawn", "faint")


def _legend(root: ET.Element, y: int) -> None:
    x = 16
    for kind, meaning in LEGEND:
        _line(root, x, y - 4, x + 22, y - 4, f"arrow first {kind.name}")
        _text(root, x + 28, y, meaning, "faint")
        x += 50 + 7 * len(meaning)
    _text(root, x, y, "thick: the way of chunk 0; numbers: beats", "faint")


def _text(parent: ET.Element, x: int, y: int, text: str, name: str = "") -> None:
    ET.SubElement(parent, "text", {"x": str(x), "y": str(y), "class": name}).text = text


def _line(parent: ET.Element, x1: int, y1: int, x2: int, y2: int, name: str) -> ET.Element:
    ends = {"x1": str(x1), "y1": str(y1), "x2": str(x2), "y2": str(y2)}
    return ET.SubElement(parent, "line", {"class": name, **ends})
