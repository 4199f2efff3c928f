"""Parts that line charts share: axes, numbered marks above the plot, and legends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from xml.etree import ElementTree as ET

from thalweg.facts import about
from thalweg.report.scale import Scale, spread
from thalweg.report.shapes import add, dot, line, tip, words

BADGE = 9  # radius


def draw_axes(
    root: ET.Element,
    across: Scale,
    down: Scale,
    *,
    xs: Iterable[float],
    x_text: Callable[[float], str],
    seconds: Iterable[float],
    title: str,
) -> None:
    """A grid with these values at its lines: `xs` to the right, seconds upwards."""
    left, right, bottom = across.start, across.stop, down.start
    for value in xs:
        x = across.at(value)
        line(root, x, down.stop, x, bottom, "grid")
        words(root, round(x), round(bottom) + 18, x_text(value), "faint middle")
    for value in seconds:
        y = down.at(value)
        line(root, left, y, right, y, "grid")
        words(root, round(left) - 8, round(y) + 4, about(value, "s"), "faint end")
    line(root, left, bottom, right, bottom, "axis")
    words(root, round((left + right) / 2), round(bottom) + 38, title, "faint middle")


def polyline(
    root: ET.Element, across: Scale, down: Scale, xs: Sequence[float], ys: Sequence[float]
) -> ET.Element:
    points = [f"{across.at(x)},{down.at(y)}" for x, y in zip(xs, ys, strict=True)]
    if len(points) == 1:
        points.append(f"{across.stop},{down.at(ys[0])}")
    return ET.SubElement(root, "polyline", {"points": " ".join(points)})


def draw_badges(
    root: ET.Element,
    across: Scale,
    top: float,
    centre: int,
    marks: Sequence[tuple[int, float, float, str]],
) -> None:
    """Numbers in a row above the plot, each with a dotted line down to its point. A mark is its
    number, its value, the height at which its line ends, and its text."""
    xs = [across.at(value) for _, value, _, _ in marks]
    places = spread(xs, 2 * BADGE + 4, across.start + BADGE, across.stop - BADGE)
    for (number, _, y, text), x, place in zip(marks, xs, places, strict=True):
        path = f"M{place:.1f},{centre + BADGE} L{x},{top} L{x},{y}"
        add(root, "path", name="break", d=path)
        tip(dot(root, round(place, 1), centre, BADGE, "badge"), text)
        words(root, round(place), centre + 4, str(number), "middle")


def add_numbered(parent: ET.Element) -> Callable[[int], ET.Element]:
    """A list of the texts of badges; returns the function that adds an entry by its number."""
    entries = add(parent, "ol", name="breaks")

    def entry(number: int) -> ET.Element:
        item = add(entries, "li")
        add(item, "b", str(number)).tail = " "
        return add(item, "span")

    return entry


def add_swatch(entry: ET.Element, index: int) -> None:
    """A short piece of a curve, for its legend."""
    swatch = add(entry, "svg", width="40", height="10", aria_hidden="true")
    line(swatch, 0, 5, 40, 5, f"curve c{index}")
