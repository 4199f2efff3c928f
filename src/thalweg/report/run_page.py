"""A recorded run as one HTML page: who was late and why, and where everybody's time went.

What each rank's steps are made of are bars: what comes one after the other in one, and below it
what goes on meanwhile. Bars grow with the page, and their text doesn't.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from xml.etree import ElementTree as ET

from thalweg.facts import about
from thalweg.observe.run_report import RankBreakdown, RunReport
from thalweg.observe.straggler_episodes import StragglerEpisode
from thalweg.observe.timeline import Aligned, RankTimeline
from thalweg.report.advice_svg import add_patterns, fill
from thalweg.report.cluster_svg import cluster_text
from thalweg.report.heat_map import add_heat_map, computing_beyond, sending_below
from thalweg.report.page import add, details, page, section, table, written
from thalweg.report.run_step_times import add_step_times

MAX_ACCOUNT_ROWS = 32
MAX_SHOWN_STRAGGLERS = 12
MAX_SHOWN_NOTES = 40
ALIGNED = {
    Aligned.CLOCK: "comparing clocks",
    Aligned.STEPS: "when its steps end",
    Aligned.NOT: "nothing",
}
MAX_ACCOUNT_BARS = 24
PARTS = {  # of an account, and how it is drawn
    "computing": ("compute", "computing"),
    "exposed": ("transfer", "communication that nothing hides"),
    "waiting": ("waiting", "waiting between steps"),
}
MEANWHILE = {
    "hidden": ("transfer", "communication hidden behind computing"),
    "encoding": ("encode", "encoding"),
}
TALL, THIN = 16, 5


def run_page(run: RunReport) -> str:
    """A whole HTML document, which needs nothing beside it."""
    steps = run.run.steps
    root, main = page(f"Thalweg run: {len(steps)} steps on {len(run.accounts)} ranks")
    add_patterns(main)
    _add_head(main, run)
    _add_hero(main, run)
    bars = section(main, "Where each rank's time goes", "A step, on average, part after part.")
    add_rank_bars(bars, run.accounts)
    lead = "If both lines rise, a rank holds the others up; if the upper rises alone, the network."
    add_step_times(section(main, "Step by step", lead), run.run.by_rank, run.stragglers)
    _add_maps(main, run)
    _add_figures(main, run.accounts)
    _add_clocks(main, run)
    _add_notes(main, run)
    add(main, "footer", f"Made by thalweg {version('thalweg')}.")
    return written(root)


def _add_head(main: ET.Element, run: RunReport) -> None:
    head = add(main, "header")
    add(head, "h1", "Where a run's time went")
    steps = run.run.steps
    syncs = [
        header.sync
        for timeline in run.run.rank_timelines.values()
        for _, header in timeline.openings
    ]
    under = f" under {', then '.join(dict.fromkeys(syncs))}" if syncs else ""
    facts = f"Steps {steps[0]} to {steps[-1]}{under}, {cluster_text(run.cluster)}."
    add(head, "p", facts, "facts")


def _add_hero(main: ET.Element, run: RunReport) -> None:
    hero = add(main, "section", name="hero")
    hero.tail = "\n"
    add(hero, "h2", "Who was late")
    add(
        hero,
        "p",
        _sentence(run.stragglers[0].why) if run.stragglers else "Nobody was late.",
        "plan",
    )
    figures = add(hero, "dl")
    exposed = sum(each.exposed * each.steps for each in run.accounts)
    seconds = sum(each.seconds * each.steps for each in run.accounts)
    entries = [
        (about(run.seconds, "s"), "a step, on average"),
        (f"{exposed / seconds if seconds else 0:.0%}", "of it is exposed communication"),
    ]
    if run.stragglers:
        worst = run.stragglers[0]
        entries.append((f"{worst.share:.0%}", f"of the time was lost by it: {worst.cost}"))
    for figure, meaning in entries:
        pair = add(figures, "div")
        add(pair, "dt", meaning)
        add(pair, "dd", figure)
    if run.stragglers:
        add(hero, "p", f"{_sentence(run.stragglers[0].when)}")
        _add_others(hero, run.stragglers[1:MAX_SHOWN_STRAGGLERS])


def _add_others(hero: ET.Element, others: Sequence[StragglerEpisode]) -> None:
    if others:
        add(hero, "p", "Also:")
        entries = add(hero, "ul")
        for each in others:
            add(entries, "li", _sentence(str(each)))


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _add_maps(main: ET.Element, run: RunReport) -> None:
    names = {each.rank: f"{each.rank} {each.host}" for each in run.accounts}
    ranks = {rank: steps for rank, steps in run.run.by_rank.items() if rank in names}
    lead = "What each rank computed beyond the middle one, by its own clock."
    add_heat_map(
        section(main, "Who computed for longer", lead), ranks, names, computing_beyond, "of a step"
    )
    if any(step.flows for steps in ranks.values() for step in steps):
        lead = (
            "What each host's slowest connection got, below the middle one's, while it had "
            "something to send. A slow NIC shows in its own row and in those of who sends to it."
        )
        found = section(main, "Whose messages went slowly", lead)
        add_heat_map(found, ranks, names, sending_below, "below the middle one's rate")


def _add_figures(main: ET.Element, accounts: Sequence[RankBreakdown]) -> None:
    lead = (
        "A step is computing, exposed communication and waiting between steps. Hidden "
        "communication and encoding go on meanwhile."
    )
    found = section(main, "In figures", lead)
    shown, rest = foremost(accounts, MAX_ACCOUNT_ROWS)
    _add_rows(found, shown)
    if rest:
        _add_rows(details(found, f"{len(rest)} more rank{'s' * (len(rest) > 1)}"), rest)


def _add_rows(parent: ET.Element, accounts: Sequence[RankBreakdown]) -> None:
    columns = [
        "#Rank", "Host", "#Steps", "#A step", "#Computing", "#Exposed", "#Of a step", "#Hidden",
        "#Encoding", "#Waiting", "#Sent",
    ]  # fmt: skip
    _, body = table(parent, "Ranks", columns)
    for each in accounts:
        row = add(body, "tr")
        add(row, "td", str(each.rank), "number")
        add(row, "td", each.host)
        add(row, "td", str(each.steps), "number")
        for seconds in (each.seconds, each.computing, each.exposed):
            add(row, "td", about(seconds, "s"), "number")
        add(row, "td", f"{each.share:.0%}", "number")
        for seconds in (each.hidden, each.encoding, each.waiting):
            add(row, "td", about(seconds, "s") if seconds else "-", "number")
        sent = about(each.bits_per_second, "bit/s") if each.nbytes else "-"
        add(row, "td", sent, "number")


def _add_clocks(main: ET.Element, run: RunReport) -> None:
    lanes = [timeline for timeline in run.run.rank_timelines.values() if timeline.steps]
    errors = [timeline.error for timeline in lanes if timeline.error is not None]
    found = section(main, "Clocks")
    if errors:
        worst = f"Clocks of {len(errors)} ranks agree within {about(max(errors), 's')}."
        add(found, "p", worst)
    for remark in run.run.remarks:
        add(found, "p", _sentence(remark))
    inside = details(found, "Each rank's")
    _, body = table(inside, "Clocks", ["#Rank", "Host", "Put in place by", "#Off by at most"])
    for timeline in lanes:
        _add_clock(body, timeline)


def _add_clock(body: ET.Element, timeline: RankTimeline) -> None:
    row = add(body, "tr")
    add(row, "td", str(timeline.rank), "number")
    add(row, "td", timeline.host)
    add(row, "td", ALIGNED[timeline.aligned])
    add(row, "td", "unknown" if timeline.error is None else about(timeline.error, "s"), "number")


def _add_notes(main: ET.Element, run: RunReport) -> None:
    if not run.notes:
        return
    found = section(main, "What else happened")
    for parent, notes in (
        (found, run.notes[:MAX_SHOWN_NOTES]),
        (None, run.notes[MAX_SHOWN_NOTES:]),
    ):
        if notes:
            place = details(found, f"{len(notes)} more") if parent is None else parent
            entries = add(place, "ul")
            for note in notes:
                add(entries, "li", _sentence(str(note)))


def add_rank_bars(parent: ET.Element, accounts: Sequence[RankBreakdown]) -> None:
    _add_legend(parent, accounts)
    longest = max(each.seconds for each in accounts) or 1.0
    shown, rest = foremost(accounts, MAX_ACCOUNT_BARS)
    _add_bars(parent, shown, longest)
    if rest:
        _add_bars(details(parent, f"{len(rest)} more rank{'s' * (len(rest) > 1)}"), rest, longest)


def foremost(
    accounts: Sequence[RankBreakdown], most: int
) -> tuple[list[RankBreakdown], list[RankBreakdown]]:
    """Those that compute for longest, and the others; both by rank."""
    slow = sorted(accounts, key=lambda each: -each.computing)
    return (
        sorted(slow[:most], key=lambda each: each.rank),
        sorted(slow[most:], key=lambda each: each.rank),
    )


def parts_text(breakdown: RankBreakdown) -> str:
    values = {name: float(getattr(breakdown, name)) for name in (*PARTS, *MEANWHILE)}
    return ", ".join(f"{name} {about(value, 's')}" for name, value in values.items() if value > 0)


def _add_legend(parent: ET.Element, accounts: Sequence[RankBreakdown]) -> None:
    legend = add(parent, "ul", name="legend")
    for name, (part, words) in (PARTS | MEANWHILE).items():
        if any(getattr(each, name) > 0 for each in accounts):
            tall = 14 if name in PARTS else THIN
            entry = add(legend, "li")
            swatch = add(entry, "svg", width="22", height=str(tall), aria_hidden="true")
            fill(add(swatch, "rect", width="22", height=str(tall)), part)
            add(entry, "span", words)


def _add_bars(parent: ET.Element, accounts: Sequence[RankBreakdown], longest: float) -> None:
    bars = add(parent, "div", name="bars")
    for each in accounts:
        row = add(bars, "div")
        label = add(row, "div", name="label")
        add(label, "span", f"rank {each.rank} on {each.host}")
        add(label, "span", about(each.seconds, "s"), "number")
        _draw_bars(row, each, longest)


def _draw_bars(parent: ET.Element, breakdown: RankBreakdown, longest: float) -> None:
    title = f"rank {breakdown.rank}: {parts_text(breakdown)}"
    height = TALL + 2 + THIN
    drawn = add(parent, "svg", width="100%", height=str(height), role="img", aria_label=title)
    add(drawn, "title", title)
    add(drawn, "rect", name="back", width="100%", height=str(TALL))
    for parts, top, tall in ((PARTS, 0, TALL), (MEANWHILE, TALL + 2, THIN)):
        start = 0.0
        for name, (part, _) in parts.items():
            share = 100 * float(getattr(breakdown, name)) / longest
            if share > 0:
                place = {"x": f"{start:.3f}%", "width": f"{share:.3f}%", "y": str(top)}
                fill(add(drawn, "rect", height=str(tall), **place), part)
            start += share
