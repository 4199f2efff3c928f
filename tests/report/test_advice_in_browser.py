"""The page of an advice as a browser shows it: on a phone and on a desk, in light and in dark."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import pytest
from playwright.sync_api import Browser, Error, Page, sync_playwright

from tests.report.advices import advice, advised, measurements
from thalweg.facts import Cluster, Duplex, Lateness, Rate
from thalweg.predict.advice import Advice
from thalweg.predict.estimate import Breakdown
from thalweg.report.advice import advice_page

Scheme = Literal["light", "dark"]
SIZES = ((360, 800), (1280, 800))
ENOUGH = 4.5  # contrast of text, by WCAG 2 AA

OUTSIDE = """() => [...document.querySelectorAll("svg text")].filter(text => {
    const inner = text.getBoundingClientRect();
    const outer = text.ownerSVGElement.getBoundingClientRect();
    return inner.width > 0 && (inner.left < outer.left - 1 || inner.right > outer.right + 1
        || inner.top < outer.top - 1 || inner.bottom > outer.bottom + 1);
}).map(text => text.textContent)"""

OVERLAPPING = """() => [...document.querySelectorAll("svg")].flatMap(svg => {
    const boxes = [...svg.querySelectorAll("text")].filter(text => text.textContent)
        .map(text => [text.textContent, text.getBoundingClientRect()]);
    return boxes.flatMap(([a, p], i) => boxes.slice(i + 1).filter(([b, q]) => p.width && q.width
        && Math.min(p.right, q.right) - Math.max(p.left, q.left) > 1
        && Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top) > 3)
        .map(([b, q]) => a + " / " + b));
})"""

COLOURS = """() => [...document.querySelectorAll("body *")].filter(element =>
    element.getClientRects().length && [...element.childNodes].some(
        node => node.nodeType === Node.TEXT_NODE && node.data.trim())).filter(element =>
    !["title", "desc", "STYLE"].includes(element.tagName)).map(element => {
    const style = getComputedStyle(element);
    const drawn = element.ownerSVGElement !== undefined;
    let under = element, back = "rgba(0, 0, 0, 0)";
    while (under && back === "rgba(0, 0, 0, 0)") {
        back = getComputedStyle(under).backgroundColor;
        under = under.parentElement;
    }
    return [element.textContent.slice(0, 40), drawn ? style.fill : style.color, back];
})"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium, as `scripts/browser` finds it; skipped where there is none."""
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next(filter(None, map(shutil.which, names)), None)
    with sync_playwright() as playwright:
        try:
            opened = playwright.chromium.launch(executable_path=found)
        except Error as error:
            pytest.skip(f"no Chromium: {error.message.splitlines()[0]}")
        with opened:
            yield opened


def opened(browser: Browser, file: Path, size: tuple[int, int], scheme: Scheme) -> Page:
    """The page, once it has asked for nothing but itself and complained of nothing."""
    width, height = size
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(file.as_uri(), wait_until="load")
    for summary in page.locator("summary").all():
        summary.click()
    assert said == []
    assert asked == [file.as_uri()]
    return page


def luminance(colour: str) -> float:
    """Of `rgb(r, g, b)`, relative to white, by WCAG 2."""
    numbers = colour[colour.index("(") + 1 : colour.index(")")].replace(",", " ").split()[:3]
    shares = [int(number) / 255 for number in numbers]
    linear = [
        share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares
    ]
    return sum(
        weight * share for weight, share in zip((0.2126, 0.7152, 0.0722), linear, strict=True)
    )


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def crowded() -> Advice:
    """Everything at its largest: long names, both directions, late hosts, a hundred plans."""
    racks = advice().cluster.racks
    uneven = Duplex(Rate.parse("123.4mbit"), Rate.parse("1.25gbit"))
    late = Lateness(probability=0.25)
    long = replace(
        racks[0].hosts[0], name="gpu-node-0017.rack-04.example.org", nic=uneven, late=late
    )
    rack = replace(racks[0], name="rack-04-in-the-basement-next-door", hosts=(long,), uplink=uneven)
    moved = [replace(host, name=f"{host.name}b") for host in racks[0].hosts[1:]]
    cluster = Cluster(racks=(rack, replace(racks[1], hosts=(*racks[1].hosts, *moved)), *racks[2:]))
    slow = [advised("ring", Breakdown(compute=0.6 * 1.1**index)) for index in range(92)]
    return replace(advice(), cluster=cluster, ranking=(*advice().ranking, *slow))


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
