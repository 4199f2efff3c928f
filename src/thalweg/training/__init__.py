"""attach(): an ordinary training script, synchronised under any plan."""

from thalweg.training.attaching import attach
from thalweg.training.run import Run
from thalweg.training.stateful import Stateful

__all__ = ["Run", "Stateful", "attach"]
