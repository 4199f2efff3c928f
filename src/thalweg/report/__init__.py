"""What Thalweg shows: explanations, drawings."""

from thalweg.report.explanation import MOST_WORKERS_DRAWN, Explanation, Scene, explain, first_step
from thalweg.report.svg import draw
from thalweg.report.terminal import heading, render

__all__ = [
    "MOST_WORKERS_DRAWN",
    "Explanation",
    "Scene",
    "draw",
    "explain",
    "first_step",
    "heading",
    "render",
]
