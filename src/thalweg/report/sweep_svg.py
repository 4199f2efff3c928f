"""Seconds of a step against the rate of the links, both on logarithms: which plan wins where.

Lines differ in colour, in dashes and by the letter at their right end. Points at which two plans
take the same time have numbers, which the list below the picture explains.
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
from thalweg.report.page import add, picture, plan_text
from thalweg.report.scale import Scale, scale_of, spread, value_at
from thalweg.report.shapes import line, tip, words

MAX_SWEEP_CURVES = 6  # that can be told apart
WIDE, NARROW, TALL = 736, 326, 380
LEFT, RIGHT, TOP, BOTTOM = 56, 44, 58, 44
SWEEP_CHARACTER_PIXELS = 7.5  # pixels, at most on average
BADGE = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chart:
    """The picture, its curves by plan, and where values are in it."""

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
    """The few plans that matter: the best one, `ddp`, those that change places, and those that are
    the fastest at some rate."""
    fastest = (
        min(sweep.seconds, key=lambda s: sweep.seconds[s][i]) for i in range(len(sweep.rates))
    )
    changing = chain.from_iterable((each.slower_links, each.faster_links) for each in sweep.breaks)
    wanted = dict.fromkeys([str(advice.best.plan), "ddp", *changing, *fastest])
    return [sync for sync in wanted if sync in sweep.seconds][:MAX_SWEEP_CURVES]


def in_order(breaks: Sequence[Crossover]) -> list[Crossover]:
    """As they are numbered: slow links first."""
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
        add(beside, "p", "Where two plans take the same time:", "lead")
        entries = add(beside, "ol", name="breaks")
        for number, each in enumerate(in_order(sweep.breaks), start=1):
            _add_break(entries, number, each)


def _draw(
    parent: ET.Element, advice: Advice, sweep: Sweep, syncs: Sequence[str], width: int, name: str
) -> None:
    title = "Seconds of a step against the rate of the slowest NIC"
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
    _draw_axes(chart)
    _draw_now(chart, slowest_nic(advice.cluster))
    _draw_curves(chart)
    _draw_breaks(chart)


def _draw_axes(chart: _Chart) -> None:
    for rate in chart.across.ticks(int((chart.right - LEFT) / 80) + 1):
        x = chart.across.at(rate)
        line(chart.root, x, TOP, x, chart.bottom, "grid")
        words(chart.root, round(x), TALL - BOTTOM + 18, about(rate, "bit/s"), "faint middle")
    for seconds in chart.down.ticks(7):
        y = chart.down.at(seconds)
        line(chart.root, LEFT, y, chart.right, y, "grid")
        words(chart.root, LEFT - 8, round(y) + 4, about(seconds, "s"), "faint end")
    line(chart.root, LEFT, chart.bottom, chart.right, chart.bottom, "axis")
    middle = round((LEFT + chart.right) / 2)
    words(chart.root, middle, TALL - 6, "rate of the slowest NIC", "faint middle")


def _draw_now(chart: _Chart, rate: float) -> None:
    """The rate that the links have."""
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
        points = [
            f"{chart.across.at(rate)},{chart.down.at(value)}"
            for rate, value in zip(chart.sweep.rates, chart.sweep.seconds[sync], strict=True)
        ]
        drawn = add(chart.root, "polyline", name=f"curve c{index}", points=" ".join(points))
        tip(drawn, f"{ascii_uppercase[index]}: {sync}")
        fastest = max(range(len(points)), key=lambda i: chart.sweep.rates[i])
        ends.append(chart.down.at(chart.sweep.seconds[sync][fastest]))
    places = spread(ends, 15, TOP, chart.bottom)
    for index, (end, place) in enumerate(zip(ends, places, strict=True)):
        line(chart.root, chart.right + 3, end, chart.right + 14, place, "lead-line")
        words(
            chart.root, round(chart.right) + 18, round(place) + 4, ascii_uppercase[index], "letter"
        )


def _draw_breaks(chart: _Chart) -> None:
    """A number above the plot for each, and a dotted line down to its point."""
    shown = [
        (number, each)
        for number, each in enumerate(in_order(chart.sweep.breaks), start=1)
        if each.slower_links in chart.syncs
        and chart.across.least <= each.bits_per_second <= chart.across.most
    ]
    xs = [chart.across.at(each.bits_per_second) for _, each in shown]
    places = spread(xs, 2 * BADGE + 4, LEFT + BADGE, chart.right - BADGE)
    for (number, each), x, place in zip(shown, xs, places, strict=True):
        seconds = chart.sweep.seconds[each.slower_links]
        y = chart.down.at(value_at(chart.sweep.rates, seconds, each.bits_per_second))
        way = f"M{place:.1f},{34 + BADGE} L{x},{TOP} L{x},{y}"
        add(chart.root, "path", name="break", d=way)
        add(chart.root, "circle", name="point", cx=str(x), cy=str(y), r="4")
        badge = {"cx": f"{place:.1f}", "cy": "34", "r": str(BADGE)}
        tip(add(chart.root, "circle", name="badge", **badge), break_text(each))
        words(chart.root, round(place), 38, str(number), "middle")


def break_text(each: Crossover) -> str:
    at = about(each.bits_per_second, "bit/s")
    return f"{at}: {each.slower_links} below, {each.faster_links} above"


def _add_break(entries: ET.Element, number: int, each: Crossover) -> None:
    item = add(entries, "li")
    add(item, "b", str(number)).tail = " "
    entry = add(item, "span", f"{about(each.bits_per_second, 'bit/s')}: below it ")
    plan_text(entry, each.slower_links).tail = " is faster, above it "
    plan_text(entry, each.faster_links).tail = "."


def _add_legend(figure: ET.Element, syncs: Sequence[str]) -> None:
    legend = add(figure, "ul", name="legend curves")
    for index, sync in enumerate(syncs):
        entry = add(legend, "li")
        add(entry, "strong", ascii_uppercase[index])
        swatch = add(entry, "svg", width="40", height="10", aria_hidden="true")
        line(swatch, 0, 5, 40, 5, f"curve c{index}")
        plan_text(entry, sync)
