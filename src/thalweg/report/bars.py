"""Step times as bars, divided into parts. Bars grow with the page, and their text doesn't.

A part has a colour of its own, and some a pattern; compute and transfer are plain.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from xml.etree import ElementTree as ET

from thalweg.facts import about
from thalweg.report.shapes import add

BAR_PATTERNS = {  # paths on a tile of 6 by 6 pixels
    "encode": "M-1,1 l2,-2 M0,6 l6,-6 M5,7 l2,-2",
    "decode": "M-1,5 l2,2 M0,0 l6,6 M5,-1 l2,2",
    "waiting": "M3,0 v6 M0,3 h6",
}


def add_patterns(parent: ET.Element) -> None:
    """The patterns of bars, for all drawings of the page."""
    hidden = add(parent, "svg", name="hidden", aria_hidden="true")
    shelf = add(hidden, "defs")
    for name, path in BAR_PATTERNS.items():
        tile = add(shelf, "pattern", id=name, width="6", height="6", patternUnits="userSpaceOnUse")
        add(tile, "rect", width="6", height="6", style=f"fill: var(--{name})")
        add(tile, "path", d=path, style="stroke: var(--stripe); stroke-width: 1.2; fill: none")


def add_legend(parent: ET.Element, entries: Iterable[tuple[str, str, int]]) -> None:
    """The part, the meaning and the height of each kind of bar."""
    legend = add(parent, "ul", name="legend")
    for part, meaning, tall in entries:
        entry = add(legend, "li")
        swatch = add(entry, "svg", width="22", height=str(tall), aria_hidden="true")
        _fill(add(swatch, "rect", width="22", height=str(tall)), part)
        add(entry, "span", meaning)


def add_bar(bars: ET.Element, seconds: float) -> tuple[ET.Element, ET.Element]:
    """A row for a bar, and the place of its label at the left of the seconds."""
    row = add(bars, "div")
    label = add(row, "div", name="label")
    text = add(label, "span")
    add(label, "span", about(seconds, "s"), "number")
    return row, text


def draw_bar(
    row: ET.Element,
    title: str,
    lanes: Mapping[int, Iterable[tuple[str, float]]],
    longest: float,
    height: int,
) -> None:
    """Lanes of parts with their seconds, by the top of a lane; the last lane is the rest high."""
    drawn = add(row, "svg", width="100%", height=str(height), role="img", aria_label=title)
    add(drawn, "title", title)
    tops = [*lanes, height + 2]
    add(drawn, "rect", name="back", width="100%", height=str(tops[1] - 2))
    for (top, parts), below in zip(lanes.items(), tops[1:], strict=True):
        start = 0.0
        for part, seconds in parts:
            share = 100 * seconds / longest
            if share > 0:
                place = {"x": f"{start:.3f}%", "width": f"{share:.3f}%", "y": str(top)}
                _fill(add(drawn, "rect", height=str(below - 2 - top), **place), part)
            start += share


def parts_text(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {about(value, 's')}" for name, value in parts.items() if value > 0)


def _fill(shape: ET.Element, part: str) -> None:
    shape.set("data-part", part)
    shape.set("style", f"fill: {f'url(#{part})' if part in BAR_PATTERNS else f'var(--{part})'}")
