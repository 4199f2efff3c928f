"""What each rank's steps are made of, as bars: what comes one after the other in one, and below it
what goes on meanwhile. Bars grow with the page, and their text doesn't."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree as ET

from thalweg.facts import about
from thalweg.records.overview import Account
from thalweg.report.advice_svg import fill
from thalweg.report.page import add, details

MOST_BARS = 24
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


def add_rank_bars(parent: ET.Element, accounts: Sequence[Account]) -> None:
    _add_legend(parent, accounts)
    longest = max(each.seconds for each in accounts) or 1.0
    shown, rest = foremost(accounts, MOST_BARS)
    _add_rows(parent, shown, longest)
    if rest:
        _add_rows(details(parent, f"{len(rest)} more rank{'s' * (len(rest) > 1)}"), rest, longest)


def foremost(accounts: Sequence[Account], most: int) -> tuple[list[Account], list[Account]]:
    """Those that compute for longest, and the others; both by rank."""
    slow = sorted(accounts, key=lambda each: -each.computing)
    return (
        sorted(slow[:most], key=lambda each: each.rank),
        sorted(slow[most:], key=lambda each: each.rank),
    )


def parts_text(account: Account) -> str:
    values = {name: float(getattr(account, name)) for name in (*PARTS, *MEANWHILE)}
    return ", ".join(f"{name} {about(value, 's')}" for name, value in values.items() if value > 0)


def _add_legend(parent: ET.Element, accounts: Sequence[Account]) -> None:
    legend = add(parent, "ul", name="legend")
    for name, (part, words) in (PARTS | MEANWHILE).items():
        if any(getattr(each, name) > 0 for each in accounts):
            tall = 14 if name in PARTS else THIN
            entry = add(legend, "li")
            swatch = add(entry, "svg", width="22", height=str(tall), aria_hidden="true")
            fill(add(swatch, "rect", width="22", height=str(tall)), part)
            add(entry, "span", words)


def _add_rows(parent: ET.Element, accounts: Sequence[Account], longest: float) -> None:
    bars = add(parent, "div", name="bars")
    for each in accounts:
        row = add(bars, "div")
        label = add(row, "div", name="label")
        add(label, "span", f"rank {each.rank} on {each.host}")
        add(label, "span", about(each.seconds, "s"), "number")
        _draw(row, each, longest)


def _draw(parent: ET.Element, account: Account, longest: float) -> None:
    title = f"rank {account.rank}: {parts_text(account)}"
    height = TALL + 2 + THIN
    drawn = add(parent, "svg", width="100%", height=str(height), role="img", aria_label=title)
    add(drawn, "title", title)
    add(drawn, "rect", name="back", width="100%", height=str(TALL))
    for parts, top, tall in ((PARTS, 0, TALL), (MEANWHILE, TALL + 2, THIN)):
        start = 0.0
        for name, (part, _) in parts.items():
            share = 100 * float(getattr(account, name)) / longest
            if share > 0:
                place = {"x": f"{start:.3f}%", "width": f"{share:.3f}%", "y": str(top)}
                fill(add(drawn, "rect", height=str(tall), **place), part)
            start += share
