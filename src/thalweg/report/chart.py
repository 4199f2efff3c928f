"""Axes with ticks at round values, and line charts of seconds over rates or steps.

A page has a chart twice, for wide screens and for narrow ones. Lines differ in colour, in dashes
and by the letter at their right end, so there are at most 26. Marks are numbered above the plot,
each with a dotted line down to its point.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, isfinite, log10
from string import ascii_uppercase
from xml.etree import ElementTree as ET

import numpy as np

from thalweg.facts import about
from thalweg.report.page import picture
from thalweg.report.shapes import add, dot, line, tip, words

ROUND = ((1, 2, 5), (1, 3), (1,))  # digits at which ticks may stand, densest first
LOGARITHMIC_AXIS_RATIO = 20  # of `most` to `least`; above it an axis is logarithmic by default
NARROW_CHART_PIXELS = 326
LEFT, RIGHT, TOP, BOTTOM = 64, 44, 58, 44
BADGE = 9  # radius
NOW_CHARACTER_PIXELS = 7.5  # upper bound of the average


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """An axis: values from `least` to `most` on pixels from `start` to `stop`. Values outside are
    drawn at the nearer end."""

    least: float
    most: float
    start: float
    stop: float
    logarithmic: bool = False

    def at(self, value: float) -> float:
        position = log10 if self.logarithmic else float
        inside = min(max(value, self.least), self.most)
        least, place, most = map(position, (self.least, inside, self.most))
        return round(self.start + (place - least) / (most - least) * (self.stop - self.start), 1)

    def ticks(self, max_count: int) -> list[float]:
        """Round values on the axis, at most `max_count` of them."""
        candidates = _logarithmic(self.least, self.most) if self.logarithmic else []
        for values in candidates:
            if 2 <= len(values) <= max_count:
                return values
        return _linear(self.least, self.most, max_count)


def scale_of(
    values: Iterable[float], *, start: float, stop: float, logarithmic: bool | None = None
) -> Scale:
    """An axis for all values that are finite and positive, logarithmic by default if they are far
    apart. It doesn't begin at zero."""
    drawn = [value for value in values if isfinite(value) and value > 0] or [1.0]
    least, most = min(drawn), max(drawn)
    if logarithmic is None:
        logarithmic = most / least > LOGARITHMIC_AXIS_RATIO
    if most / least < 1.01:  # a single value stands in the middle
        least, most = least / 2, most * 2
    return Scale(least=least, most=most, start=start, stop=stop, logarithmic=logarithmic)


def spread(places: Sequence[float], gap: float, least: float, most: float) -> list[float]:
    """The places in their order, moved until they are at least `gap` apart; all of them stay within
    the bounds if these are wide enough."""
    order = sorted(range(len(places)), key=lambda index: places[index])
    moved = [places[index] for index in order]
    for index in range(len(moved)):
        lower = moved[index - 1] + gap if index else least
        moved[index] = max(moved[index], lower)
    for index in reversed(range(len(moved))):
        upper = moved[index + 1] - gap if index + 1 < len(moved) else most
        moved[index] = min(moved[index], upper)
    return [place for _, place in sorted(zip(order, moved, strict=True))]


def _logarithmic(least: float, most: float) -> list[list[float]]:
    """Lists of round values from `least` to `most`, densest first: several, then one per decade,
    then one for two and for three decades."""
    exponents = range(floor(log10(least)), ceil(log10(most)) + 1)
    lists = [[digit * 10.0**e for e in exponents for digit in digits] for digits in ROUND]
    lists += [[10.0**e for e in exponents if e % every == 0] for every in (2, 3)]
    return [
        [value for value in values if least * 0.999 <= value <= most * 1.001] for values in lists
    ]


def _linear(least: float, most: float, max_count: int) -> list[float]:
    """Multiples of the smallest round step with at most `max_count` of them between the two."""
    decade = 10.0 ** floor(log10((most - least) / (max_count + 1)))
    for step in (digit * decade for digit in (1, 2, 5, 10, 20, 50, 100)):
        first, last = ceil(least / step * 0.999), floor(most / step * 1.001)
        if last - first < max_count:
            return [index * step for index in range(first, last + 1)]
    return []


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A numbered value `at` on the x axis, which is marked on the curve of this name if there is
    one; not drawn if that curve isn't."""

    at: float
    text: str
    curve: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineChart:
    """Curves by name, whose values are seconds at the ascending `xs`. Both axes are logarithmic, or
    both linear; a vertical line is drawn at `now`, if that is given and inside the axis."""

    title: str
    x_title: str
    x_text: Callable[[float], str]
    xs: Sequence[float]
    curves: Mapping[str, Sequence[float]]
    marks: Sequence[Mark]
    size: tuple[int, int]  # on wide screens
    logarithmic: bool = False
    now: float | None = None

    def scales(self, width: int) -> tuple[Scale, Scale]:
        """The scale to the right and the scale upwards."""
        values = [value for seconds in self.curves.values() for value in seconds]
        right, bottom = width - RIGHT, self.size[1] - BOTTOM
        if self.logarithmic:
            room = [value * factor for value in values for factor in (0.85, 1.1)]
            across = scale_of(self.xs, start=LEFT, stop=right, logarithmic=True)
            return across, scale_of(room, start=bottom, stop=TOP, logarithmic=True)
        last, most = max(self.xs[-1], self.xs[0] + 1), 1.05 * max(values) or 1.0
        across = Scale(least=self.xs[0], most=last, start=LEFT, stop=right)
        return across, Scale(least=0.0, most=most, start=bottom, stop=TOP)


def add_chart(parent: ET.Element, chart: LineChart) -> None:
    for width, name in ((chart.size[0], "wide"), (NARROW_CHART_PIXELS, "narrow")):
        _draw(parent, chart, width, name)


def add_curve_legend(
    parent: ET.Element, names: Sequence[str], write: Callable[[ET.Element, str], object]
) -> ET.Element:
    """The letter, the look and the name of each curve; `write` adds a name to its entry."""
    legend = add(parent, "ul", name="legend curves")
    for index, name in enumerate(names):
        entry = add(legend, "li")
        add(entry, "strong", ascii_uppercase[index])
        swatch = add(entry, "svg", width="40", height="10", aria_hidden="true")
        line(swatch, 0, 5, 40, 5, f"curve c{index}")
        write(entry, name)
    return legend


def add_numbered(parent: ET.Element, number: int) -> list[ET.Element]:
    """A list for the texts of so many marks; returns the place of each text."""
    entries, places = add(parent, "ol", name="breaks"), []
    for index in range(1, number + 1):
        item = add(entries, "li")
        add(item, "b", str(index)).tail = " "
        places.append(add(item, "span"))
    return places


def _draw(parent: ET.Element, chart: LineChart, width: int, name: str) -> None:
    ends = [
        f"{curve}: {about(seconds[0], 's')} at {chart.x_text(chart.xs[0])}, "
        f"{about(seconds[-1], 's')} at {chart.x_text(chart.xs[-1])}"
        for curve, seconds in chart.curves.items()
    ]
    root = picture(parent, width, chart.size[1], chart.title, name=name, desc="; ".join(ends))
    across, up = chart.scales(width)
    left, right, bottom = across.start, across.stop, up.start
    for x in across.ticks(int((right - left) / 80) + 1):
        if x == round(x):  # no step is between two others, and rates are large
            line(root, across.at(x), TOP, across.at(x), bottom, "grid")
            words(root, across.at(x), bottom + 18, chart.x_text(x), "faint middle")
    for seconds in up.ticks(7):
        line(root, left, up.at(seconds), right, up.at(seconds), "grid")
        words(root, left - 8, up.at(seconds) + 4, about(seconds, "s"), "faint end")
    line(root, left, bottom, right, bottom, "axis")
    words(root, (left + right) / 2, bottom + 38, chart.x_title, "faint middle")
    if chart.now is not None and across.least <= chart.now <= across.most:
        text = f"now: {chart.x_text(chart.now)}"
        half = NOW_CHARACTER_PIXELS * len(text) / 2
        line(root, across.at(chart.now), 20, across.at(chart.now), bottom, "now")
        words(root, min(max(across.at(chart.now), half), width - half), 14, text, "middle letter")
    _draw_curves(root, chart, across, up)
    _draw_marks(root, chart, across, up)


def _draw_curves(root: ET.Element, chart: LineChart, across: Scale, up: Scale) -> None:
    for index, (curve, seconds) in enumerate(chart.curves.items()):
        points = [f"{across.at(x)},{up.at(y)}" for x, y in zip(chart.xs, seconds, strict=True)]
        if len(points) == 1:
            points.append(f"{across.stop},{up.at(seconds[0])}")
        drawn = add(root, "polyline", name=f"curve c{index}", points=" ".join(points))
        tip(drawn, f"{ascii_uppercase[index]}: {curve}")
    ends = [up.at(seconds[-1]) for seconds in chart.curves.values()]
    right = across.stop
    letters = ascii_uppercase[: len(ends)]
    for letter, end, y in zip(letters, ends, spread(ends, 15, TOP, up.start), strict=True):
        line(root, right + 3, end, right + 14, y, "lead-line")
        words(root, right + 18, y + 4, letter, "letter")


def _draw_marks(root: ET.Element, chart: LineChart, across: Scale, up: Scale) -> None:
    """Draw the numbers of the marks in a row above the plot, moved apart where they are close."""
    inside = [
        (number, mark)
        for number, mark in enumerate(chart.marks, start=1)
        if across.least <= mark.at <= across.most and (not mark.curve or mark.curve in chart.curves)
    ]
    centre, xs = TOP - 24, [across.at(mark.at) for _, mark in inside]
    places = spread(xs, 2 * BADGE + 4, across.start + BADGE, across.stop - BADGE)
    for (number, mark), x, place in zip(inside, xs, places, strict=True):
        y = up.start
        if mark.curve:  # it is straight between points in pixels, whatever the axes are
            ys = [up.at(seconds) for seconds in chart.curves[mark.curve]]
            y = round(float(np.interp(x, [across.at(x) for x in chart.xs], ys)), 1)
            dot(root, x, y, 4, "point")
        add(root, "path", name="break", d=f"M{place:.1f},{centre + BADGE} L{x},{TOP} L{x},{y}")
        tip(dot(root, round(place, 1), centre, BADGE, "badge"), mark.text)
        words(root, place, centre + 4, str(number), "middle")
