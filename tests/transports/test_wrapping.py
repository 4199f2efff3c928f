"""A wrapper is in force inside its block, and nowhere else."""

from __future__ import annotations

from threading import Thread

from thalweg.transports import MemoryNetwork, RecordedTransport, wrapping_transports
from thalweg.transports.wrapping import wrapped


def test_transports_are_wrapped_inside_the_block_alone() -> None:
    transport = MemoryNetwork([0]).transport(0)
    assert wrapped(transport) is transport
    with wrapping_transports(RecordedTransport):
        assert isinstance(wrapped(transport), RecordedTransport)
        elsewhere = []
        thread = Thread(target=lambda: elsewhere.append(wrapped(transport)))
        thread.start()
        thread.join()
        assert elsewhere == [transport]
    assert wrapped(transport) is transport
