"""What ZeroMQ is there for: strangers, full queues, peers that go and come back."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

import numpy as np
import pytest
import torch.distributed as dist
import zmq

from tests.transports.ranks import LABEL, hear, in_a_process, soon, tell
from thalweg.errors import PeerLate, PeerLost, TransportError
from thalweg.transports import Address, Label, Refusal, ZeroMqTransport
from thalweg.transports.card import Card
from thalweg.transports.protection import Protection
from thalweg.transports.zeromq import HEADER, MAGIC, PURPOSE, VERSION

LARGE = np.arange(500_000)
GRACE = 0.5


class Opener:
    """Of transports, plain ones or under CURVE."""

    def __init__(self, *, curve: bool) -> None:
        self._curve = curve

    def at(self, store: dist.Store, rank: int) -> ZeroMqTransport:
        secret = b"known to all of them" if self._curve else None
        protection = Protection(curve=self._curve, secret=secret)
        return ZeroMqTransport(rank, store, grace=GRACE, protection=protection)

    @contextmanager
    def __call__(self, *ranks: int) -> Iterator[tuple[dist.HashStore, dict[int, ZeroMqTransport]]]:
        """Several in one process; those that a test puts in their place are closed as well."""
        store = dist.HashStore()
        opened = {rank: self.at(store, rank) for rank in ranks}
        try:
            yield store, opened
        finally:
            for transport in opened.values():
                transport.close()


@pytest.fixture(params=[False, True], ids=["plain", "curve"])
def transports(request: pytest.FixtureRequest) -> Opener:
    return Opener(curve=request.param)


plain = Opener(curve=False)


def endpoint(store: dist.HashStore, rank: int) -> str:
    card = Protection().sealer(PURPOSE).read(store.get(f"zeromq/{rank}"))
    assert card is not None
    return card.endpoint


def header(sender: int = 1, magic: bytes = MAGIC, version: int = VERSION, nbytes: int = 1) -> bytes:
    return HEADER.pack(magic, version, 0, sender, 0, *LABEL, nbytes)


def exchange(one: ZeroMqTransport, other: ZeroMqTransport) -> None:
    """Something large and something small, both ways."""
    for source, target in ((one, other), (other, one)):
        for array in (LARGE, np.array([7])):
            sending = source.send(target.rank, LABEL, array, soon())
            came = target.receive(source.rank, LABEL, soon())
            np.testing.assert_array_equal(came.view(array.dtype), array)
            sending.wait(soon())


def test_strangers_are_ignored() -> None:
    def work() -> None:
        with plain(0, 1) as (store, ranks):
            exchange(ranks[0], ranks[1])
            host, port = endpoint(store, 0).removeprefix("tcp://").split(":")
            raw = []
            for garbage in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100_000, bytes(1000)):
                raw.append(socket.create_connection((host, int(port)), timeout=5))
                raw[-1].sendall(garbage)
            raw[0].close()
            stranger = zmq.Context()
            push = stranger.socket(zmq.PUSH)
            push.connect(endpoint(store, 0))
            for frames in (
                [b""],
                [b"hello"],
                [header()],
                [header()[:-1], b"x"],
                [header() + b"\0", b"x"],
                [header(version=VERSION + 1), b"x"],
                [header(magic=b"wltr"), b"x"],
                [header(), b"x", b"y"],
                [header(nbytes=2), b"x"],
                [header(nbytes=1 << 60), b"x"],
                [b"", header(), b"x"],
            ):
                push.send_multipart(frames)
            last = b"the last, so that the others have come"
            push.send_multipart([header(9, nbytes=len(last)), last])
            ranks[0].receive(9, LABEL, soon())
            with pytest.raises(PeerLate):
                ranks[0].receive(1, LABEL, monotonic() + 0.05)
            assert ranks[0].refused == {
                **ranks[0].refused,
                Refusal.MALFORMED: 8,
                Refusal.TRUNCATED: 2,
                Refusal.TOO_LARGE: 1,
            }
            exchange(ranks[0], ranks[1])
            push.close(0)
            stranger.term()
            for connection in raw:
                connection.close()

    in_a_process(work)


def test_a_peer_that_is_back_elsewhere_is_found(transports: Opener) -> None:
    def work() -> None:
        with transports(0, 1) as (store, ranks):
            exchange(ranks[0], ranks[1])
            for _ in range(3):
                ranks[1].close()
                ranks[1] = transports.at(store, 1)
                tell(ranks[1], 0)
                hear(ranks[0], 1)
                exchange(ranks[0], ranks[1])

    in_a_process(work)


def test_a_connection_that_breaks_comes_back() -> None:
    """To the same address: what was queued meanwhile arrives too."""

    def work() -> None:
        with plain(0) as (store, ranks):
            context = zmq.Context()
            first = context.socket(zmq.PULL)
            port = first.bind_to_random_port("tcp://127.0.0.1")
            there = Card(rank=1, endpoint=f"tcp://127.0.0.1:{port}", key=b"")
            store.set("zeromq/1", Protection().sealer(PURPOSE).write(there))
            ranks[0].send(1, LABEL, np.array([1]), soon())
            assert first.poll(10_000)
            first.close(0)
            context.term()
            ranks[0].send(1, LABEL, np.array([2]), soon())
            context = zmq.Context()
            second = context.socket(zmq.PULL)
            second.bind(f"tcp://127.0.0.1:{port}")
            assert second.poll(10_000)
            assert np.frombuffer(second.recv_multipart()[1], "i8")[0] == 2
            second.close(0)
            context.term()

    in_a_process(work)


def test_who_waits_for_one_that_is_gone_is_told(transports: Opener) -> None:
    """Whether it ever sent to it or not."""

    def work() -> None:
        with transports(0, 1, 2) as (_, ranks):
            exchange(ranks[0], ranks[2])
            tell(ranks[2], 1)  # rank 1 only hears of it
            hear(ranks[1], 2)
            ranks[2].close()
            for rank in (0, 1):
                text = rf"rank {rank} lost its connection to rank 2 .* ago; look at what happened"
                with pytest.raises(PeerLost, match=text) as caught:
                    ranks[rank].receive(2, LABEL, soon())
                assert caught.value.peer == 2
            exchange(ranks[0], ranks[1])  # the others go on

    in_a_process(work)


def send_on_and_on(rank: ZeroMqTransport, peer: int) -> None:
    """What is on its way when a connection breaks is lost, so the first may seem to have left."""
    while True:
        rank.send(peer, LABEL, LARGE, soon()).wait(soon())


def test_who_sends_to_one_that_is_gone_is_told(transports: Opener) -> None:
    def work() -> None:
        with transports(0, 1) as (store, ranks):
            exchange(ranks[0], ranks[1])
            ranks[1].close()
            with pytest.raises(PeerLost, match="to rank 1"):
                send_on_and_on(ranks[0], 1)
            with pytest.raises(PeerLost, match="to rank 1"):
                ranks[0].send(1, LABEL, LARGE, soon())
            ranks[1] = transports.at(store, 1)
            exchange(ranks[0], ranks[1])

    in_a_process(work)


def test_one_that_is_gone_harms_nobody_who_does_not_need_it(transports: Opener) -> None:
    """Ranks close one after the other at the end of a run."""

    def work() -> None:
        with transports(0, 1, 2) as (_, ranks):
            exchange(ranks[0], ranks[1])
            exchange(ranks[0], ranks[2])
            ranks[2].close()
            with pytest.raises(PeerLate, match="for rank 1"):
                ranks[0].receive(1, LABEL, monotonic() + GRACE + 0.5)
            exchange(ranks[0], ranks[1])

    in_a_process(work)


def test_what_a_dead_peer_sent_before_is_taken_first(transports: Opener) -> None:
    def work() -> None:
        with transports(0, 1) as (_, ranks):
            for value in range(3):
                ranks[1].send(0, LABEL, np.array([value]), soon())
            tell(ranks[1], 0)
            hear(ranks[0], 1)
            ranks[1].close()
            for value in range(3):
                assert ranks[0].receive(1, LABEL, soon()).view("i8")[0] == value

    in_a_process(work)


@pytest.mark.parametrize("nbytes", [1000, 100_000])
def test_queues_are_bounded(nbytes: int, transports: Opener) -> None:
    """Who never takes anything in makes the sender wait, and late in the end."""

    def work() -> dict[str, int]:
        with transports(0, 1) as (_, ranks):
            sent = 0

            def send_for_ever() -> None:
                nonlocal sent
                while True:
                    ranks[0].send(1, LABEL, np.zeros(nbytes, np.uint8), monotonic() + 0.5)
                    sent += 1

            with pytest.raises(PeerLate, match="for rank 1"):
                send_for_ever()
            for _ in range(sent):  # and none of it is lost
                ranks[1].receive(0, LABEL, soon())
            exchange(ranks[0], ranks[1])
            return {"sent": sent}

    assert 256 <= in_a_process(work)["sent"] <= 2 * 256 + 20_000_000 // nbytes


def test_a_rank_that_never_opens_is_late(transports: Opener) -> None:
    def work() -> None:
        with transports(0) as (_, ranks):
            for call in (
                lambda: ranks[0].send(1, Label(4, 0, 0, 1), LARGE, monotonic() + 0.2),
                lambda: ranks[0].receive(1, Label(4, 0, 0, 1), monotonic() + 0.4),
            ):
                with pytest.raises(PeerLate, match="rank 0 waited at step 4, round 0, for rank 1"):
                    call()

    in_a_process(work)


def test_a_store_that_is_gone_does_not_hide_a_peer_that_is(transports: Opener) -> None:
    def work() -> None:
        master = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        clients = [dist.TCPStore("127.0.0.1", master.port) for _ in range(2)]
        ranks = [transports.at(client, rank) for rank, client in enumerate(clients)]
        exchange(*ranks)
        del master
        ranks[1].close()
        with pytest.raises(PeerLost, match="to rank 1"):
            ranks[0].receive_any([Address(1, LABEL)], soon())
        ranks[0].close()

    in_a_process(work)


def test_an_address_that_is_not_here() -> None:
    def work() -> None:
        with pytest.raises(TransportError, match=r"rank 3 can't listen on 192\.0\.2\.1: .*; name"):
            ZeroMqTransport(3, dist.HashStore(), "192.0.2.1")

    in_a_process(work)
