"""attach(): an ordinary training script, synchronised under any plan."""

from thalweg.training.attaching import attach
from thalweg.training.handover import Stateful
from thalweg.training.run import Run

__all__ = ["Run", "Stateful", "attach"]
