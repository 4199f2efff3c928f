"""SVG: colours, documents, and the few shapes of which our drawings are made.

Colours are named once for light and once for dark; pages and drawings use the same names. Text has
a contrast of at least 4.5 to 1 with its background; the colours of lines and bars can be
distinguished by the colour-blind (after Okabe and Ito).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from math import ceil
from xml.etree import ElementTree as ET

CHARACTER_PIXELS = 6.4  # average width of a letter
FACT_LINE_PIXELS, FACT_INDENT_PIXELS = 18, 156
LANE_PIXELS, RACK_GAP_PIXELS, LANE_NAME_PIXELS = 22, 14, 74
PLACES = ("x", "x1", "x2", "cx", "width", "y", "y1", "y2", "cy", "height")
COLOURS = """
:root { color-scheme: light dark;
--page: #ffffff; --text: #1b1f24; --faint: #57606a; --line: #d0d7de; --panel: #f6f8fa;
--accent: #0a5cb8; --warn: #a33c00;
--c0: #0072b2; --c1: #d55e00; --c2: #00805a; --c3: #aa3f86; --c4: #8a6500; --c5: #4d5560;
--compute: #8c959f; --encode: #e69f00; --decode: #b3679b; --transfer: #0072b2; --waiting: #d55e00;
--stripe: #ffffff; --shade: rgb(27 31 36 / .16); }
@media (prefers-color-scheme: dark) { :root {
--page: #0d1117; --text: #e6edf3; --faint: #9aa4af; --line: #30363d; --panel: #161b22;
--accent: #6cb6ff; --warn: #f0883e;
--c0: #56b4e9; --c1: #f0883e; --c2: #3fc79a; --c3: #e08fc8; --c4: #e6b422; --c5: #b1bac4;
--compute: #6e7681; --encode: #e6b422; --decode: #d58fbe; --transfer: #56b4e9; --waiting: #f0883e;
--stripe: #0d1117; --shade: rgb(0 0 0 / .6); } }
"""

SVG_STYLE = """
:root { background: var(--page); } svg { font: 12px system-ui, sans-serif; }
text { fill: var(--text); } .faint { fill: var(--faint); }
.title { font-size: 15px; font-weight: 600; }
.rack { fill: var(--panel); } text.slow { fill: var(--warn); font-weight: 600; }
"""
CLUSTER_STYLE = """
.rack, .host { stroke: var(--line); rx: 5px; } .rack { fill: var(--panel); }
.host { fill: var(--page); }
.spine { stroke: var(--faint); stroke-width: 5; } .uplink { stroke: var(--c0); }
.free { stroke-dasharray: 5 4; } .slow.host { stroke: var(--warn); stroke-width: 2; }
svg text.slow { fill: var(--warn); } .letter { font-weight: 600; }
"""


def add(parent: ET.Element, tag: str, text: str = "", name: str = "", **more: object) -> ET.Element:
    """A new child element; `name` is its class, and `aria_label` becomes `aria-label`."""
    attributes = {key.replace("_", "-"): str(value) for key, value in more.items()}
    element = ET.SubElement(parent, tag, {**({"class": name} if name else {}), **attributes})
    element.text = text
    return element


def document(style: str, *, title: str, lead: str) -> ET.Element:
    """The root of a standalone SVG document, with a title and a line below it."""
    root = ET.Element("svg", {"xmlns": "http://www.w3.org/2000/svg"})
    add(root, "style", COLOURS + SVG_STYLE + style)
    words(root, 16, 26, title, "title")
    words(root, 16, 46, lead, "faint")
    return root


def document_text(root: ET.Element) -> str:
    """The document as text, as large as its shapes."""
    width = height = 0.0
    for shape in root.iter():
        at = {name: float(shape.get(name, 0)) for name in PLACES}
        wide = text_width(shape.text or "") if shape.tag == "text" else at["width"]
        width = max(width, at["x"] + wide, at["x1"], at["x2"], at["cx"])
        height = max(height, at["y"] + at["height"], at["y1"], at["y2"], at["cy"])
    resize(root, ceil(width) + 24, ceil(height) + 20)
    ET.indent(root)
    return ET.tostring(root, encoding="unicode") + "\n"


def resize(drawing: ET.Element, width: int, height: int) -> None:
    size = {"width": str(width), "height": str(height), "viewBox": f"0 0 {width} {height}"}
    drawing.attrib.update(size)


def words(parent: ET.Element, x: float, y: float, text: str, name: str = "") -> None:
    add(parent, "text", text, name, x=round(x), y=round(y))


def text_width(text: str) -> int:
    """The width of a text in pixels, about."""
    return round(CHARACTER_PIXELS * len(text))


def line(parent: ET.Element, x1: float, y1: float, x2: float, y2: float, name: str) -> ET.Element:
    return add(parent, "line", name=name, x1=x1, y1=y1, x2=x2, y2=y2)


def box(
    parent: ET.Element, x: float | str, y: float, width: float | str, height: float, name: str
) -> ET.Element:
    """A rectangle; `x` and `width` may be percentages."""
    return add(parent, "rect", name=name, x=x, y=y, width=width, height=height)


def dot(parent: ET.Element, x: float, y: float, radius: int, name: str) -> ET.Element:
    return add(parent, "circle", name=name, cx=x, cy=y, r=radius)


def tip(element: ET.Element, text: str) -> None:
    """Set the text that a browser shows when the pointer rests on the element."""
    add(element, "title", text)


def legend(parent: ET.Element, y: int, entries: Iterable[tuple[str, str]]) -> None:
    """A line of the classes that lines in a drawing have, each with its meaning."""
    x = 16
    for name, meaning in entries:
        line(parent, x, y - 4, x + 22, y - 4, name)
        words(parent, x + 28, y, meaning, "faint")
        x += 50 + text_width(meaning)


def lanes(
    parent: ET.Element,
    racks: Mapping[str, Mapping[int, str]],
    top: int,
    right: float,
    slow: Collection[str] = (),
) -> tuple[dict[int, int], int]:
    """Draw a lane for each rank in the box of its rack, with these names; `slow` are those in the
    colour of warnings. Returns the middle of each lane, and the end of the last rack."""
    middles: dict[int, int] = {}
    for rack, ranks in racks.items():
        box(parent, 8, top, right, LANE_PIXELS * len(ranks), "rack")
        words(parent, 14, top + LANE_PIXELS // 2 + 4, rack, "slow" if rack in slow else "faint")
        for rank, name in ranks.items():
            middles[rank] = top + LANE_PIXELS // 2
            words(parent, LANE_NAME_PIXELS, middles[rank] + 4, name, "slow" if name in slow else "")
            top += LANE_PIXELS
        top += RACK_GAP_PIXELS
    return middles, top


def facts(parent: ET.Element, y: int, lines: Iterable[tuple[str, str]]) -> int:
    """Lines of text below one another, each with its name at the left; returns the end of them."""
    for name, text in lines:
        y += FACT_LINE_PIXELS
        words(parent, 16, y, name, "faint")
        words(parent, FACT_INDENT_PIXELS, y, text)
    return y + 16
