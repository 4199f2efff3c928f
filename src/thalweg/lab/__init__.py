"""Clusters out of network namespaces: real addresses, links and faults on one machine."""

from thalweg.lab.event import Event

__all__ = ["Event"]
