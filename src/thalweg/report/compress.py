"""A plot of step time with each compressor against link speed: both axes are logarithmic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from thalweg.report.loss_plot import as_svg

CURVE_LOOKS: dict[str, dict[str, Any]] = {
    "dense": {"color": "black", "linewidth": 2.5},
    "peer": {"color": "grey", "linestyle": "--", "linewidth": 1},
}
DASHES = ("-", "--", ":", "-.")  # for each further round of colours


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The step time in seconds at each link speed."""

    name: str
    kind: str  # "dense", "own" or "peer"
    seconds: Sequence[float]


def draw_steps(title: str, speeds: Sequence[float], curves: Sequence[Curve]) -> str:
    """An SVG document; speeds are bits per second. The legend is in the order of the curves' right
    ends, the slowest first."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(11, 6), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots()
    axes.grid(alpha=0.3)
    looks = ({"color": f"C{n % 10}", "linestyle": DASHES[n // 10 % len(DASHES)]} for n in count())
    for curve in sorted(curves, key=lambda curve: curve.seconds[-1], reverse=True):
        look = CURVE_LOOKS[curve.kind] if curve.kind in CURVE_LOOKS else next(looks)
        axes.loglog(speeds, curve.seconds, label=curve.name, gid=curve.name, **look)
    axes.set(
        xlabel="speed of the links",
        ylabel="backward and synchronisation (lower is better)",
    )
    axes.xaxis.set_major_formatter(EngFormatter("bit/s"))
    axes.yaxis.set_major_formatter(EngFormatter("s"))
    figure.legend(loc="outside right center", fontsize="small")
    return as_svg(figure)
