"""What Thalweg shows: explanations, drawings."""

from thalweg.report.document import rows, settings
from thalweg.report.explanation import MOST_WORKERS_DRAWN, Explanation, Scene, explain, first_step
from thalweg.report.svg import draw
from thalweg.report.terminal import heading, render
from thalweg.report.training import Course, Training, draw_comparison, draw_trainings

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
