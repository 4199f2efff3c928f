"""Gradient codes: the full sum from any quorum, at one parent or in a tree."""

from thalweg.codes.allocation import Allocation, allocate, refuse_inaccurate
from thalweg.codes.code import CodeFamily
from thalweg.codes.tree import ROOT, Branches

__all__ = ["ROOT", "Allocation", "Branches", "CodeFamily", "allocate", "refuse_inaccurate"]
