"""Bytes between ranks."""

from thalweg.transports.memory import MemoryNetwork, MemoryTransport
from thalweg.transports.transport import Address, Array, Label, Transport

__all__ = ["Address", "Array", "Label", "MemoryNetwork", "MemoryTransport", "Transport"]
