"""A plot of step time over the run, with marks where a straggler began or ended.

Two lines: the mean step time of all ranks, and the longest compute time of a rank. If the second
rises with the first, a rank is slow; if the first rises alone, the network is.
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
from thalweg.report.chart import add_numbered, add_swatch, draw_axes, draw_badges, polyline
from thalweg.report.page import picture
from thalweg.report.scale import Scale
from thalweg.report.shapes import add, tip

MAX_PLOT_POINTS = 240
MAX_PLOT_MARKS = 8
WIDE, NARROW, TALL = 920, 326, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 40, 44
LINES: Mapping[str, Callable[[Iterable[StepRecord]], float]] = {
    "mean step time of all ranks": lambda steps: fmean(step.seconds for step in steps),
    "longest compute time of a rank": lambda steps: max(step.computing for step in steps),
}


@dataclass(frozen=True, slots=True)
class Mark:
    """A step at which a straggler begins or ends, and the text of the mark."""

    step: int
    text: str


def marks(late: Sequence[StragglerEpisode], shown: range) -> list[Mark]:
    """The marks of the costliest stragglers, in the order of steps."""
    found = []
    for each in late:
        found.append(Mark(each.first, f"since step {each.first}: {each.why}"))
        if each.ended:
            found.append(Mark(each.last + 1, f"resolved at step {each.last + 1}: {each.why}"))
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
        entry = add_numbered(figure)
        for number, mark in enumerate(found, start=1):
            entry(number).text = mark.text


def _add_legend(figure: ET.Element, width: int) -> None:
    legend = add(figure, "ul", name="legend")
    for index, name in enumerate(LINES):
        entry = add(legend, "li")
        add_swatch(entry, index)
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
    root = picture(parent, width, TALL, "Step time by step", name=name, desc="; ".join(ends))
    last = max(places[-1], places[0] + 1)
    across = Scale(least=places[0], most=last, start=LEFT, stop=width - RIGHT)
    most = max(max(values) for values in curves.values())
    down = Scale(least=0.0, most=1.05 * most or 1.0, start=TALL - BOTTOM, stop=TOP)
    room = int((across.stop - across.start) / 70)
    steps = {round(value) for value in across.ticks(room) if value == round(value)}
    draw_axes(
        root,
        across,
        down,
        xs=sorted(steps),
        x_text=lambda step: f"{step:g}",
        seconds=down.ticks(6),
        title="step",
    )
    for index, (curve, values) in enumerate(curves.items()):
        drawn = polyline(root, across, down, places, values)
        drawn.set("class", f"curve c{index}")
        tip(drawn, curve)
    marks = [(number, mark.step, down.start, mark.text) for number, mark in enumerate(found, 1)]
    draw_badges(root, across, TOP, 16, marks)
