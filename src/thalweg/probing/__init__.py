"""Measurement of a cluster: round trips, racks, NICs and uplinks."""

from thalweg.probing.result import ProbeResult
from thalweg.probing.survey import measure, probe, refuse_other_transports

__all__ = ["ProbeResult", "measure", "probe", "refuse_other_transports"]
