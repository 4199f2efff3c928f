"""Clusters out of network namespaces: real addresses, links and faults on one machine."""

from thalweg.lab.event import Event
from thalweg.lab.lab import Lab, sweep, take_down

__all__ = ["Event", "Lab", "sweep", "take_down"]
