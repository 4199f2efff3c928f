"""Checks of a set-up before training; each ends in one line that says what to do."""

from thalweg.doctor.finding import Finding

__all__ = ["Finding"]
