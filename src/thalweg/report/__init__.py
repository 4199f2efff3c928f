"""Reports for people: explanations of plans, pages, drawings, plots and traces."""

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

__all__ = [
    "MAX_DRAWN_WORKERS",
    "Explanation",
    "Scene",
    "draw",
    "explain",
    "first_step",
    "plan_title",
    "render",
    "rows",
    "settings",
]
