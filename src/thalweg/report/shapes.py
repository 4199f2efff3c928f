"""The few shapes that our pictures are made of."""

from __future__ import annotations

from xml.etree import ElementTree as ET


def words(parent: ET.Element, x: int, y: int, text: str, name: str = "") -> None:
    ET.SubElement(parent, "text", {"x": str(x), "y": str(y), "class": name}).text = text


def line(parent: ET.Element, x1: float, y1: float, x2: float, y2: float, name: str) -> ET.Element:
    ends = {"x1": str(x1), "y1": str(y1), "x2": str(x2), "y2": str(y2)}
    return ET.SubElement(parent, "line", {"class": name, **ends})


def tip(element: ET.Element, text: str) -> None:
    """What a browser shows when the pointer rests on it."""
    ET.SubElement(element, "title").text = text
