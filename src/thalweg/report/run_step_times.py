"""How long steps took, one after the other, and where the verdict on who is late changed.

Two lines: a step, on average over ranks, and the longest that a rank computed in it. If the second
rises with the first, a rank holds the others up; if the first rises alone, the network does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import fmean
from xml.etree import ElementTree as ET

from thalweg.facts import about
from thalweg.observe.records import StepRecord, by_step
from thalweg.observe.straggler_episodes import StragglerEpisode
from thalweg.report.page import add, picture
from thalweg.report.scale import Scale, spread
from thalweg.report.shapes import line, tip, words

MAX_PLOT_POINTS = 240
MAX_PLOT_MARKS = 8
WIDE, NARROW, TALL = 920, 326, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 40, 44
BADGE = 9
LINES: Mapping[str, Callable[[Iterable[StepRecord]], float]] = {
    "a step, on average over ranks": lambda steps: fmean(step.seconds for step in steps),
    "the longest that a rank computed": lambda steps: max(step.computing for step in steps),
}


@dataclass(frozen=True, slots=True)
class Mark:
    """Where something begins or is over."""

    step: int
    text: str


def marks(late: Sequence[StragglerEpisode], shown: range) -> list[Mark]:
    """Of the costliest, in the order of steps."""
    found = []
    for each in late:
        found.append(Mark(each.first, f"from step {each.first} on: {each.why}"))
        if each.ended:
            found.append(Mark(each.last + 1, f"from step {each.last + 1} on no more: {each.why}"))
    inside = [mark for mark in found if mark.step in shown]
    return sorted(inside[:MAX_PLOT_MARKS], key=lambda mark: mark.step)


def add_step_times(
    parent: ET.Element, ranks: Mapping[int, Sequence[StepRecord]], late: Sequence[StragglerEpisode]
) -> None:
    steps = {number: [*found.values()] for number, found in by_step(ranks).items()}
    numbers = list(steps)
    width = ceil(len(numbers) / MAX_PLOT_POINTS)
    bins = [numbers[start : start + width] for start in range(0, len(numbers), width)]
    places = [fmean(each) for each in bins]
    curves = {
        name: [fmean(value(steps[number]) for number in each) for each in bins]
        for name, value in LINES.items()
    }
    found = marks(late, range(numbers[0], numbers[-1] + 1))
    figure = add(parent, "figure", name="course")
    _add_legend(figure, width)
    for size, name in ((WIDE, "wide"), (NARROW, "narrow")):
        _draw(figure, places, curves, found, size, name)
    if found:
        entries = add(figure, "ol", name="breaks")
        for number, mark in enumerate(found, start=1):
            item = add(entries, "li")
            add(item, "b", str(number)).tail = " "
            add(item, "span", mark.text)


def _add_legend(figure: ET.Element, width: int) -> None:
    legend = add(figure, "ul", name="legend")
    for index, name in enumerate(LINES):
        entry = add(legend, "li")
        swatch = add(entry, "svg", width="40", height="10", aria_hidden="true")
        line(swatch, 0, 5, 40, 5, f"curve c{index}")
        add(entry, "span", name)
    if width > 1:
        add(legend, "li", f"a point is the mean of {width} steps")


def _draw(
    parent: ET.Element,
    places: Sequence[float],
    curves: Mapping[str, Sequence[float]],
    found: Sequence[Mark],
    width: int,
    name: str,
) -> None:
    ends = [
        f"{curve}: from {about(values[0], 's')} to {about(values[-1], 's')}, at most "
        f"{about(max(values), 's')}"
        for curve, values in curves.items()
    ]
    root = picture(parent, width, TALL, "Seconds of each step", name=name, desc="; ".join(ends))
    across = Scale(
        least=places[0],
        most=max(places[-1], places[0] + 1),
        start=LEFT,
        stop=width - RIGHT,
    )
    most = max(max(values) for values in curves.values())
    down = Scale(least=0.0, most=1.05 * most or 1.0, start=TALL - BOTTOM, stop=TOP)
    _draw_axes(root, across, down)
    for index, (curve, values) in enumerate(curves.items()):
        points = [f"{across.at(x)},{down.at(y)}" for x, y in zip(places, values, strict=True)]
        points = points if len(points) > 1 else [*points, f"{across.stop},{down.at(values[0])}"]
        tip(add(root, "polyline", name=f"curve c{index}", points=" ".join(points)), curve)
    xs = [across.at(mark.step) for mark in found]
    badges = spread(xs, 2 * BADGE + 4, LEFT + BADGE, across.stop - BADGE)
    for number, (mark, x, place) in enumerate(zip(found, xs, badges, strict=True), start=1):
        way = f"M{place:.1f},{16 + BADGE} L{x},{TOP} L{x},{down.start}"
        add(root, "path", name="break", d=way)
        badge = {"cx": f"{place:.1f}", "cy": "16", "r": str(BADGE)}
        tip(add(root, "circle", name="badge", **badge), mark.text)
        words(root, round(place), 20, str(number), "middle")


def _draw_axes(root: ET.Element, across: Scale, down: Scale) -> None:
    room = int((across.stop - across.start) / 70)
    for step in sorted({round(value) for value in across.ticks(room) if value == round(value)}):
        x = across.at(step)
        line(root, x, TOP, x, down.start, "grid")
        words(root, round(x), TALL - BOTTOM + 18, str(step), "faint middle")
    for seconds in down.ticks(6):
        y = down.at(seconds)
        line(root, LEFT, y, across.stop, y, "grid")
        words(root, LEFT - 8, round(y) + 4, about(seconds, "s"), "faint end")
    line(root, LEFT, down.start, across.stop, down.start, "axis")
    words(root, round((LEFT + across.stop) / 2), TALL - 6, "step", "faint middle")
