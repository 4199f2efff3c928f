"""SVG: colours, documents, and the few shapes of which our drawings are made.

Colours are named once for light and once for dark; pages and drawings use the same names. Text has
a contrast of at least 4.5 to 1 with its background; the colours of lines and bars can be
distinguished by the colour-blind (after Okabe and Ito).
"""

from __future__ import annotations

from collections.abc import Iterable
from xml.etree import ElementTree as ET

CHARACTER_PIXELS = 6.4  # average width of a letter
FACT_LINE_PIXELS = 18
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
.title { font-size: 15px; font-weight: 600; } .middle { text-anchor: middle; }
.end { text-anchor: end; } .grid { stroke: var(--line); } .axis { stroke: var(--faint); }
.rack { fill: var(--panel); } text.slow { fill: var(--warn); font-weight: 600; }
"""
CLUSTER_STYLE = """
.rack { fill: var(--panel); stroke: var(--line); } .host { fill: var(--page); stroke: var(--line); }
.spine { stroke: var(--faint); stroke-width: 5; } .uplink { stroke: var(--c0); }
.free { stroke-dasharray: 5 4; } .slow.host { stroke: var(--warn); stroke-width: 2; }
svg text.slow { fill: var(--warn); } .letter { font-weight: 600; }
"""


def document(width: int, height: int, style: str, *, title: str, lead: str) -> ET.Element:
    """The root of a standalone SVG document, with a title and a line below it."""
    root = ET.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", **size_of(width, height)})
    ET.SubElement(root, "style").text = COLOURS + SVG_STYLE + style
    words(root, 16, 26, title, "title")
    words(root, 16, 46, lead, "faint")
    return root


def document_text(root: ET.Element) -> str:
    ET.indent(root)
    return ET.tostring(root, encoding="unicode") + "\n"


def size_of(width: int, height: int) -> dict[str, str]:
    return {"width": str(width), "height": str(height), "viewBox": f"0 0 {width} {height}"}


def words(parent: ET.Element, x: int, y: int, text: str, name: str = "") -> None:
    ET.SubElement(parent, "text", {"x": str(x), "y": str(y), "class": name}).text = text


def text_width(text: str) -> int:
    """The width of a text in pixels, about."""
    return round(CHARACTER_PIXELS * len(text))


def line(parent: ET.Element, x1: float, y1: float, x2: float, y2: float, name: str) -> ET.Element:
    ends = {"x1": str(x1), "y1": str(y1), "x2": str(x2), "y2": str(y2)}
    return ET.SubElement(parent, "line", {"class": name, **ends})


def box(
    parent: ET.Element, x: float, y: float, width: float, height: float, name: str, rx: int = 0
) -> ET.Element:
    place = {"x": str(x), "y": str(y), "width": str(width), "height": str(height)}
    corners = {"rx": str(rx)} if rx else {}
    return ET.SubElement(parent, "rect", {"class": name, **place, **corners})


def dot(parent: ET.Element, x: float, y: float, radius: int, name: str) -> ET.Element:
    place = {"cx": str(x), "cy": str(y), "r": str(radius)}
    return ET.SubElement(parent, "circle", {"class": name, **place})


def tip(element: ET.Element, text: str) -> None:
    """Set the text that a browser shows when the pointer rests on the element."""
    ET.SubElement(element, "title").text = text


def facts(parent: ET.Element, y: int, lines: Iterable[tuple[str, str]], indent: int = 116) -> None:
    """Lines of text below one another, each with its name at the left; `y` is above the first."""
    for number, (name, text) in enumerate(lines, start=1):
        words(parent, 16, y + FACT_LINE_PIXELS * number, name, "faint")
        words(parent, indent, y + FACT_LINE_PIXELS * number, text)
