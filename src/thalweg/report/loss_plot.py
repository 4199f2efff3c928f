"""Pictures of several trainings of one job: how fast each step was, and what it led to."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """One plan's course: the loss at every step, and the seconds that it took."""

    sync: str
    losses: Sequence[float]
    seconds: Sequence[float]


def draw_trainings(title: str, trainings: Sequence[Training]) -> str:
    """SVG: loss over steps, and the median time of a step with its middle half."""
    figure, course, times = panels(title)
    for training in trainings:
        course.plot(
            range(1, len(training.losses) + 1), training.losses, label=training.sync, lw=1.2
        )
    course.set(xlabel="step")
    course.legend(fontsize="small")
    draw_times(times, {training.sync: _quartiles(training.seconds) for training in trainings})
    return as_svg(figure)


def panels(title: str) -> tuple[Figure, Axes, Axes]:
    """A figure with room for the course of the loss and for the time of a step."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasSVG(figure)
    figure.suptitle(title)
    course, times = figure.subplots(1, 2, width_ratios=(3, 2))
    course.set(ylabel="loss (mean over workers)", yscale="log")
    course.grid(alpha=0.3)
    return figure, course, times


def draw_times(times: Axes, quartiles: Mapping[str, Sequence[float]]) -> None:
    """A bar for each plan up to the median, and a line from the first quartile to the third."""
    for row, seconds in enumerate(quartiles.values()):
        low, middle, high = (1000 * value for value in seconds)
        times.barh(row, middle, color=f"C{row}")
        times.plot([low, high], [row, row], color="black", lw=1.2)
    times.set_yticks(range(len(quartiles)), list(quartiles))
    times.invert_yaxis()
    times.set(xlabel="milliseconds a step (median, and the middle half)")


def as_svg(figure: Figure) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    ordered = sorted(values)
    last = len(ordered) - 1
    return ordered[last // 4], ordered[last // 2], ordered[3 * last // 4]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCurve:
    """One plan's: mean losses and seconds by step, and the quartiles of the steps that count."""

    sync: str
    losses: Sequence[float]
    seconds: Sequence[float]
    quartiles: Sequence[float]
    events: Mapping[str, int]  # what happened, and after which step

    @property
    def times(self) -> list[float]:
        """Seconds of training at the end of each step."""
        return list(accumulate(self.seconds))


def draw_comparison(title: str, courses: Sequence[TrainingCurve]) -> str:
    """SVG: loss over time, and the median time of a step with its middle half. Events are dots on
    the lines: they come at the same step for all, and so at different times."""
    figure, loss, times = panels(title)
    for number, course in enumerate(courses):
        loss.plot(course.times, course.losses, label=course.sync, lw=1.2, color=f"C{number}")
        for text, step in course.events.items():
            at = max(step, 1) - 1
            loss.plot(
                course.times[at],
                course.losses[at],
                marker="o",
                ms=5,
                color=f"C{number}",
                gid=f"{course.sync}: {text}",
            )
    loss.set(xlabel="seconds of training")
    happened = dict.fromkeys(text for course in courses for text in course.events)
    if happened:
        loss.set_title("dots: " + "; ".join(happened), fontsize="small", loc="left")
    if courses:
        loss.legend(fontsize="small")
    draw_times(times, {course.sync: course.quartiles for course in courses})
    return as_svg(figure)
