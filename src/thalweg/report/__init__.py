"""What Thalweg shows: explanations, drawings."""

from thalweg.report.explain.json_rows import rows, settings
from thalweg.report.explain.step_view import (
    MAX_DRAWN_WORKERS,
    Explanation,
    Scene,
    explain,
    first_step,
)
from thalweg.report.explain.svg import draw
from thalweg.report.explain.terminal import plan_title, render
from thalweg.report.loss_plot import Training, TrainingCurve, draw_comparison, draw_trainings

__all__ = [
    "MAX_DRAWN_WORKERS",
    "Explanation",
    "Scene",
    "Training",
    "TrainingCurve",
    "draw",
    "draw_comparison",
    "draw_trainings",
    "explain",
    "first_step",
    "plan_title",
    "render",
    "rows",
    "settings",
]
