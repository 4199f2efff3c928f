"""Transports: messages between ranks over TCP or within a process."""

from thalweg.transports.memory import MemoryNetwork, MemoryTransport
from thalweg.transports.rejections import RejectionReason
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
from thalweg.transports.wrapping import RecordedMessage, RecordedTransport, wrapping_transports

__all__ = [
    "SENT",
    "Address",
    "Array",
    "Label",
    "Landing",
    "Landings",
    "MemoryNetwork",
    "MemoryTransport",
    "RecordedMessage",
    "RecordedTransport",
    "RejectionReason",
    "Sending",
    "TcpTransport",
    "Transport",
    "wrapping_transports",
]
