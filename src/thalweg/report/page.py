"""An HTML page that needs nothing but itself: no script, no font, no picture from elsewhere.

It is built as a tree, so that every text is escaped when the tree is written; drawings are part of
the same tree. Colours never say anything alone: bars have patterns too, and lines dashes and
letters.

Step times are bars, divided into parts, which grow with the page while their text doesn't. A part
has a colour of its own, and some a pattern; compute and transfer are plain.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from typing import TypeVar
from xml.etree import ElementTree as ET

from thalweg.facts import about
from thalweg.report.shapes import CLUSTER_STYLE, COLOURS, add, box, resize, tip

T = TypeVar("T")
Cell = str | Callable[[ET.Element], object]
_BREAKS = re.compile(r"(?=[+(])|(?<=,)")  # places in a plan's text for a line break
_HEAD = (
    {"charset": "utf-8"},
    {"name": "viewport", "content": "width=device-width, initial-scale=1"},
    {"name": "color-scheme", "content": "light dark"},
)
TEXT = """
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }
body { margin: 0; background: var(--page); color: var(--text);
font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 72rem; margin: 0 auto; padding: 1.5rem 1rem 3rem; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; line-height: 1.3; margin: 0 0 .4rem; }
p { margin: 0 0 .75rem; } section { margin-top: 2.5rem; }
ul, ol { margin: 0; padding-left: 1.4rem; } li { margin: .15rem 0; overflow-wrap: anywhere; }
.lead, figcaption, .facts, footer { color: var(--faint); font-size: .9rem; }
.lead, .verdict, figcaption { max-width: 46rem; overflow-wrap: anywhere; }
.facts { margin-bottom: 1rem; } .verdict { font-size: 1.1rem; } .verdict code { font-size: .9em; }
code, pre { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
code { font-size: .85em; overflow-wrap: anywhere; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--panel);
border: 1px solid var(--line); border-radius: 6px; padding: .75rem 1rem; margin: .5rem 0 0; }
pre .plan { user-select: all; font-size: 1em; }
a { color: var(--accent); }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
.hero { margin-top: 1.25rem; padding: 1rem 1.25rem; border: 1px solid var(--line);
border-left: 4px solid var(--accent); border-radius: 6px; background: var(--panel); }
.hero h2 { font-size: .9rem; font-weight: 600; color: var(--faint); margin: 0 0 .15rem; }
.hero .plan { font-size: 1.2rem; font-weight: 600; }
.hero dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr));
gap: .75rem 1.5rem; margin: 1rem 0 .75rem; }
.hero div { display: flex; flex-direction: column-reverse; justify-content: flex-end; }
.hero dd { margin: 0; font-size: 1.5rem; font-weight: 600; line-height: 1.2; }
.hero dt { color: var(--faint); font-size: .85rem; } .hero p { margin: 0; }
details { margin-top: .75rem; } summary { cursor: pointer; padding: .25rem 0; }
details > :nth-child(2) { margin-top: .25rem; }
footer { margin-top: 3rem; border-top: 1px solid var(--line); padding-top: .75rem; }
"""

TABLES = """
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px;
background: linear-gradient(to right, var(--page) 30%, transparent) left / 2.5rem 100% local,
linear-gradient(to left, var(--page) 30%, transparent) right / 2.5rem 100% local,
linear-gradient(to right, var(--shade), transparent) left / .8rem 100% scroll,
linear-gradient(to left, var(--shade), transparent) right / .8rem 100% scroll;
background-repeat: no-repeat; }
table { border-collapse: collapse; width: 100%; font-size: .875rem; line-height: 1.4; }
th, td { text-align: left; vertical-align: top; padding: .5rem .7rem; }
th { vertical-align: bottom; color: var(--faint); font-weight: 600; white-space: nowrap; }
thead tr { background: var(--panel); } tbody tr { border-top: 1px solid var(--line); }
tbody tr.best td:first-child { box-shadow: inset 3px 0 var(--accent); }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.interval { display: block; color: var(--faint); }
td .plan { display: block; min-width: 10.5rem; max-width: 16rem; }
td .note { display: block; color: var(--faint); font-size: .8rem; }
td.words { min-width: 12rem; } td.short { min-width: 8.5rem; }
.whisker { padding: .5rem .4rem; } .whisker svg { display: block; font-weight: 400; }
.pill { display: inline-block; border: 1px solid var(--line); border-radius: 1rem;
padding: 0 .55rem; background: var(--page); white-space: nowrap; }
"""

DRAWINGS = """
figure { margin: 0; } figcaption { margin-top: .5rem; }
svg { font-family: system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; font-size: 12px; }
svg text { fill: var(--text); } svg .faint { fill: var(--faint); }
svg .middle { text-anchor: middle; } svg .end { text-anchor: end; }
.hidden { position: absolute; width: 0; height: 0; }
.grid { stroke: var(--line); stroke-width: 1; }
.reach, .cap { stroke: var(--c0); stroke-width: 1.5; } .mean { fill: var(--c0); }
.measured { fill: var(--c1); }
.bars { display: grid; gap: .7rem; } .bars .label { display: flex; gap: 1rem;
justify-content: space-between; align-items: baseline; font-size: .875rem; }
.bars .label .number { font-weight: 600; } .bars svg { display: block; width: 100%; }
.bars svg + svg { margin-top: 2px; }
.back { fill: var(--panel); } .hot { fill: var(--waiting); }
.heat { display: grid; grid-template-columns: fit-content(9rem) minmax(0, 1fr); gap: 2px .6rem;
align-items: center; font-size: .8rem; line-height: 1.2; margin-bottom: .5rem; }
.heat .rank { overflow-wrap: anywhere; } .heat svg { display: block; }
.heat .ends { display: flex; justify-content: space-between; color: var(--faint); }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.1rem; list-style: none; padding: 0;
margin: 0 0 .9rem; font-size: .875rem; }
.legend li { display: flex; gap: .45rem; align-items: center; }
.legend svg { flex: none; } .sweep .curves { flex-direction: column; margin-top: .5rem; }
.curve { fill: none; stroke-width: 2; stroke-linejoin: round; }
.lead-line { stroke: var(--faint); stroke-width: 1; }
.now { stroke: var(--text); stroke-width: 1.5; } .axis { stroke: var(--faint); }
.break { stroke: var(--faint); stroke-width: 1; stroke-dasharray: 2 3; fill: none; }
.badge { fill: var(--page); stroke: var(--text); } .point { fill: var(--text); }
.narrow { max-width: 100%; height: auto; } .wide { display: none; }
.course .wide { max-width: 100%; height: auto; }
.breaks { padding: 0; list-style: none; font-size: .875rem; }
.breaks li { display: flex; gap: .5rem; }
.breaks b { flex: none; width: 1.35rem; height: 1.35rem; border: 1px solid var(--text);
border-radius: 50%; text-align: center; line-height: 1.25rem; font-size: .75rem; font-weight: 400; }
.racks { display: flex; flex-wrap: wrap; row-gap: 1.25rem; } .racks svg { flex: none; }
@media (max-width: 30rem) { th, td { padding: .5rem; } td .plan { min-width: 8.6rem; } }
@media (min-width: 66rem) {
.sweep { display: grid; grid-template-columns: auto 1fr; gap: 1.5rem; } }
@media (min-width: 48rem) { .wide { display: block; } .narrow { display: none; } }
@media print { body { font-size: 11pt; } .scroll { overflow: visible; } }
"""
SERIES = "".join(
    f".c{index} {{ stroke: var(--c{index}); stroke-dasharray: {dashes}; }}\n"
    for index, dashes in enumerate(("none", "8 4", "2 4", "10 4 2 4", "14 5", "5 2 1 2"))
)

PAGE_STYLE = COLOURS + TEXT + TABLES + DRAWINGS + CLUSTER_STYLE + SERIES
BAR_PATTERNS = {  # paths on a tile of 6 by 6 pixels
    "encode": "M-1,1 l2,-2 M0,6 l6,-6 M5,7 l2,-2",
    "decode": "M-1,5 l2,2 M0,0 l6,6 M5,-1 l2,2",
    "waiting": "M3,0 v6 M0,3 h6",
}


def page(title: str, heading: str, lead: str) -> tuple[ET.Element, ET.Element]:
    """The root of a new document, and its main element, which has a heading, a line below it, and
    the patterns of bars for all drawings."""
    root = ET.Element("html", {"lang": "en"})
    head = add(root, "head")
    for entries in _HEAD:
        ET.SubElement(head, "meta", entries)
    add(head, "title", title)
    add(head, "style", PAGE_STYLE)
    main = add(add(root, "body"), "main")
    shelf = add(add(main, "svg", name="hidden", aria_hidden="true"), "defs")
    for name, path in BAR_PATTERNS.items():
        tile = add(shelf, "pattern", id=name, width="6", height="6", patternUnits="userSpaceOnUse")
        add(tile, "rect", width="6", height="6", style=f"fill: var(--{name})")
        add(tile, "path", d=path, style="stroke: var(--stripe); stroke-width: 1.2; fill: none")
    add(main, "h1", heading)
    add(main, "p", lead, "facts")
    return root, main


def written(root: ET.Element, main: ET.Element) -> str:
    """The document as text, with a footer below what is in its main element."""
    add(main, "footer", f"Made by thalweg {version('thalweg')}.")
    return "<!DOCTYPE html>\n" + ET.tostring(root, encoding="unicode", method="html") + "\n"


def section(parent: ET.Element, heading: str, lead: str = "", *, name: str = "") -> ET.Element:
    element = add(parent, "section", name=name)
    element.tail = "\n"
    add(element, "h2", heading)
    if lead:
        add(element, "p", lead, "lead")
    return element


def plan_text(parent: ET.Element, text: str) -> ET.Element:
    """The text of a plan, with places for line breaks in narrow columns."""
    element = add(parent, "code", name="plan")
    first, *rest = _BREAKS.split(text)
    element.text = first
    for part in rest:
        ET.SubElement(element, "wbr").tail = part
    return element


def prose(parent: ET.Element, text: str, plan: str, name: str) -> None:
    """A paragraph in which each mention of the plan is set as code."""
    first, *rest = text.split(plan)
    paragraph = add(parent, "p", first, name)
    for part in rest:
        plan_text(paragraph, plan).tail = part


def table(
    parent: ET.Element, label: str, rows: Iterable[T], columns: Mapping[str, Callable[[T], Cell]]
) -> tuple[ET.Element, ET.Element]:
    """A table that scrolls in its own box if it is wider than the page; returns its row of headings
    and its body. A column maps its heading to the cell of a row: a text, or what fills the cell. A
    heading that begins with > belongs to a column of numbers."""
    region = add(parent, "div", name="scroll", role="region", aria_label=label, tabindex="0")
    element = add(region, "table")
    headings, body = add(add(element, "thead"), "tr"), add(element, "tbody")
    kinds = ["number" if heading.startswith(">") else "" for heading in columns]
    for heading, kind in zip(columns, kinds, strict=True):
        text = heading.removeprefix(">").strip()
        add(headings, "th", text[:1].upper() + text[1:], kind, scope="col")
    for row in rows:
        line = add(body, "tr")
        for cell, kind in zip(columns.values(), kinds, strict=True):
            filled = cell(row)
            if isinstance(filled, str):
                add(line, "td", filled, kind)
            else:
                filled(add(line, "td", name=kind))
    return headings, body


def classed(text: str, name: str) -> Cell:
    """A cell with a text and a class."""

    def fill(cell: ET.Element) -> None:
        cell.text = text
        cell.set("class", name)

    return fill


def plan_cell(text: str) -> Cell:
    return lambda cell: plan_text(cell, text)


def figures(parent: ET.Element, entries: Iterable[tuple[str, str]]) -> None:
    """Large figures side by side, each with its meaning."""
    listed = add(parent, "dl")
    for figure, meaning in entries:
        pair = add(listed, "div")
        add(pair, "dt", meaning)
        add(pair, "dd", figure)


def bullets(parent: ET.Element, texts: Iterable[str]) -> None:
    entries = add(parent, "ul")
    for text in texts:
        add(entries, "li", text)


def details(parent: ET.Element, summary: str) -> ET.Element:
    element = add(parent, "details")
    add(element, "summary", summary)
    return element


def picture(
    parent: ET.Element, width: int, height: int, title: str, *, name: str = "", desc: str = ""
) -> ET.Element:
    """A drawing in the page, with a title and a description for screen readers."""
    label = f"{title}. {desc}" if desc else title
    drawn = add(parent, "svg", name=name, role="img", aria_label=label)
    resize(drawn, width, height)
    tip(drawn, title)
    if desc:
        add(drawn, "desc", desc)
    return drawn


def add_legend(parent: ET.Element, entries: Iterable[tuple[str, str, int]]) -> None:
    """The part, the meaning and the height of each kind of bar."""
    legend = add(parent, "ul", name="legend")
    for part, meaning, tall in entries:
        entry = add(legend, "li")
        swatch = add(entry, "svg", width="22", height=str(tall), aria_hidden="true")
        _fill(add(swatch, "rect", width="22", height=str(tall)), part)
        add(entry, "span", meaning)


def add_bar(bars: ET.Element, seconds: float) -> tuple[ET.Element, ET.Element]:
    """A row for a bar, and the place of its label at the left of the seconds."""
    row = add(bars, "div")
    label = add(row, "div", name="label")
    text = add(label, "span")
    add(label, "span", about(seconds, "s"), "number")
    return row, text


def strip(parent: ET.Element, title: str, height: int) -> ET.Element:
    """A drawing as wide as its place in the page, with a background of this height."""
    drawn = add(parent, "svg", width="100%", height=height, role="img", aria_label=title)
    tip(drawn, title)
    box(drawn, 0, 0, "100%", height, "back")
    return drawn


def draw_bar(
    row: ET.Element, title: str, parts: Iterable[tuple[str, float]], longest: float, height: int
) -> None:
    """Draw parts with their seconds one after the other; `longest` seconds fill the strip."""
    drawn, start = strip(row, title, height), 0.0
    for part, seconds in parts:
        share = 100 * seconds / longest
        if share > 0:
            _fill(box(drawn, f"{start:.3f}%", 0, f"{share:.3f}%", height, ""), part)
        start += share


def parts_text(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {about(value, 's')}" for name, value in parts.items() if value > 0)


def _fill(shape: ET.Element, part: str) -> None:
    shape.set("data-part", part)
    shape.set("style", f"fill: {f'url(#{part})' if part in BAR_PATTERNS else f'var(--{part})'}")
