"""attach(): an ordinary training script, synchronised under any plan."""

from thalweg.training.api import attach
from thalweg.training.run import Run
from thalweg.training.snapshot import Stateful

__all__ = ["Run", "Stateful", "attach"]
