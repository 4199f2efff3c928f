from __future__ import annotations

from itertools import pairwise
from xml.etree import ElementTree as ET

from thalweg.report.compress import CURVE_NAME_GAP_PIXELS, HEIGHT, TOP, Curve, draw_steps

SPEEDS = [1e7, 1e9, 1e11]
SVG = "{http://www.w3.org/2000/svg}"


def curves(count: int) -> list[Curve]:
    own = [
        Curve(name=f"method {i}", kind="own", seconds=[10.0 + i, 1.0, 0.2]) for i in range(count)
    ]
    return [Curve(name="dense", kind="dense", seconds=[100.0, 1.0, 0.1]), *own]


def test_every_line_has_its_name_and_names_are_apart() -> None:
    root = ET.fromstring(draw_steps("many", SPEEDS, curves(20)))
    texts = {text.text: text for text in root.iter(f"{SVG}text")}
    names = ["dense", *(f"method {i}" for i in range(20))]
    assert len(list(root.iter(f"{SVG}polyline"))) == len(names)
    heights = sorted(int(texts[name].attrib["y"]) for name in names)
    assert all(second - first >= CURVE_NAME_GAP_PIXELS for first, second in pairwise(heights))
    assert TOP <= heights[0] < heights[-1] <= TOP + HEIGHT + 4


def test_lines_stay_inside_the_axes() -> None:
    root = ET.fromstring(draw_steps("few", SPEEDS, curves(1)))
    for each in root.iter(f"{SVG}polyline"):
        points = [tuple(map(float, pair.split(","))) for pair in each.attrib["points"].split()]
        assert [x for x, _ in points] == [70, 380, 690]
        assert all(TOP < y < TOP + HEIGHT for _, y in points)


def test_colours_are_used_again_with_dashes() -> None:
    root = ET.fromstring(draw_steps("many", SPEEDS, curves(10)))
    looks = [
        (each.get("class"), each.get("stroke-dasharray")) for each in root.iter(f"{SVG}polyline")
    ]
    assert len(set(looks)) == 11
