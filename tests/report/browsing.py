"""A page as a browser shows it, and whether it can be read: nothing outside its drawing, nothing on
top of another text, enough contrast."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from playwright.sync_api import Browser, Page

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
