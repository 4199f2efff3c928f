"""What a connection knows of the other end, also after that has moved."""

from __future__ import annotations

import socket
from time import monotonic, sleep

import numpy as np
import pytest
import torch.distributed as dist

from tests.transports.ranks import LABEL, in_a_process, soon
from tests.transports.strangers import Receiver
from thalweg.transports import TcpTransport
from thalweg.transports.connection import Inbound, Outbound, Outgoing, Received
from thalweg.transports.peer_record import PeerRecord
from thalweg.transports.security import SecurityConfig
from thalweg.transports.tcp import TCP_PURPOSE
from thalweg.transports.transport import Array, Landing


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
        while outbound.down_since is None:
            assert monotonic() < deadline
            sleep(0.01)
        second = Receiver(1)
        here.send(1, LABEL, np.array([2]), soon())  # for where it was
        assert here._wire.endpoint.move(outbound, second.record)
        here.send(1, LABEL, np.array([3]), soon())
        assert second.message()[1] == np.array([3]).tobytes()
        until = monotonic() + 1.0
        while monotonic() < until:
            assert outbound.down_since is None
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


@pytest.mark.parametrize("nbytes", [1000, 100_000])
@pytest.mark.parametrize("placed", [False, True])
def test_only_a_target_that_was_chosen_is_detached_from_a_message(
    nbytes: int, placed: bool
) -> None:
    """A message in memory of its own may belong to the membership epoch that begins: it arrives
    whole, although half of it was read before. A chosen target is not written to any more."""
    sender, receiver = socket.socketpair()
    receiver.setblocking(False)
    target = np.zeros(nbytes, np.uint8)
    sent = (np.arange(nbytes) % 251 + 1).astype(np.uint8)
    messages: list[Received] = []

    def place(rank: int, header: bytes, size: int) -> Landing | None:
        return Landing(target) if placed else None

    inbound = Inbound(receiver, 1, None, 8)
    sender.sendall(nbytes.to_bytes(8, "little") + sent[: nbytes // 2].tobytes())
    assert inbound.read(messages, place)
    begun: Array = target.copy()
    inbound.detach_target()
    sender.sendall(sent[nbytes // 2 :].tobytes())
    assert inbound.read(messages, place)
    [message] = messages
    if placed:
        assert begun.any()
        np.testing.assert_array_equal(target, begun)
    else:
        np.testing.assert_array_equal(message.array, sent)
    sender.close()
    receiver.close()
