"""Plots by matplotlib: trainings of one job, and step times with each compressor."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


CURVE_LOOKS: dict[str, dict[str, Any]] = {
    "dense": {"color": "black", "linewidth": 2.5},
    "peer": {"color": "grey", "linestyle": "--", "linewidth": 1},
}
DASHES = ("-", "--", ":", "-.")  # for each further round of colours


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCurve:
    """The training under one plan: mean loss and seconds of every step."""

    sync: str
    losses: Sequence[float]
    seconds: Sequence[float]
    quartiles: Sequence[float] = ()  # of the step time; of all steps if not given
    events: Mapping[str, int] = field(default_factory=dict)  # the step before each event

    @property
    def times(self) -> list[float]:
        """Seconds of training at the end of each step."""
        return list(accumulate(self.seconds))

    @property
    def step_time_quartiles(self) -> Sequence[float]:
        ordered, last = sorted(self.seconds), len(self.seconds) - 1
        return self.quartiles or [ordered[quarter * last // 4] for quarter in (1, 2, 3)]


def draw_trainings(title: str, curves: Sequence[TrainingCurve], *, over_time: bool = False) -> str:
    """An SVG document: loss over steps or seconds, and median step times with their interquartile
    ranges. Events are dots on the curves: they come at one step, and so at different times."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    figure.suptitle(title)
    loss, times = figure.subplots(1, 2, width_ratios=(3, 2))
    loss.set(ylabel="loss (mean over workers)", yscale="log")
    loss.set(xlabel="seconds of training" if over_time else "step")
    loss.grid(alpha=0.3)
    for row, curve in enumerate(curves):
        look = {"color": f"C{row}"}
        xs = curve.times if over_time else range(1, len(curve.losses) + 1)
        loss.plot(xs, curve.losses, label=curve.sync, lw=1.2, **look)
        for text, step in curve.events.items():
            at = max(step, 1) - 1
            name = f"{curve.sync}: {text}"
            loss.plot(xs[at], curve.losses[at], marker="o", ms=5, gid=name, **look)
        low, middle, high = (1000 * value for value in curve.step_time_quartiles)
        times.barh(row, middle, **look)
        times.plot([low, high], [row, row], color="black", lw=1.2)
    if events := dict.fromkeys(text for curve in curves for text in curve.events):
        loss.set_title("dots: " + "; ".join(events), fontsize="small", loc="left")
    if curves:
        loss.legend(fontsize="small")
    times.set_yticks(range(len(curves)), [curve.sync for curve in curves])
    times.invert_yaxis()
    times.set(xlabel="milliseconds per step (median and interquartile range)")
    return as_svg(figure)


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


def as_svg(figure: Figure) -> str:
    """The figure as an SVG document whose texts can be searched."""
    from matplotlib import rc_context

    text = io.StringIO()
    with rc_context({"svg.fonttype": "none"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()
