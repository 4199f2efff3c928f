from __future__ import annotations

from xml.etree import ElementTree as ET

from thalweg.report.plots import Curve, draw_steps

SPEEDS = [1e7, 1e9, 1e11]
SVG = "{http://www.w3.org/2000/svg}"


def drawn(count: int) -> ET.Element:
    """The dense curve and so many methods, of which the last are the slowest."""
    own = [
        Curve(name=f"method {i}", kind="own", seconds=[10.0 + i, 1.0, 0.2 + i])
        for i in range(count)
    ]
    dense = Curve(name="dense", kind="dense", seconds=[100.0, 1.0, 0.1])
    return ET.fromstring(draw_steps("many", SPEEDS, [dense, *own]))


def curves(root: ET.Element) -> dict[str, ET.Element]:
    groups = [group for group in root.iter(f"{SVG}g") if group.find(f"{SVG}path") is not None]
    return {
        group.attrib["id"]: group
        for group in groups
        if group.get("id") == "dense" or group.get("id", "").startswith("method ")
    }


def test_every_line_has_its_name_in_the_order_of_the_right_ends() -> None:
    root = drawn(20)
    assert len(curves(root)) == 21
    texts = [text.text for text in root.iter(f"{SVG}text")]
    names = [text for text in texts if text == "dense" or (text or "").startswith("method ")]
    assert names == [*(f"method {i}" for i in reversed(range(20))), "dense"]


def test_colours_are_used_again_with_dashes() -> None:
    styles = []
    for group in curves(drawn(30)).values():
        path = group.find(f"{SVG}path")
        assert path is not None
        styles.append(path.attrib["style"])
    assert len(set(styles)) == 31


def test_axes_have_units() -> None:
    texts = {text.text for text in drawn(1).iter(f"{SVG}text")}
    assert {"100 Mbit/s", "10 Gbit/s", "1 s", "100 ms", "speed of the links"} <= texts
