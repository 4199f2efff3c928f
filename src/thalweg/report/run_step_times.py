"""A plot of step time over the run, with marks where a straggler began or ended.

Two lines: the mean step time of all ranks, and the longest compute time of a rank. If the second
rises with the first, a rank is slow; if the first rises alone, the network is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from statistics import fmean
from xml.etree import ElementTree as ET

from thalweg.observe.records import StepRecord, by_step
from thalweg.observe.straggler_episodes import StragglerEpisode
from thalweg.report.chart import LineChart, Mark, add_chart, add_curve_legend, add_numbered
from thalweg.report.shapes import add

MAX_PLOT_POINTS = 240
MAX_PLOT_MARKS = 8


def add_step_times(
    parent: ET.Element, ranks: Mapping[int, Sequence[StepRecord]], late: Sequence[StragglerEpisode]
) -> None:
    steps = {number: found.values() for number, found in by_step(ranks).items()}
    means = {number: fmean(s.seconds for s in found) for number, found in steps.items()}
    longest = {number: max(s.computing for s in found) for number, found in steps.items()}
    numbers = list(steps)
    width = ceil(len(numbers) / MAX_PLOT_POINTS)
    bins = [numbers[start : start + width] for start in range(0, len(numbers), width)]
    lines = {"mean step time of all ranks": means, "longest compute time of a rank": longest}
    chart = LineChart(
        title="Step time by step",
        x_title="step",
        x_text=lambda step: f"{step:g}",
        xs=[fmean(each) for each in bins],
        curves={
            name: [fmean(values[number] for number in each) for each in bins]
            for name, values in lines.items()
        },
        marks=_marks(late, range(numbers[0], numbers[-1] + 1)),
        size=(920, 320),
    )
    figure = add(parent, "figure", name="course")
    legend = add_curve_legend(figure, [*lines], lambda entry, name: add(entry, "span", name))
    if width > 1:
        add(legend, "li", f"a point is the mean of {width} steps")
    add_chart(figure, chart)
    if chart.marks:
        entry = add_numbered(figure)
        for mark in chart.marks:
            entry().text = mark.text


def _marks(late: Sequence[StragglerEpisode], shown: range) -> list[Mark]:
    """The first and the last steps of the costliest stragglers, in the order of steps."""
    found = []
    for each in late:
        found.append(Mark(at=each.first, text=f"since step {each.first}: {each.why}"))
        if each.ended:
            after = each.last + 1
            found.append(Mark(at=after, text=f"resolved at step {after}: {each.why}"))
    inside = [mark for mark in found if mark.at in shown]
    return sorted(inside[:MAX_PLOT_MARKS], key=lambda mark: mark.at)
