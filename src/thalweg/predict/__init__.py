"""What synchronising would cost, reckoned before anything is run."""

from thalweg.predict.cost import Cost, best_chunks
from thalweg.predict.symbols import Symbols
from thalweg.predict.synchronisation import synchronisation_seconds

__all__ = ["Cost", "Symbols", "best_chunks", "synchronisation_seconds"]
