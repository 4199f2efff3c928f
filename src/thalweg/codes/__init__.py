"""Gradient codes: the full sum from any quorum, at one parent or in a tree."""

from thalweg.codes.allocation import Allocation, allocate, refuse_inaccurate
from thalweg.codes.tree import ROOT, Branches, CodeFamily

__all__ = ["ROOT", "Allocation", "Branches", "CodeFamily", "allocate", "refuse_inaccurate"]
