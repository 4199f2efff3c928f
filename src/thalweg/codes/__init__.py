"""Gradient codes: the full sum from any quorum."""

from thalweg.codes.code import CodeFamily

__all__ = ["CodeFamily"]
