"""Measuring a cluster: round trips, racks, NICs, uplinks."""

from thalweg.probing.api import measure, probe, refuse_other_transports
from thalweg.probing.result import ProbeResult

__all__ = ["ProbeResult", "measure", "probe", "refuse_other_transports"]
