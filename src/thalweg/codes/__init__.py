"""Gradient codes: the full sum from any quorum, at one parent or in a tree."""

from thalweg.codes.allocation import Allocation, allocate, refuse_inaccurate
from thalweg.codes.tree import TREE_ROOT, CodedTree, CodeFamily

__all__ = ["TREE_ROOT", "Allocation", "CodeFamily", "CodedTree", "allocate", "refuse_inaccurate"]
