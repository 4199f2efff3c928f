"""What a step takes with each compressor on links of every speed, as a picture: both axes are
logarithmic, and every line has its name at its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree import ElementTree as ET

from thalweg.facts import about
from thalweg.report.scale import Scale, at_digits, scale_of, spread
from thalweg.report.shapes import line, tip, words

LEFT, TOP, SPEED_PLOT_WIDTH_PIXELS, HEIGHT, NAMES, BELOW = 70, 66, 620, 460, 270, 56
CURVE_NAME_GAP_PIXELS = 15  # pixels between two names
CURVE_MARGIN_FACTOR = 1.25  # above and below the lines
CURVE_COLOUR_COUNT = 8
LIGHT = ["#0969da", "#1a7f37", "#bc4c00", "#8250df", "#bf3989", "#9a6700", "#0a7d91", "#cf222e"]
DARK = ["#58a6ff", "#3fb950", "#f0883e", "#bc8cff", "#f778ba", "#d29922", "#39c5cf", "#ff7b72"]
DASHES = ("", "7 3", "2 3")  # for each further round of colours


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Seconds of a step at each speed."""

    name: str
    kind: str  # "dense", "own" or "peer"
    seconds: Sequence[float]


def draw_steps(title: str, speeds: Sequence[float], curves: Sequence[Curve]) -> str:
    """An SVG document; speeds are bits per second."""
    width, height = LEFT + SPEED_PLOT_WIDTH_PIXELS + NAMES, TOP + HEIGHT + BELOW
    size = {"width": str(width), "height": str(height), "viewBox": f"0 0 {width} {height}"}
    root = ET.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", **size})
    ET.SubElement(root, "style").text = _style()
    words(root, 16, 26, title, "title")
    told = "Backward and synchronisation, by the speed of the links; lower is better"
    words(root, 16, 46, told, "faint")
    times = [value for curve in curves for value in curve.seconds]
    ends = [min(times) / CURVE_MARGIN_FACTOR, max(times) * CURVE_MARGIN_FACTOR]
    across = scale_of(speeds, start=LEFT, stop=LEFT + SPEED_PLOT_WIDTH_PIXELS, logarithmic=True)
    up = scale_of(ends, start=TOP + HEIGHT, stop=TOP, logarithmic=True)
    for value in at_digits(across.least, across.most, (1,)):
        at = across.at(value)
        line(root, at, TOP, at, TOP + HEIGHT, "grid")
        words(root, round(at) - 24, TOP + HEIGHT + 20, about(value, "bit/s"), "faint")
    for value in at_digits(up.least, up.most, (1, 2, 5)):
        at = up.at(value)
        line(root, LEFT, at, LEFT + SPEED_PLOT_WIDTH_PIXELS, at, "grid")
        words(root, 14, round(at) + 4, about(value, "s"), "faint")
    words(
        root,
        LEFT + SPEED_PLOT_WIDTH_PIXELS // 2 - 40,
        TOP + HEIGHT + 42,
        "speed of the links",
        "faint",
    )
    looks = _looks(curves)
    for curve in curves:
        _draw(root, curve, looks[curve.name], speeds, across, up)
    _name(root, curves, looks, up)
    ET.indent(root)
    return ET.tostring(root, encoding="unicode") + "\n"


def _looks(curves: Sequence[Curve]) -> dict[str, dict[str, str]]:
    """Class and dashes; our methods have colours of their own."""
    looks, own = {}, 0
    for curve in curves:
        look = {"class": f"curve {curve.kind}"}
        if curve.kind == "own":
            turn, colour = divmod(own, CURVE_COLOUR_COUNT)
            look["class"] += f" c{colour}"
            if turn:
                look["stroke-dasharray"] = DASHES[turn % len(DASHES)]
            own += 1
        looks[curve.name] = look
    return looks


def _draw(
    root: ET.Element,
    curve: Curve,
    look: dict[str, str],
    speeds: Sequence[float],
    across: Scale,
    up: Scale,
) -> None:
    points = [
        f"{across.at(speed)},{up.at(seconds)}"
        for speed, seconds in zip(speeds, curve.seconds, strict=True)
    ]
    tip(ET.SubElement(root, "polyline", {"points": " ".join(points), **look}), curve.name)


def _name(
    root: ET.Element, curves: Sequence[Curve], looks: dict[str, dict[str, str]], up: Scale
) -> None:
    """In the order of the lines' ends, moved apart where these are close."""
    ends = sorted((up.at(curve.seconds[-1]), curve.name) for curve in curves)
    places = spread([end for end, _ in ends], CURVE_NAME_GAP_PIXELS, 0, float(TOP + HEIGHT))
    right = LEFT + SPEED_PLOT_WIDTH_PIXELS
    for (end, name), y in zip(ends, places, strict=True):
        line(root, right, end, right + 26, y, "leader")
        line(root, right + 30, y, right + 48, y, "").attrib.update(looks[name])
        words(root, right + 54, round(y) + 4, name)


def _style() -> str:
    light, dark = (
        "\n".join(f".c{number} {{ stroke: {colour}; }}" for number, colour in enumerate(colours))
        for colours in (LIGHT, DARK)
    )
    return f"""
svg {{ background: #ffffff; font: 12px system-ui, sans-serif; }}
text {{ fill: #1b1f24; }} .faint {{ fill: #57606a; }}
.title {{ font-size: 15px; font-weight: 600; }}
.grid {{ stroke: #d0d7de; }} .leader {{ stroke: #8c959f; stroke-width: 0.6; }}
.curve {{ fill: none; stroke-width: 1.6; }}
.dense {{ stroke: #1b1f24; stroke-width: 3; }}
.peer {{ stroke: #8c959f; stroke-dasharray: 3 3; }}
{light}
@media (prefers-color-scheme: dark) {{
svg {{ background: #0d1117; }} text {{ fill: #e6edf3; }} .faint {{ fill: #8d96a0; }}
.grid {{ stroke: #30363d; }} .leader {{ stroke: #6e7681; }}
.dense {{ stroke: #e6edf3; }} .peer {{ stroke: #6e7681; }}
{dark}
}}
"""
