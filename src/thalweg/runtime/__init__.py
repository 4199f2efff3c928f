"""Running rounds on a transport."""

from thalweg.runtime.execute import View, execute, flat
from thalweg.runtime.threads import run_threads

__all__ = ["View", "execute", "flat", "run_threads"]
