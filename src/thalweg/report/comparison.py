"""A picture of a scenario: what each plan's loss was after so many seconds, and what a step took.

Events are dots on the lines: they come at the same step for all, and so at different times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from thalweg.report.training import as_svg, draw_times, panels


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
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


def draw_comparison(title: str, courses: Sequence[Course]) -> str:
    """SVG: loss over time, and the median time of a step with its middle half."""
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
