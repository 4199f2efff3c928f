"""The plots of a recorded run: step time over the run, and maps of the ranks' deviations.

The plot of step time has two lines: the mean of all ranks, and the longest compute time of a rank.
If the second rises with the first, a rank is slow; if the first rises alone, the network is. Marks
are the steps where stragglers began or ended.

A map has a row for each rank and a column for each step. It doesn't grow with the run: a cell is
the mean of several steps where there are many, and of many ranks those with the largest deviations
are shown. Cells without a deviation aren't drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import ceil
from statistics import fmean, median
from xml.etree import ElementTree as ET

from thalweg.observe.records import StepRecord, by_step
from thalweg.observe.run_report import StragglerEpisode
from thalweg.report.chart import LineChart, Mark, add_chart, add_curve_legend, add_numbered
from thalweg.report.shapes import add, tip

MAX_PLOT_POINTS, MAX_PLOT_MARKS = 240, 8
MAX_HEAT_CELLS, MAX_HEAT_RANKS = 96, 48
TALL = 14
MIN_HEAT_FRACTION = 0.05  # below it the deviations are noise
FAINTEST = 0.05  # of the strongest; weaker cells aren't drawn


def add_step_times(
    parent: ET.Element, ranks: Mapping[int, Sequence[StepRecord]], late: Sequence[StragglerEpisode]
) -> None:
    records = {number: by_rank.values() for number, by_rank in by_step(ranks).items()}
    means = {number: fmean(r.seconds for r in steps) for number, steps in records.items()}
    longest = {number: max(r.computing for r in steps) for number, steps in records.items()}
    numbers = list(records)
    width = ceil(len(numbers) / MAX_PLOT_POINTS)
    bins = [numbers[start : start + width] for start in range(0, len(numbers), width)]
    lines = {"mean step time of all ranks": means, "longest compute time of a rank": longest}
    chart = LineChart(
        title="Step time by step",
        x_title="step",
        x_text=lambda step: f"{step:g}",
        xs=[fmean(steps) for steps in bins],
        curves={
            name: [fmean(values[number] for number in steps) for steps in bins]
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
    marks = []
    for episode in late:
        marks.append(Mark(at=episode.first, text=f"since step {episode.first}: {episode.why}"))
        if episode.ended:
            after = episode.last + 1
            marks.append(Mark(at=after, text=f"resolved at step {after}: {episode.why}"))
    inside = [mark for mark in marks if mark.at in shown]
    return sorted(inside[:MAX_PLOT_MARKS], key=lambda mark: mark.at)


def computing_beyond(steps: Mapping[int, StepRecord]) -> dict[int, float]:
    """The compute time of each rank above the median, as a fraction of step time."""
    middle = median(step.computing for step in steps.values())
    return {
        rank: max(0.0, step.computing - middle) / max(step.seconds, 1e-9)
        for rank, step in steps.items()
    }


def sending_below(steps: Mapping[int, StepRecord]) -> dict[int, float]:
    """The rate of the slowest flow of each rank's host below the median, as a fraction of it."""
    rates = {rank: min(f.rate for f in step.flows) for rank, step in steps.items() if step.flows}
    if len(rates) < 2:
        return {}
    middle = median(rates.values()) or 1.0
    return {rank: max(0.0, 1 - rate / middle) for rank, rate in rates.items()}


def add_heat_map(
    parent: ET.Element,
    ranks: Mapping[int, Sequence[StepRecord]],
    names: Mapping[int, str],
    deviation: Callable[[Mapping[int, StepRecord]], Mapping[int, float]],
    text: str,
    verb: str,
) -> None:
    """Add a map of the deviation of each rank at a step; `text` names the whole of a percentage,
    and `verb` the deviation."""
    values = {number: deviation(steps) for number, steps in by_step(ranks).items()}
    numbers = list(values)
    width = ceil(len(numbers) / MAX_HEAT_CELLS)
    bins = [numbers[start : start + width] for start in range(0, len(numbers), width)]
    rows = {rank: [_mean(values, rank, steps) for steps in bins] for rank in ranks}
    shown = sorted(sorted(rows, key=lambda rank: -sum(rows[rank]))[:MAX_HEAT_RANKS])
    strongest = max((value for rank in shown for value in rows[rank]), default=0.0)
    if strongest < MIN_HEAT_FRACTION:
        add(parent, "p", f"No rank {verb} {100 * MIN_HEAT_FRACTION:g} % {text}.")
        return
    grid = add(parent, "div", name="heat")
    for rank in shown:
        add(grid, "span", names[rank], "rank")
        _draw(grid, names[rank], bins, rows[rank], strongest, text)
    add(grid, "span", "step", "rank")
    ends = add(grid, "div", name="ends")
    add(ends, "span", str(numbers[0]))
    add(ends, "span", str(numbers[-1]))
    notes = [f"the strongest colour is {strongest:.0%} {text}"]
    notes += [f"a cell is the mean of {width} steps"] if width > 1 else []
    if len(shown) < len(rows):
        notes.append(f"{len(rows) - len(shown)} ranks with smaller deviations aren't drawn")
    add(parent, "p", f"{'; '.join(notes).capitalize()}.", "lead")


def _mean(values: Mapping[int, Mapping[int, float]], rank: int, steps: Sequence[int]) -> float:
    present = [values[step][rank] for step in steps if rank in values[step]]
    return fmean(present) if present else 0.0


def _draw(
    grid: ET.Element,
    name: str,
    bins: Sequence[Sequence[int]],
    row: Sequence[float],
    strongest: float,
    text: str,
) -> None:
    worst = max(range(len(row)), key=lambda index: row[index])
    title = f"{name}: at most {row[worst]:.0%} {text}, at step {bins[worst][0]}"
    drawn = add(grid, "svg", width="100%", height=str(TALL), role="img", aria_label=title)
    tip(drawn, title)
    add(drawn, "rect", name="back", width="100%", height=str(TALL))
    cell_width = 100 / len(bins)
    for index, (steps, value) in enumerate(zip(bins, row, strict=True)):
        strength = value / strongest
        if strength < FAINTEST:
            continue
        place = {
            "x": f"{index * cell_width:.3f}%",
            "width": f"{cell_width:.3f}%",
            "height": str(TALL),
        }
        cell = add(drawn, "rect", name="hot", **place)
        cell.set("fill-opacity", f"{strength:.2f}")
        when = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
        tip(cell, f"{when}: {value:.0%}")
