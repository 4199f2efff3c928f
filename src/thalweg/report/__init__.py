"""What Thalweg shows: explanations, drawings."""

from thalweg.report.explanation import Explanation, Scene, explain
from thalweg.report.svg import draw
from thalweg.report.terminal import render

__all__ = ["Explanation", "Scene", "draw", "explain", "render"]
