"""An HTML page that needs nothing but itself: no script, no font, no picture from elsewhere.

It is built as a tree, so that every text is escaped when the tree is written; drawings are part of
the same tree. Colours are named once for light and once for dark, and drawings use the same names.
Text has a contrast of at least 4.5 to 1 on what it stands on; the colours of lines and bars can be
told apart by the colour-blind (after Okabe and Ito), and never say anything alone: bars have
patterns too, and lines dashes and letters.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.etree import ElementTree as ET

from thalweg.report.shapes import tip

_BREAKS = re.compile(r"(?=[+(])|(?<=,)")  # where a plan's text may go on in the next line
_HEAD = (
    {"charset": "utf-8"},
    {"name": "viewport", "content": "width=device-width, initial-scale=1"},
    {"name": "color-scheme", "content": "light dark"},
)
PAGE_COLOURS = """
:root { color-scheme: light dark;
--page: #ffffff; --text: #1b1f24; --faint: #57606a; --line: #d0d7de; --panel: #f6f8fa;
--accent: #0a5cb8; --warn: #a33c00;
--c0: #0072b2; --c1: #d55e00; --c2: #00805a; --c3: #aa3f86; --c4: #8a6500; --c5: #4d5560;
--compute: #8c959f; --encode: #e69f00; --decode: #b3679b; --transfer: #0072b2; --waiting: #d55e00;
--stripe: #ffffff; --shade: rgb(27 31 36 / .16); }
@media (prefers-color-scheme: dark) { :root {
--page: #0d1117; --text: #e6edf3; --faint: #9aa4af; --line: #30363d; --panel: #161b22;
--accent: #6cb6ff; --warn: #f0883e;
--c0: #56b4e9; --c1: #f0883e; --c2: #3fc79a; --c3: #e08fc8; --c4: #e6b422; --c5: #b1bac4;
--compute: #6e7681; --encode: #e6b422; --decode: #d58fbe; --transfer: #56b4e9; --waiting: #f0883e;
--stripe: #0d1117; --shade: rgb(0 0 0 / .6); } }
"""

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
.back { fill: var(--panel); } .hot { fill: var(--waiting); }
.heat { display: grid; grid-template-columns: fit-content(9rem) minmax(0, 1fr); gap: 2px .6rem;
align-items: center; font-size: .8rem; line-height: 1.2; margin-bottom: .5rem; }
.heat .rank { overflow-wrap: anywhere; } .heat svg { display: block; }
.heat .ends { display: flex; justify-content: space-between; color: var(--faint); }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.1rem; list-style: none; padding: 0;
margin: 0 0 .9rem; font-size: .875rem; }
.legend li { display: flex; gap: .45rem; align-items: center; }
.legend svg { flex: none; } .curves { flex-direction: column; margin-top: .5rem; }
.curve { fill: none; stroke-width: 2; stroke-linejoin: round; }
.lead-line { stroke: var(--faint); stroke-width: 1; }
.now { stroke: var(--text); stroke-width: 1.5; } .axis { stroke: var(--faint); }
.break { stroke: var(--faint); stroke-width: 1; stroke-dasharray: 2 3; fill: none; }
.badge { fill: var(--page); stroke: var(--text); } .point { fill: var(--text); }
.letter { font-weight: 600; } .narrow { max-width: 100%; height: auto; } .wide { display: none; }
.course .wide { max-width: 100%; height: auto; }
.breaks { padding: 0; list-style: none; font-size: .875rem; }
.breaks li { display: flex; gap: .5rem; }
.breaks b { flex: none; width: 1.35rem; height: 1.35rem; border: 1px solid var(--text);
border-radius: 50%; text-align: center; line-height: 1.25rem; font-size: .75rem; font-weight: 400; }
.racks { display: flex; flex-wrap: wrap; row-gap: 1.25rem; } .racks svg { flex: none; }
.rack { fill: var(--panel); stroke: var(--line); } .host { fill: var(--page); stroke: var(--line); }
.spine { stroke: var(--faint); stroke-width: 5; } .uplink { stroke: var(--c0); }
.free { stroke-dasharray: 5 4; } .slow.host { stroke: var(--warn); stroke-width: 2; }
svg text.slow { fill: var(--warn); }
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

PAGE_STYLE = PAGE_COLOURS + TEXT + TABLES + DRAWINGS + SERIES


def add(parent: ET.Element, tag: str, text: str = "", name: str = "", **more: str) -> ET.Element:
    """A new child; `name` is its class, and `aria_label` becomes `aria-label`."""
    attributes = {key.replace("_", "-"): value for key, value in more.items()}
    element = ET.SubElement(parent, tag, {**({"class": name} if name else {}), **attributes})
    element.text = text
    return element


def page(title: str) -> tuple[ET.Element, ET.Element]:
    """The whole document, and the part of it to fill."""
    root = ET.Element("html", {"lang": "en"})
    head = add(root, "head")
    for entries in _HEAD:
        ET.SubElement(head, "meta", entries)
    add(head, "title", title)
    add(head, "style", PAGE_STYLE)
    return root, add(add(root, "body"), "main")


def written(root: ET.Element) -> str:
    return "<!DOCTYPE html>\n" + ET.tostring(root, encoding="unicode", method="html") + "\n"


def section(parent: ET.Element, heading: str, lead: str = "") -> ET.Element:
    found = add(parent, "section")
    found.tail = "\n"
    add(found, "h2", heading)
    if lead:
        add(found, "p", lead, "lead")
    return found


def plan_text(parent: ET.Element, text: str) -> ET.Element:
    """A plan as one writes it; a narrow column may break it where it reads well."""
    element = add(parent, "code", name="plan")
    first, *rest = _BREAKS.split(text)
    element.text = first
    for part in rest:
        ET.SubElement(element, "wbr").tail = part
    return element


def prose(parent: ET.Element, text: str, plan: str, name: str) -> None:
    """A paragraph in which this plan's text looks like one."""
    first, *rest = text.split(plan)
    paragraph = add(parent, "p", first, name)
    for part in rest:
        plan_text(paragraph, plan).tail = part


def table(parent: ET.Element, label: str, columns: Sequence[str]) -> tuple[ET.Element, ET.Element]:
    """In a box of its own, which scrolls if the table is wider than the page: the row of headings,
    and the body to fill. A column whose name begins with `#` holds numbers."""
    box = add(parent, "div", name="scroll", role="region", aria_label=label, tabindex="0")
    found = add(box, "table")
    headings = add(add(found, "thead"), "tr")
    for column in columns:
        name = "number" if column.startswith("#") else ""
        add(headings, "th", column.removeprefix("#"), name, scope="col")
    return headings, add(found, "tbody")


def details(parent: ET.Element, summary: str) -> ET.Element:
    found = add(parent, "details")
    add(found, "summary", summary)
    return found


def picture(
    parent: ET.Element, width: int, height: int, title: str, *, name: str = "", desc: str = ""
) -> ET.Element:
    """A drawing in the page, with what it shows in words."""
    size = {"width": str(width), "height": str(height), "viewBox": f"0 0 {width} {height}"}
    label = f"{title}. {desc}" if desc else title
    drawn = add(parent, "svg", name=name, role="img", aria_label=label)
    drawn.attrib.update(size)
    tip(drawn, title)
    if desc:
        add(drawn, "desc", desc)
    return drawn
