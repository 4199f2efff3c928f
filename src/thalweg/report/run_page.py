"""A recorded run as an HTML page: stragglers with their causes, and step time breakdowns.

The step time of each rank is a bar of its parts, one after the other; a thin bar below it has the
parts that overlap with them.

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

from thalweg.facts import about, counted
from thalweg.observe.records import StepRecord, by_step
from thalweg.observe.run_report import RankBreakdown, RunReport, StragglerEpisode
from thalweg.observe.timeline import Aligned, RankTimeline
from thalweg.report.chart import LineChart, Mark, add_chart, add_curve_legend, add_numbered
from thalweg.report.cluster_svg import cluster_text
from thalweg.report.page import (
    add_bar,
    add_legend,
    bullets,
    details,
    draw_bar,
    figures,
    page,
    parts_text,
    section,
    strip,
    table,
    written,
)
from thalweg.report.shapes import add, box, tip

MAX_ACCOUNT_ROWS = 32
MAX_SHOWN_STRAGGLERS = 12
MAX_SHOWN_NOTES = 40
MAX_ACCOUNT_BARS = 24
ALIGNED = {
    Aligned.CLOCK: "clock comparison",
    Aligned.STEPS: "ends of steps",
    Aligned.NOT: "nothing",
}
PARTS = {  # the colour and the meaning of each part of a step
    "computing": ("compute", "compute"),
    "exposed": ("transfer", "exposed communication"),
    "waiting": ("waiting", "blocked between steps"),
}
OVERLAPPED_PARTS = {
    "hidden": ("transfer", "overlapped communication"),
    "encoding": ("encode", "encoding"),
}
BAR_PIXELS, THIN_BAR_PIXELS = 16, 5  # the heights of a rank's two bars,
LEGEND_PIXELS = 14  # and of a thick one in the legend
# Cells by heading; > marks a column of numbers.
RANK_COLUMNS: dict[str, Callable[[RankBreakdown], str]] = {
    ">rank": lambda each: str(each.rank),
    "host": lambda each: each.host,
    ">steps": lambda each: str(each.steps),
    ">step time": lambda each: about(each.seconds, "s"),
    ">compute": lambda each: about(each.computing, "s"),
    ">exposed": lambda each: about(each.exposed, "s"),
    ">overlapped": lambda each: about(each.hidden, "s"),
    ">encoding": lambda each: about(each.encoding, "s"),
    ">blocked": lambda each: about(each.waiting, "s"),
    ">exposed %": lambda each: f"{each.share:.0%}",
}
RATE_COLUMN: dict[str, Callable[[RankBreakdown], str]] = {
    ">sent": lambda each: about(each.bits_per_second, "bit/s") if each.nbytes else "-"
}
CLOCK_COLUMNS: dict[str, Callable[[RankTimeline], str]] = {
    ">rank": lambda each: str(each.rank),
    "host": lambda each: each.host,
    "aligned by": lambda each: ALIGNED[each.aligned],
    ">maximum error": lambda each: "unknown" if each.error is None else about(each.error, "s"),
}
MAX_PLOT_POINTS, MAX_PLOT_MARKS = 240, 8
MAX_HEAT_CELLS, MAX_HEAT_RANKS = 96, 48
HEAT_ROW_PIXELS = 14
MIN_HEAT_FRACTION = 0.05  # below it the deviations are noise
FAINTEST = 0.05  # of the strongest; weaker cells aren't drawn


def run_page(run: RunReport) -> str:
    """A complete HTML document without references to other files."""
    steps = run.timeline.steps
    plans = [
        header.sync
        for timeline in run.timeline.rank_timelines.values()
        for _, header in timeline.openings
    ]
    under = f" under {', then '.join(dict.fromkeys(plans))}" if plans else ""
    root, main = page(
        f"Thalweg run: {len(steps)} steps on {len(run.accounts)} ranks",
        "Run report",
        f"Steps {steps[0]} to {steps[-1]}{under}, {cluster_text(run.cluster)}.",
    )
    _add_hero(main, run)
    bars = section(main, "Step time breakdown", "The mean step of each rank, part after part.")
    add_rank_bars(bars, run.accounts)
    lead = "If both lines rise, a rank is slow; if the upper one rises alone, the network is."
    add_step_times(section(main, "Step time by step", lead), run.timeline.by_rank, run.stragglers)
    _add_maps(main, run)
    _add_table(main, run.accounts)
    _add_clocks(main, run)
    _add_notes(main, run)
    return written(root, main)


def _add_hero(main: ET.Element, run: RunReport) -> None:
    hero = section(main, "Stragglers", name="hero")
    worst = run.stragglers[0] if run.stragglers else None
    add(hero, "p", "No stragglers." if worst is None else _sentence(worst.why), "plan")
    exposed = sum(account.exposed * account.steps for account in run.accounts)
    seconds = sum(account.seconds * account.steps for account in run.accounts)
    entries = [
        (about(run.seconds, "s"), "mean step time"),
        (f"{exposed / seconds if seconds else 0:.0%}", "of it is exposed communication"),
    ]
    if worst is None:
        figures(hero, entries)
        return
    figures(hero, [*entries, (f"{worst.share:.0%}", f"of the time is lost: {worst.cost}")])
    add(hero, "p", _sentence(worst.when))
    if others := run.stragglers[1:MAX_SHOWN_STRAGGLERS]:
        add(hero, "p", "Other stragglers:")
        bullets(hero, (_sentence(str(account)) for account in others))


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _add_maps(main: ET.Element, run: RunReport) -> None:
    names = {account.rank: f"{account.rank} {account.host}" for account in run.accounts}
    ranks = {rank: steps for rank, steps in run.timeline.by_rank.items() if rank in names}
    lead = "Compute time of each rank above the median of all ranks, by its own clock."
    parent = section(main, "Compute time above the median", lead)
    add_heat_map(parent, ranks, names, computing_beyond, "of step time", "exceeded the median by")
    if any(step.flows for steps in ranks.values() for step in steps):
        lead = (
            "Rate of each host's slowest connection below the median, while it had data to send. A "
            "slow NIC shows in its own row and in the rows of hosts that send to it."
        )
        parent = section(main, "Flow rate below the median", lead)
        add_heat_map(parent, ranks, names, sending_below, "of the median rate", "was slower by")


def _add_table(main: ET.Element, accounts: Sequence[RankBreakdown]) -> None:
    lead = (
        "Step time is compute time, exposed communication and time blocked between steps. "
        "Overlapped communication and encoding take place meanwhile."
    )
    parent = section(main, "Step time of each rank", lead)
    shown, rest = slowest_first(accounts, MAX_ACCOUNT_ROWS)
    table(parent, "Ranks", shown, RANK_COLUMNS | RATE_COLUMN)
    if rest:
        label = counted(len(rest), "more rank")
        table(details(parent, label), label, rest, RANK_COLUMNS | RATE_COLUMN)


def _add_clocks(main: ET.Element, run: RunReport) -> None:
    timelines = [timeline for timeline in run.timeline.rank_timelines.values() if timeline.steps]
    errors = [timeline.error for timeline in timelines if timeline.error is not None]
    parent = section(main, "Clocks")
    if errors:
        error = about(max(errors), "s")
        add(parent, "p", f"Clock error of {len(errors)} ranks: at most {error}.")
    for remark in run.timeline.remarks:
        add(parent, "p", _sentence(remark))
    table(details(parent, "Clock of each rank"), "Clocks", timelines, CLOCK_COLUMNS)


def _add_notes(main: ET.Element, run: RunReport) -> None:
    if run.notes:
        parent = section(main, "Events")
        texts = [_sentence(str(note)) for note in run.notes]
        bullets(parent, texts[:MAX_SHOWN_NOTES])
        if rest := texts[MAX_SHOWN_NOTES:]:
            bullets(details(parent, f"{len(rest)} more"), rest)


def add_rank_bars(parent: ET.Element, accounts: Sequence[RankBreakdown]) -> None:
    entries = [
        (part, text, LEGEND_PIXELS if name in PARTS else THIN_BAR_PIXELS)
        for name, (part, text) in (PARTS | OVERLAPPED_PARTS).items()
        if any(getattr(account, name) > 0 for account in accounts)
    ]
    add_legend(parent, entries)
    longest = max(account.seconds for account in accounts) or 1.0
    shown, rest = slowest_first(accounts, MAX_ACCOUNT_BARS)
    _add_bars(parent, shown, longest)
    if rest:
        _add_bars(details(parent, counted(len(rest), "more rank")), rest, longest)


def slowest_first(
    accounts: Sequence[RankBreakdown], most: int
) -> tuple[list[RankBreakdown], list[RankBreakdown]]:
    """The ranks with the longest compute times, and the others; both in the order of ranks."""
    slow = sorted(accounts, key=lambda account: -account.computing)
    return (
        sorted(slow[:most], key=lambda account: account.rank),
        sorted(slow[most:], key=lambda account: account.rank),
    )


def _add_bars(parent: ET.Element, accounts: Sequence[RankBreakdown], longest: float) -> None:
    bars = add(parent, "div", name="bars")
    for account in accounts:
        row, label = add_bar(bars, account.seconds)
        label.text = f"rank {account.rank} on {account.host}"
        for parts, height in ((PARTS, BAR_PIXELS), (OVERLAPPED_PARTS, THIN_BAR_PIXELS)):
            values = {name: float(getattr(account, name)) for name in parts}
            lane = [(part, values[name]) for name, (part, _) in parts.items()]
            draw_bar(row, f"rank {account.rank}: {parts_text(values)}", lane, longest, height)


def add_step_times(
    parent: ET.Element, ranks: Mapping[int, Sequence[StepRecord]], late: Sequence[StragglerEpisode]
) -> None:
    records = {number: by_rank.values() for number, by_rank in by_step(ranks).items()}
    means = {number: fmean(r.seconds for r in steps) for number, steps in records.items()}
    longest = {number: max(r.computing for r in steps) for number, steps in records.items()}
    numbers = list(records)
    bins = _binned(numbers, MAX_PLOT_POINTS)
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
    if len(bins[0]) > 1:
        add(legend, "li", f"a point is the mean of {len(bins[0])} steps")
    add_chart(figure, chart)
    if chart.marks:
        places = add_numbered(figure, len(chart.marks))
        for place, mark in zip(places, chart.marks, strict=True):
            place.text = mark.text


def _binned(steps: Sequence[int], most: int) -> list[Sequence[int]]:
    """The steps in at most `most` runs of equal length; the last may be shorter."""
    width = ceil(len(steps) / most)
    return [steps[start : start + width] for start in range(0, len(steps), width)]


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
    bins = _binned(list(values), MAX_HEAT_CELLS)
    rows = {
        rank: {_steps_text(steps): _mean_deviation(values, rank, steps) for steps in bins}
        for rank in ranks
    }
    shown = sorted(sorted(rows, key=lambda rank: -sum(rows[rank].values()))[:MAX_HEAT_RANKS])
    strongest = max((value for rank in shown for value in rows[rank].values()), default=0.0)
    if strongest < MIN_HEAT_FRACTION:
        add(parent, "p", f"No rank {verb} {100 * MIN_HEAT_FRACTION:g} % {text}.")
        return
    grid = add(parent, "div", name="heat")
    for rank in shown:
        add(grid, "span", names[rank], "rank")
        _draw_heat_row(grid, names[rank], rows[rank], strongest, text)
    add(grid, "span", "step", "rank")
    ends = add(grid, "div", name="ends")
    add(ends, "span", str(bins[0][0]))
    add(ends, "span", str(bins[-1][-1]))
    notes = [f"the strongest colour is {strongest:.0%} {text}"]
    notes += [f"a cell is the mean of {len(bins[0])} steps"] if len(bins[0]) > 1 else []
    if len(shown) < len(rows):
        notes.append(f"{len(rows) - len(shown)} ranks with smaller deviations aren't drawn")
    add(parent, "p", f"{'; '.join(notes).capitalize()}.", "lead")


def _mean_deviation(
    values: Mapping[int, Mapping[int, float]], rank: int, steps: Sequence[int]
) -> float:
    present = [values[step][rank] for step in steps if rank in values[step]]
    return fmean(present) if present else 0.0


def _steps_text(steps: Sequence[int]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


def _draw_heat_row(
    grid: ET.Element, name: str, row: Mapping[str, float], strongest: float, text: str
) -> None:
    worst, width = max(row, key=lambda steps: row[steps]), 100 / len(row)
    title = f"{name}: at most {row[worst]:.0%} {text}, at {worst}"
    drawn = strip(grid, title, HEAT_ROW_PIXELS)
    for index, (steps, value) in enumerate(row.items()):
        if value >= FAINTEST * strongest:
            x = f"{index * width:.3f}%"
            cell = box(drawn, x, 0, f"{width:.3f}%", HEAT_ROW_PIXELS, "hot")
            cell.set("fill-opacity", f"{value / strongest:.2f}")
            tip(cell, f"{steps}: {value:.0%}")
