"""A plot of step time against the rate of the links, both on logarithmic axes.

Lines differ in colour, in dashes and by the letter at their right end. Points at which two plans
have the same step time are numbered, and listed below the picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from string import ascii_uppercase
from xml.etree import ElementTree as ET

from thalweg.facts import about
from thalweg.predict.estimate import Advice, Crossover, Sweep
from thalweg.predict.what_if import slowest_nic
from thalweg.report.chart import add_numbered, add_swatch, draw_axes, draw_badges, polyline
from thalweg.report.page import picture, plan_text
from thalweg.report.scale import Scale, scale_of, spread, value_at
from thalweg.report.shapes import add, dot, line, tip, words

MAX_SWEEP_CURVES = 6  # that can be distinguished
WIDE, NARROW, TALL = 736, 326, 380
LEFT, RIGHT, TOP, BOTTOM = 56, 44, 58, 44
SWEEP_CHARACTER_PIXELS = 7.5  # upper bound of the average


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chart:
    """The picture, its curves by plan, and its axes."""

    root: ET.Element
    sweep: Sweep
    syncs: Sequence[str]
    across: Scale
    down: Scale

    @property
    def right(self) -> float:
        return self.across.stop

    @property
    def bottom(self) -> float:
        return self.down.start


def curves(advice: Advice, sweep: Sweep) -> list[str]:
    """The plans to draw: the best one, `ddp`, plans whose curves cross, and plans that are the
    fastest at some rate."""
    fastest = (
        min(sweep.seconds, key=lambda s: sweep.seconds[s][i]) for i in range(len(sweep.rates))
    )
    changing = chain.from_iterable((each.slower_links, each.faster_links) for each in sweep.breaks)
    wanted = dict.fromkeys([str(advice.best.plan), "ddp", *changing, *fastest])
    return [sync for sync in wanted if sync in sweep.seconds][:MAX_SWEEP_CURVES]


def in_order(breaks: Sequence[Crossover]) -> list[Crossover]:
    """The crossovers in the order of their numbers: slow links first."""
    return sorted(breaks, key=lambda each: each.bits_per_second)


def add_sweep(parent: ET.Element, advice: Advice, sweep: Sweep) -> None:
    syncs = curves(advice, sweep)
    figure = add(parent, "figure", name="sweep")
    drawings = add(figure, "div")
    for width, name in ((WIDE, "wide"), (NARROW, "narrow")):
        _draw(drawings, advice, sweep, syncs, width, name)
    beside = add(figure, "div")
    _add_legend(beside, syncs)
    left_out = len(sweep.seconds) - len(syncs)
    if left_out:
        plans = "1 more plan is" if left_out == 1 else f"{left_out} more plans are"
        add(beside, "p", f"{plans} not drawn.", "lead")
    if sweep.breaks:
        add(beside, "p", "Rates at which two plans have the same step time:", "lead")
        entry = add_numbered(beside)
        for number, each in enumerate(in_order(sweep.breaks), start=1):
            text = entry(number)
            text.text = f"{about(each.bits_per_second, 'bit/s')}: below it "
            plan_text(text, each.slower_links).tail = " is faster, above it "
            plan_text(text, each.faster_links).tail = "."


def _draw(
    parent: ET.Element, advice: Advice, sweep: Sweep, syncs: Sequence[str], width: int, name: str
) -> None:
    title = "Step time against the rate of the slowest NIC"
    ends = [
        f"{sync}: {about(seconds[0], 's')} at {about(sweep.rates[0], 'bit/s')}, "
        f"{about(seconds[-1], 's')} at {about(sweep.rates[-1], 'bit/s')}"
        for sync, seconds in sweep.seconds.items()
        if sync in syncs
    ]
    root = picture(parent, width, TALL, title, name=name, desc="; ".join(ends))
    values = [value * room for s in syncs for value in sweep.seconds[s] for room in (0.85, 1.1)]
    across = scale_of(sweep.rates, start=LEFT, stop=width - RIGHT, logarithmic=True)
    down = scale_of(values, start=TALL - BOTTOM, stop=TOP, logarithmic=True)
    chart = _Chart(root=root, sweep=sweep, syncs=syncs, across=across, down=down)
    draw_axes(
        root,
        across,
        down,
        xs=across.ticks(int((across.stop - LEFT) / 80) + 1),
        x_text=lambda rate: about(rate, "bit/s"),
        seconds=down.ticks(7),
        title="rate of the slowest NIC",
    )
    _draw_now(chart, slowest_nic(advice.cluster))
    _draw_curves(chart)
    _draw_breaks(chart)


def _draw_now(chart: _Chart, rate: float) -> None:
    """Draw a line at the present rate of the links."""
    if not chart.across.least <= rate <= chart.across.most:
        return
    x = chart.across.at(rate)
    text = f"now: {about(rate, 'bit/s')}"
    half = SWEEP_CHARACTER_PIXELS * len(text) / 2
    line(chart.root, x, 20, x, chart.bottom, "now")
    place = min(max(x, half), chart.right + RIGHT - half)
    words(chart.root, round(place), 14, text, "middle letter")


def _draw_curves(chart: _Chart) -> None:
    ends: list[float] = []
    for index, sync in enumerate(chart.syncs):
        seconds = chart.sweep.seconds[sync]
        drawn = polyline(chart.root, chart.across, chart.down, chart.sweep.rates, seconds)
        drawn.set("class", f"curve c{index}")
        tip(drawn, f"{ascii_uppercase[index]}: {sync}")
        ends.append(chart.down.at(max(zip(chart.sweep.rates, seconds, strict=True))[1]))
    places = spread(ends, 15, TOP, chart.bottom)
    for index, (end, place) in enumerate(zip(ends, places, strict=True)):
        line(chart.root, chart.right + 3, end, chart.right + 14, place, "lead-line")
        words(
            chart.root, round(chart.right) + 18, round(place) + 4, ascii_uppercase[index], "letter"
        )


def _draw_breaks(chart: _Chart) -> None:
    """Draw a number above the plot for each crossover, and a dotted line down to its point."""
    marks = []
    for number, each in enumerate(in_order(chart.sweep.breaks), start=1):
        rate = each.bits_per_second
        if each.slower_links in chart.syncs and chart.across.least <= rate <= chart.across.most:
            seconds = chart.sweep.seconds[each.slower_links]
            y = chart.down.at(value_at(chart.sweep.rates, seconds, rate))
            dot(chart.root, chart.across.at(rate), y, 4, "point")
            at = about(rate, "bit/s")
            text = f"{at}: {each.slower_links} below, {each.faster_links} above"
            marks.append((number, rate, y, text))
    draw_badges(chart.root, chart.across, TOP, 34, marks)


def _add_legend(figure: ET.Element, syncs: Sequence[str]) -> None:
    legend = add(figure, "ul", name="legend curves")
    for index, sync in enumerate(syncs):
        entry = add(legend, "li")
        add(entry, "strong", ascii_uppercase[index])
        add_swatch(entry, index)
        plan_text(entry, sync)
