"""The small drawings of an advice: an interval as a whisker, and what a step's seconds are made of.

All whiskers of a table have one scale, which is drawn in the table's head.
"""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree as ET

from thalweg.facts import about
from thalweg.predict.estimate import Breakdown, Estimate
from thalweg.report.page import add, picture, plan_text
from thalweg.report.scale import Scale, scale_of
from thalweg.report.shapes import line, words

WHISKER, TALL, MARGIN = 190, 20, 24
TICKS = 3
PARTS = {
    "compute": "compute",
    "encode": "encode",
    "decode": "decode",
    "transfer": "transfer that nothing hides",
    "waiting": "waiting for late workers",
}
BAR_PATTERNS = {  # what is drawn on a tile of 6 by 6 pixels; compute and transfer are plain
    "encode": "M-1,1 l2,-2 M0,6 l6,-6 M5,7 l2,-2",
    "decode": "M-1,5 l2,2 M0,0 l6,6 M5,-1 l2,2",
    "waiting": "M3,0 v6 M0,3 h6",
}


def whisker_scale(values: Sequence[float]) -> Scale:
    return scale_of(values, start=MARGIN, stop=WHISKER - MARGIN)


def draw_ruler(parent: ET.Element, scale: Scale) -> None:
    """The scale of the whiskers below."""
    kind = ", logarithmic" if scale.logarithmic else ""
    drawn = picture(parent, WHISKER, TALL, f"Scale of the whiskers{kind}")
    for value in scale.ticks(TICKS):
        x = scale.at(value)
        line(drawn, x, TALL - 4, x, TALL, "grid")
        words(drawn, round(x), TALL - 8, about(value, "s"), "faint middle")


def draw_whisker(
    parent: ET.Element,
    scale: Scale,
    *,
    mean: float,
    low: float,
    high: float,
    measured: float | None = None,
) -> None:
    """A dot at the prediction, a line over its interval; below them, a diamond at what came out."""
    title = f"{about(mean, 's')}, from {about(low, 's')} to {about(high, 's')}"
    if measured is not None:
        title = f"predicted {title}; measured {about(measured, 's')}"
    height = TALL if measured is None else TALL + 14
    drawn = picture(parent, WHISKER, height, title)
    middle = TALL // 2
    for value in scale.ticks(TICKS):
        line(drawn, scale.at(value), 0, scale.at(value), height, "grid")
    line(drawn, scale.at(low), middle, scale.at(high), middle, "reach")
    for end in (low, high):
        line(drawn, scale.at(end), middle - 5, scale.at(end), middle + 5, "cap")
    add(drawn, "circle", name="mean", cx=str(scale.at(mean)), cy=str(middle), r="3")
    if measured is not None:
        way = f"M{scale.at(measured)},{middle + 9} l5,6 l-5,6 l-5,-6 z"
        add(drawn, "path", name="measured", d=way)


def add_patterns(parent: ET.Element) -> None:
    """What the bars are filled with, for all drawings of the page."""
    hidden = add(parent, "svg", name="hidden", aria_hidden="true")
    shelf = add(hidden, "defs")
    for name, way in BAR_PATTERNS.items():
        tile = add(shelf, "pattern", id=name, width="6", height="6", patternUnits="userSpaceOnUse")
        add(tile, "rect", width="6", height="6", style=f"fill: var(--{name})")
        add(tile, "path", d=way, style="stroke: var(--stripe); stroke-width: 1.2; fill: none")


def add_bars(parent: ET.Element, estimates: Sequence[Estimate]) -> None:
    """A bar for each plan, as long as its step; it grows with the page, and its text doesn't."""
    used = [name for name in PARTS if any(getattr(each.parts, name) > 0 for each in estimates)]
    legend = add(parent, "ul", name="legend")
    for name in used:
        entry = add(legend, "li")
        swatch = add(entry, "svg", width="22", height="14", aria_hidden="true")
        fill(add(swatch, "rect", width="22", height="14"), name)
        add(entry, "span", PARTS[name])
    longest = max(estimate.seconds for estimate in estimates) or 1.0
    bars = add(parent, "div", name="bars")
    for estimate in estimates:
        row = add(bars, "div")
        label = add(row, "div", name="label")
        plan_text(label, estimate.sync)
        add(label, "span", about(estimate.seconds, "s"), "number")
        _draw_bar(row, estimate.parts, longest, f"{estimate.sync}: {parts_text(estimate.parts)}")


def parts_text(parts: Breakdown) -> str:
    shares = {name: float(getattr(parts, name)) for name in PARTS}
    return ", ".join(f"{name} {about(value, 's')}" for name, value in shares.items() if value > 0)


def _draw_bar(parent: ET.Element, parts: Breakdown, longest: float, title: str) -> None:
    drawn = add(parent, "svg", width="100%", height="18", role="img", aria_label=title)
    add(drawn, "title", title)
    add(drawn, "rect", name="back", width="100%", height="18")
    start = 0.0
    for name in PARTS:
        share = 100 * getattr(parts, name) / longest
        if share > 0:
            place = {"x": f"{start:.3f}%", "width": f"{share:.3f}%"}
            fill(add(drawn, "rect", height="18", **place), name)
        start += share


def fill(shape: ET.Element, part: str) -> None:
    shape.set("data-part", part)
    shape.set("style", f"fill: {f'url(#{part})' if part in BAR_PATTERNS else f'var(--{part})'}")
