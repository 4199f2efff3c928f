"""An HTML page that needs nothing but itself: no script, no font, no picture from elsewhere.

It is built as a tree, so that every text is escaped when the tree is written; drawings are part of
the same tree and take their colours from the same style, in light and in dark.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.etree import ElementTree as ET

from thalweg.report.page_style import STYLE
from thalweg.report.shapes import tip

_BREAKS = re.compile(r"(?=[+(])|(?<=,)")  # where a plan's text may go on in the next line
_HEAD = (
    {"charset": "utf-8"},
    {"name": "viewport", "content": "width=device-width, initial-scale=1"},
    {"name": "color-scheme", "content": "light dark"},
)


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
    add(head, "style", STYLE)
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
