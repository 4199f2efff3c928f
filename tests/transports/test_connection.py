"""What a connection knows of the other end, also after that has moved."""

from __future__ import annotations

import socket
from time import monotonic, sleep

import numpy as np
import torch.distributed as dist

from tests.transports.ranks import LABEL, in_a_process, soon
from tests.transports.strangers import Receiver
from thalweg.transports import TcpTransport
from thalweg.transports.connection import Outbound, Outgoing
from thalweg.transports.peer_record import PeerRecord
from thalweg.transports.security import SecurityConfig
from thalweg.transports.tcp import TCP_PURPOSE


def test_failures_at_the_former_address_of_a_peer_do_not_count() -> None:
    """The old address is tried again and again; that nobody is there is no news of the new one."""

    def work() -> None:
        store = dist.HashStore()
        here, first = TcpTransport(0, store), Receiver(1)
        store.set("tcp/1", SecurityConfig().signer(TCP_PURPOSE).write(first.record))
        here.send(1, LABEL, np.array([1]), soon())
        first.message()
        first.close()
        outbound, deadline = here._wire.outbound[1], soon()
        while not outbound.down:
            assert monotonic() < deadline
            sleep(0.01)
        second = Receiver(1)
        here.send(1, LABEL, np.array([2]), soon())  # for where it was
        assert here._wire.endpoint.move(outbound, second.record)
        here.send(1, LABEL, np.array([3]), soon())
        assert second.message()[1] == np.array([3]).tobytes()
        until = monotonic() + 1.0
        while monotonic() < until:
            assert not outbound.down
            sleep(0.01)
        second.close()
        here.close()

    in_a_process(work)


def test_a_message_is_done_once_its_last_byte_was_taken() -> None:
    """Not before: its memory may be changed then."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
        outbound = Outbound(PeerRecord(rank=1, endpoint="tcp://127.0.0.1:9", key=b""))
        outbound.up(ours, None)
        sent = [Outgoing(b"h" * 8, memoryview(bytes([n]) * 300_000)) for n in range(3)]
        outbound.queue.extend(sent)
        came = bytearray()
        while not outbound.flush():
            assert not sent[-1].done
            came += theirs.recv(50_000)
        assert all(message.done for message in sent)
        while len(came) < 3 * 300_008:
            came += theirs.recv(1 << 20)
        assert came == b"".join(b"h" * 8 + bytes([n]) * 300_000 for n in range(3))
