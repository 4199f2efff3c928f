"""A plot of step time with each compressor against link speed: both axes are logarithmic, and every
line has its name at its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree import ElementTree as ET

from thalweg.facts import about
from thalweg.report.chart import draw_axes, polyline
from thalweg.report.scale import Scale, at_digits, scale_of, spread
from thalweg.report.shapes import document, document_text, line, tip, words

LEFT, TOP, WIDTH, HEIGHT, NAMES, BELOW = 70, 66, 620, 460, 270, 56
CURVE_NAME_GAP_PIXELS = 15
CURVE_MARGIN_FACTOR = 1.25  # above and below the lines
CURVE_COLOUR_COUNT = 6
DASHES = ("none", "7 3", "2 3", "9 2 2 2")  # for each further round of colours
CURVE_STYLE = """
.leader { stroke: var(--faint); stroke-width: 0.6; } .curve { fill: none; stroke-width: 1.6; }
.dense { stroke: var(--text); stroke-width: 3; }
.peer { stroke: var(--faint); stroke-dasharray: 3 3; }
""" + "".join(f".c{index} {{ stroke: var(--c{index}); }}\n" for index in range(CURVE_COLOUR_COUNT))


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The step time in seconds at each link speed."""

    name: str
    kind: str  # "dense", "own" or "peer"
    seconds: Sequence[float]


def draw_steps(title: str, speeds: Sequence[float], curves: Sequence[Curve]) -> str:
    """An SVG document; speeds are bits per second."""
    lead = "Backward and synchronisation, by the speed of the links; lower is better"
    size = (LEFT + WIDTH + NAMES, TOP + HEIGHT + BELOW)
    root = document(*size, CURVE_STYLE, title=title, lead=lead)
    times = [value for curve in curves for value in curve.seconds]
    ends = [min(times) / CURVE_MARGIN_FACTOR, max(times) * CURVE_MARGIN_FACTOR]
    across = scale_of(speeds, start=LEFT, stop=LEFT + WIDTH, logarithmic=True)
    up = scale_of(ends, start=TOP + HEIGHT, stop=TOP, logarithmic=True)
    draw_axes(
        root,
        across,
        up,
        xs=at_digits(across.least, across.most, (1,)),
        x_text=lambda speed: about(speed, "bit/s"),
        seconds=at_digits(up.least, up.most, (1, 2, 5)),
        title="speed of the links",
    )
    looks = _looks(curves)
    for curve in curves:
        drawn = polyline(root, across, up, speeds, curve.seconds)
        drawn.attrib.update(looks[curve.name])
        tip(drawn, curve.name)
    _draw_names(root, curves, looks, up)
    return document_text(root)


def _looks(curves: Sequence[Curve]) -> dict[str, dict[str, str]]:
    """The class and the dashes of each curve; our methods have colours of their own."""
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


def _draw_names(
    root: ET.Element, curves: Sequence[Curve], looks: dict[str, dict[str, str]], up: Scale
) -> None:
    """Draw the names in the order of the curves' ends, moved apart where these are close."""
    ends = sorted((up.at(curve.seconds[-1]), curve.name) for curve in curves)
    places = spread([end for end, _ in ends], CURVE_NAME_GAP_PIXELS, 0, float(TOP + HEIGHT))
    right = LEFT + WIDTH
    for (end, name), y in zip(ends, places, strict=True):
        line(root, right, end, right + 26, y, "leader")
        line(root, right + 30, y, right + 48, y, "").attrib.update(looks[name])
        words(root, right + 54, round(y) + 4, name)
