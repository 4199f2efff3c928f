"""Measuring a cluster: round trips, racks, NICs, uplinks."""

from thalweg.probing.measuring import measure, probe
from thalweg.probing.result import Probed

__all__ = ["Probed", "measure", "probe"]
