"""Looking at a set-up before training does: each check ends in one line that says what to do."""

from thalweg.doctor.finding import Finding

__all__ = ["Finding"]
