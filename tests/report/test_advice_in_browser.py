"""The page of an advice as a browser shows it: on a phone and on a desk, in light and in dark."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from playwright.sync_api import Browser

from tests.report.advices import advice, advised, measurements
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
from thalweg.facts import Cluster, Duplex, Rate, StragglerDelay
from thalweg.predict.estimate import Advice, Breakdown
from thalweg.report.advice import advice_page


def crowded() -> Advice:
    """Everything at its largest: long names, both directions, straggling hosts, a hundred plans."""
    racks = advice().situation.cluster.racks
    uneven = Duplex(Rate.parse("123.4mbit"), Rate.parse("1.25gbit"))
    delay = StragglerDelay(probability=0.25)
    long = replace(
        racks[0].hosts[0], name="gpu-node-0017.rack-04.example.org", nic=uneven, late=delay
    )
    rack = replace(racks[0], name="rack-04-in-the-basement-next-door", hosts=(long,), uplink=uneven)
    moved = [replace(host, name=f"{host.name}b") for host in racks[0].hosts[1:]]
    cluster = Cluster(racks=(rack, replace(racks[1], hosts=(*racks[1].hosts, *moved)), *racks[2:]))
    slow = [advised("ring", Breakdown(compute=0.6 * 1.1**index)) for index in range(92)]
    return replace(advice(cluster=cluster), ranking=(*advice().ranking, *slow))


def test_contrast_is_as_the_standard_reckons_it() -> None:
    assert contrast("rgb(0, 0, 0)", "rgb(255, 255, 255)") == pytest.approx(21)
    assert contrast("rgb(119, 119, 119)", "rgb(255, 255, 255)") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("scheme", get_args(Scheme))
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("which", ["usual", pytest.param("crowded", marks=pytest.mark.slow)])
def test_it_fits_and_can_be_read(
    browser: Browser, tmp_path: Path, which: str, size: tuple[int, int], scheme: Scheme
) -> None:
    file = tmp_path / "advice.html"
    shown = advice() if which == "usual" else crowded()
    file.write_text(advice_page(shown, measurements()), encoding="utf-8")
    page = opened(browser, file, size, scheme)
    page.screenshot(path=tmp_path / f"advice-{size[0]}-{scheme}.png", full_page=True)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.locator("h1").is_visible()
    assert page.evaluate(OUTSIDE) == []
    assert page.evaluate(OVERLAPPING) == []
    found: list[Any] = page.evaluate(COLOURS)
    assert len(found) > 100
    assert [each for each in found if contrast(each[1], each[2]) < ENOUGH] == []
    assert luminance(page.evaluate("getComputedStyle(document.body).backgroundColor")) == (
        pytest.approx(1 if scheme == "light" else 0, abs=0.01)
    )
    page.close()


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_whiskers_stand_under_their_ruler(
    browser: Browser, tmp_path: Path, size: tuple[int, int]
) -> None:
    file = tmp_path / "advice.html"
    file.write_text(advice_page(advice(), measurements()), encoding="utf-8")
    page = opened(browser, file, size, "light")
    lefts: list[list[float]] = page.evaluate(
        """() => [...document.querySelectorAll("table")].map(table =>
        [...table.querySelectorAll(".whisker svg")].map(svg => svg.getBoundingClientRect().left))"""
    )
    drawn = [each for each in lefts if each]
    assert [len(each) for each in drawn] == [1 + 8, 1 + 3]
    assert all(len(set(each)) == 1 for each in drawn)
    page.close()
