"""Bytes between ranks."""

from thalweg.transports.c10d import C10dTransport
from thalweg.transports.faulty import Effect, Fault, FaultyTransport
from thalweg.transports.memory import MemoryNetwork, MemoryTransport
from thalweg.transports.recorded import Message, RecordedTransport
from thalweg.transports.refusal import Refusal
from thalweg.transports.transport import SENT, Address, Array, Label, Sending, Transport
from thalweg.transports.zeromq import ZeroMqTransport

__all__ = [
    "SENT",
    "Address",
    "Array",
    "C10dTransport",
    "Effect",
    "Fault",
    "FaultyTransport",
    "Label",
    "MemoryNetwork",
    "MemoryTransport",
    "Message",
    "RecordedTransport",
    "Refusal",
    "Sending",
    "Transport",
    "ZeroMqTransport",
]
