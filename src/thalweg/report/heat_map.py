"""Ranks down, steps across, and a colour that is the stronger the more a rank stood out at a step.

It doesn't grow with the run: a cell stands for several steps where there are many, and of many
ranks those that stood out most are shown. Cells in which nothing stood out aren't drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import ceil
from statistics import fmean, median
from xml.etree import ElementTree as ET

from thalweg.observe.records import StepRecord, by_step
from thalweg.report.page import add

MAX_HEAT_CELLS, MAX_HEAT_RANKS = 96, 48
TALL = 14
MIN_HEAT_STEP_FRACTION = 0.05  # noise shouldn't look like news
FAINTEST = 0.05  # of the strongest: what is less isn't drawn
Values = Mapping[int, Mapping[int, float]]
"""By step and rank: by how much it stood out."""


def computing_beyond(ranks: Mapping[int, Sequence[StepRecord]]) -> Values:
    """Seconds that a rank computed for longer than the middle one, as a share of the step."""
    found: dict[int, dict[int, float]] = {}
    for number, steps in by_step(ranks).items():
        usual = median(step.computing for step in steps.values())
        found[number] = {
            rank: max(0.0, step.computing - usual) / max(step.seconds, 1e-9)
            for rank, step in steps.items()
        }
    return found


def sending_below(ranks: Mapping[int, Sequence[StepRecord]]) -> Values:
    """What the slowest flow of a rank's host got less than the middle one's, as a share of that."""
    found: dict[int, dict[int, float]] = {}
    for number, steps in by_step(ranks).items():
        rates = {
            rank: min(flow.rate for flow in step.flows)
            for rank, step in steps.items()
            if step.flows
        }
        if len(rates) > 1:
            usual = median(rates.values()) or 1.0
            found[number] = {rank: max(0.0, 1 - rate / usual) for rank, rate in rates.items()}
    return found


def add_heat_map(
    parent: ET.Element,
    ranks: Mapping[int, Sequence[StepRecord]],
    names: Mapping[int, str],
    standing_out: Callable[[Mapping[int, Sequence[StepRecord]]], Values],
    text: str,
) -> None:
    """`text` says what a percentage is of."""
    values = standing_out(ranks)
    numbers = sorted({step.step for steps in ranks.values() for step in steps})
    width = ceil(len(numbers) / MAX_HEAT_CELLS)
    bins = [numbers[start : start + width] for start in range(0, len(numbers), width)]
    rows = {rank: [_mean(values, rank, each) for each in bins] for rank in ranks}
    shown = sorted(sorted(rows, key=lambda rank: -sum(rows[rank]))[:MAX_HEAT_RANKS])
    strongest = max((value for rank in shown for value in rows[rank]), default=0.0)
    if strongest < MIN_HEAT_STEP_FRACTION:
        add(parent, "p", f"Nobody stood out by {MIN_HEAT_STEP_FRACTION:.0%} {text}.")
        return
    grid = add(parent, "div", name="heat")
    for rank in shown:
        add(grid, "span", names[rank], "rank")
        _draw(grid, names[rank], bins, rows[rank], strongest, text)
    add(grid, "span", "step", "rank")
    ends = add(grid, "div", name="ends")
    add(ends, "span", str(numbers[0]))
    add(ends, "span", str(numbers[-1]))
    said = [f"the strongest colour is {strongest:.0%} {text}"]
    said += [f"a cell is the mean of {width} steps"] if width > 1 else []
    if len(shown) < len(rows):
        said.append(f"{len(rows) - len(shown)} ranks that stood out less aren't drawn")
    add(parent, "p", f"{'; '.join(said).capitalize()}.", "lead")


def _mean(values: Values, rank: int, steps: Sequence[int]) -> float:
    found = [values[step][rank] for step in steps if rank in values.get(step, {})]
    return fmean(found) if found else 0.0


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
    add(drawn, "title", title)
    add(drawn, "rect", name="back", width="100%", height=str(TALL))
    one = 100 / len(bins)
    for index, (steps, value) in enumerate(zip(bins, row, strict=True)):
        strength = value / strongest
        if strength < FAINTEST:
            continue
        place = {"x": f"{index * one:.3f}%", "width": f"{one:.3f}%", "height": str(TALL)}
        cell = add(drawn, "rect", name="hot", **place)
        cell.set("fill-opacity", f"{strength:.2f}")
        when = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
        add(cell, "title", f"{when}: {value:.0%}")
