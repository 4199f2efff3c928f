"""What Thalweg shows: explanations, drawings."""

from thalweg.report.explain.json_rows import rows, settings
from thalweg.report.explain.step_view import (
    MOST_WORKERS_DRAWN,
    Explanation,
    Scene,
    explain,
    first_step,
)
from thalweg.report.explain.svg import draw
from thalweg.report.explain.terminal import heading, render
from thalweg.report.loss_plot import Course, Training, draw_comparison, draw_trainings

__all__ = [
    "MOST_WORKERS_DRAWN",
    "Course",
    "Explanation",
    "Scene",
    "Training",
    "draw",
    "draw_comparison",
    "draw_trainings",
    "explain",
    "first_step",
    "heading",
    "render",
    "rows",
    "settings",
]
