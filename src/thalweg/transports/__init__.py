"""Bytes between ranks."""

from thalweg.transports.memory import MemoryNetwork, MemoryTransport
from thalweg.transports.recorded import Message, RecordedTransport
from thalweg.transports.rejections import Refusal
from thalweg.transports.tcp import TcpTransport
from thalweg.transports.transport import (
    SENT,
    Address,
    Array,
    Label,
    Landing,
    Landings,
    Sending,
    Transport,
)

__all__ = [
    "SENT",
    "Address",
    "Array",
    "Label",
    "Landing",
    "Landings",
    "MemoryNetwork",
    "MemoryTransport",
    "Message",
    "RecordedTransport",
    "Refusal",
    "Sending",
    "TcpTransport",
    "Transport",
]
