"""A recorded run as an HTML page: stragglers with their causes, and step time breakdowns.

The step time of each rank is a bar of its parts, one after the other; a thin bar below it has the
parts that overlap with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from xml.etree import ElementTree as ET

from thalweg.facts import about, counted
from thalweg.observe.run_report import RankBreakdown, RunReport
from thalweg.observe.timeline import Aligned, RankTimeline
from thalweg.report.bars import add_bar, add_legend, add_patterns, draw_bar, parts_text
from thalweg.report.cluster_svg import cluster_text
from thalweg.report.page import (
    bullets,
    details,
    figures,
    footer,
    page,
    section,
    table,
    written,
)
from thalweg.report.run_plots import (
    add_heat_map,
    add_step_times,
    computing_beyond,
    sending_below,
)
from thalweg.report.shapes import add

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


def run_page(run: RunReport) -> str:
    """A complete HTML document without references to other files."""
    steps = run.timeline.steps
    root, main = page(f"Thalweg run: {len(steps)} steps on {len(run.accounts)} ranks")
    add_patterns(main)
    _add_head(main, run)
    _add_hero(main, run)
    bars = section(main, "Step time breakdown", "The mean step of each rank, part after part.")
    add_rank_bars(bars, run.accounts)
    lead = "If both lines rise, a rank is slow; if the upper one rises alone, the network is."
    add_step_times(section(main, "Step time by step", lead), run.timeline.by_rank, run.stragglers)
    _add_maps(main, run)
    _add_table(main, run.accounts)
    _add_clocks(main, run)
    _add_notes(main, run)
    footer(main)
    return written(root)


def _add_head(main: ET.Element, run: RunReport) -> None:
    head = add(main, "header")
    add(head, "h1", "Run report")
    steps = run.timeline.steps
    timelines = run.timeline.rank_timelines.values()
    plans = [header.sync for timeline in timelines for _, header in timeline.openings]
    under = f" under {', then '.join(dict.fromkeys(plans))}" if plans else ""
    facts = f"Steps {steps[0]} to {steps[-1]}{under}, {cluster_text(run.cluster)}."
    add(head, "p", facts, "facts")


def _add_hero(main: ET.Element, run: RunReport) -> None:
    hero = add(main, "section", name="hero")
    hero.tail = "\n"
    add(hero, "h2", "Stragglers")
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
        values = {name: float(getattr(account, name)) for name in (*PARTS, *OVERLAPPED_PARTS)}
        lanes = {
            top: [(part, values[name]) for name, (part, _) in parts.items()]
            for top, parts in ((0, PARTS), (BAR_PIXELS + 2, OVERLAPPED_PARTS))
        }
        title = f"rank {account.rank}: {parts_text(values)}"
        draw_bar(row, title, lanes, longest, BAR_PIXELS + 2 + THIN_BAR_PIXELS)
