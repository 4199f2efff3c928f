"""The page of a recorded run: what it says, that it stays small, and that a browser can show it."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

import pytest
from playwright.sync_api import Browser

from tests.recorded import Run
from tests.report.browsing import (
    COLOURS,
    ENOUGH,
    OUTSIDE,
    OVERLAPPING,
    SIZES,
    Scheme,
    contrast,
    luminance,
    opened,
)
from tests.report.test_advice import NASTY, Page
from thalweg.observe.records import EventRecord, Record
from thalweg.observe.run_report import RunReport, run_report
from thalweg.observe.timeline import timeline
from thalweg.report.run_page import MAX_HEAT_CELLS, MAX_HEAT_RANKS, MAX_PLOT_POINTS, run_page

SLOW = Run(slow={3: 3.0}, steps=60, until=40)


def of(run: Run | dict[int, list[Record]]) -> RunReport:
    return run_report(timeline(run.records() if isinstance(run, Run) else run))


def shown(found: RunReport) -> Page:
    page = Page(run_page(found))
    assert page.open == []
    return page


def test_the_sections_come_in_the_order_of_a_readers_questions() -> None:
    assert shown(of(SLOW)).texts["h2"] == [
        "Stragglers",
        "Step time breakdown",
        "Step time by step",
        "Compute time above the median",
        "Flow rate below the median",
        "Step time of each rank",
        "Clocks",
        "Events",
    ]


def test_the_head_names_the_straggler_and_its_cause() -> None:
    found = of(SLOW)
    page = shown(found)
    [late] = found.stragglers
    assert f"R{late.why[1:]}." in page.texts["p"]
    assert "From step 10 to 40." in page.texts["p"]
    assert page.texts["dd"][2] == f"{late.share:.0%}"
    assert page.texts["footer"] == [f"Made by thalweg {version('thalweg')}."]


def test_a_run_without_stragglers() -> None:
    page = shown(of(Run()))
    assert "No stragglers." in page.texts["p"]
    assert page.number("circle", "badge") == 0
    assert page.number("rect", "hot") == 0
    assert "No rank exceeded the median by 5 % of step time." in page.texts["p"]


def test_bars_are_as_long_as_their_parts() -> None:
    found = of(SLOW)
    bars = [attrs for tag, attrs in shown(found).tags if tag == "rect" and "data-part" in attrs]
    legend, bars = bars[:5], bars[5:]
    assert len(legend) == 5
    longest = max(each.seconds for each in found.accounts)
    expected = [
        100 * value / longest
        for each in found.accounts
        for value in (each.computing, each.exposed, each.waiting, each.hidden, each.encoding)
    ]
    lengths = [float(bar["width"].rstrip("%")) for bar in bars]
    assert lengths == pytest.approx(expected, abs=1e-3)


def test_marks_stand_where_a_straggler_begins_and_ends() -> None:
    page = shown(of(SLOW))
    assert page.number("circle", "badge") == 2 * 2  # once for wide pages, once for narrow ones
    marks = [text for text in page.texts["li"] if "step 10" in text or "step 41" in text]
    assert [text.split(":")[0] for text in marks] == [
        "1 since step 10",
        "2 resolved at step 41",
    ]


def test_a_slow_rank_is_hot_in_its_row_and_a_slow_nic_in_those_that_use_it() -> None:
    assert shown(of(SLOW)).number("rect", "hot") == 31  # steps 10 to 40 of rank 3
    text = run_page(of(Run(thin={5: 0.25}, steps=40)))
    rows = re.findall(r'aria-label="(\d) host\d: at most (\d+)% of the median rate', text)
    assert [rank for rank, percent in rows if int(percent) > 50] == ["4", "5"]  # 4 sends to 5


def test_it_does_not_grow_with_the_run() -> None:
    long = shown(of(Run(ranks=3, steps=700, slow={1: 2.0})))
    assert long.number("rect", "hot") <= MAX_HEAT_CELLS
    points = [attrs["points"].split() for tag, attrs in long.tags if tag == "polyline"]
    assert max(map(len, points)) <= MAX_PLOT_POINTS
    assert "a point is the mean of 3 steps" in long.texts["li"]
    wide = shown(of(Run(ranks=60, steps=8, slow={59: 3.0}, since=2)))
    labels = [text for text in wide.texts["span"] if re.fullmatch(r"\d+ host\d+", text)]
    assert len(labels) == MAX_HEAT_RANKS
    assert "59 host59" in labels
    assert "36 more ranks" in wide.texts["summary"]
    text = run_page(of(Run(ranks=60, steps=8, slow={59: 3.0}, since=2)))
    assert text.index("rank 59 on host59") < text.index("36 more ranks")  # who is slow is shown


def test_clock_errors_that_are_known_and_unknown() -> None:
    page = shown(of(Run(unknown=frozenset({1}))))
    assert "Clock error of 7 ranks: at most 200 us." in page.texts["p"]
    [row] = [row for row in page.texts["tr"] if row.startswith("1host1ends")]
    assert row.endswith("unknown")


def test_texts_are_escaped() -> None:
    records = SLOW.records()
    records[3][0] = replace(records[3][0], host=NASTY, sync=NASTY)  # type: ignore[type-var]
    records[0].append(EventRecord(at=0.0, step=3, topic="hang", text=NASTY))
    page = shown(of(records))
    assert page.number("script") == 0
    assert any(NASTY in text for text in page.texts["li"])
    assert NASTY in page.texts["td"]


def test_it_needs_nothing_from_elsewhere_and_drawings_are_described() -> None:
    text = run_page(of(SLOW))
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "image", "use"} & {tag for tag, _ in page.tags}
    assert "http" not in text
    drawings = [attrs for tag, attrs in page.tags if tag == "svg"]
    assert all(attrs.get("aria-label") or attrs.get("aria-hidden") for attrs in drawings)


def crowded() -> RunReport:
    """Long names, many ranks, and several stragglers."""
    records = Run(ranks=30, steps=260, slow={7: 3.0, 20: 2.0}, thin={11: 0.2}, until=150).records()
    for rank in (7, 11):
        host = f"gpu-node-{rank:04}.rack-04.example.org"
        records[rank][0] = replace(records[rank][0], host=host)  # type: ignore[type-var]
    return of(records)


@pytest.mark.parametrize("scheme", get_args(Scheme))
@pytest.mark.parametrize("size", [*SIZES, (800, 600)], ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("which", ["usual", pytest.param("crowded", marks=pytest.mark.slow)])
def test_it_fits_and_can_be_read(
    browser: Browser, tmp_path: Path, which: str, size: tuple[int, int], scheme: Scheme
) -> None:
    file = tmp_path / "run.html"
    file.write_text(run_page(of(SLOW) if which == "usual" else crowded()), encoding="utf-8")
    page = opened(browser, file, size, scheme)
    page.screenshot(path=tmp_path / f"run-{size[0]}-{scheme}.png", full_page=True)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate(OUTSIDE) == []
    assert page.evaluate(OVERLAPPING) == []
    found: list[Any] = page.evaluate(COLOURS)
    assert len(found) > 100
    assert [each for each in found if contrast(each[1], each[2]) < ENOUGH] == []
    assert luminance(page.evaluate("getComputedStyle(document.body).backgroundColor")) == (
        pytest.approx(1 if scheme == "light" else 0, abs=0.01)
    )
    page.close()
