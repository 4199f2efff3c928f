"""Gradient codes: the full sum from any quorum."""

from thalweg.codes.code import CodeFamily, ParentCode

__all__ = ["CodeFamily", "ParentCode"]
