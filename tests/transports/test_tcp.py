"""What there is between processes: strangers, full queues, peers that go and come back."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import monotonic, sleep

import numpy as np
import pytest
import torch.distributed as dist

from tests.transports.ranks import LABEL, hear, in_a_process, next_message, soon, tell
from tests.transports.strangers import Receiver, calling, port_of, strange_identity
from thalweg.errors import PeerLate, PeerLost, TransportError
from thalweg.transports import Address, Label, RejectionReason, TcpTransport, endpoint
from thalweg.transports.handshake import WIRE_MAGIC, WIRE_PREFIX_STRUCT, WIRE_VERSION, Hello
from thalweg.transports.peer_record import PeerRecord
from thalweg.transports.security import SecurityConfig
from thalweg.transports.tcp import TCP_HEADER_STRUCT, TCP_PURPOSE

LARGE = np.arange(500_000)
GRACE = 0.5


class Opener:
    """Of transports, plain or encrypted ones."""

    def __init__(self, *, encrypted: bool) -> None:
        self._encrypted = encrypted

    def at(self, store: dist.Store, rank: int) -> TcpTransport:
        secret = b"known to all of them" if self._encrypted else None
        security = SecurityConfig(encrypted=self._encrypted, secret=secret)
        return TcpTransport(rank, store, grace=GRACE, security=security)

    @contextmanager
    def __call__(self, *ranks: int) -> Iterator[tuple[dist.HashStore, dict[int, TcpTransport]]]:
        """Several in one process; those that a test puts in their place are closed as well."""
        store = dist.HashStore()
        opened = {rank: self.at(store, rank) for rank in ranks}
        try:
            yield store, opened
        finally:
            for transport in opened.values():
                transport.close()


@pytest.fixture(params=[False, True], ids=["plain", "encrypted"])
def transports(request: pytest.FixtureRequest) -> Opener:
    return Opener(encrypted=request.param)


plain = Opener(encrypted=False)


def record_of(store: dist.HashStore, rank: int) -> PeerRecord:
    found = SecurityConfig().signer(TCP_PURPOSE).read(store.get(f"tcp/{rank}"))
    assert found is not None
    return found


def header(nbytes: int) -> bytes:
    return TCP_HEADER_STRUCT.pack(0, *LABEL, nbytes)


def until(so: Callable[[], bool]) -> None:
    deadline = soon()
    while not so():
        assert monotonic() < deadline
        sleep(0.01)


def exchange(one: TcpTransport, other: TcpTransport) -> None:
    """Something large and something small, both ways."""
    for source, target in ((one, other), (other, one)):
        for array in (LARGE, np.array([7])):
            sending = source.send(target.rank, LABEL, array, soon())
            came = next_message(target, source.rank, LABEL, soon())
            np.testing.assert_array_equal(came.view(array.dtype), array)
            sending.wait(soon())


def test_strangers_are_ignored() -> None:
    """Each is refused for what it is, before it has said anything that could be handed out."""

    def work() -> None:
        with plain(0, 1) as (store, ranks):
            exchange(ranks[0], ranks[1])
            here = record_of(store, 0)
            hello = Hello(strange_identity(1, encrypted=False), here).text
            elsewhere = Hello(strange_identity(1, encrypted=False), record_of(store, 1)).text
            for garbage in (
                b"",
                hello[: WIRE_PREFIX_STRUCT.size - 1],
                hello[:-1],
                b"GET / HTTP/1.1\r\n\r\n",
                b"\xff" * 100_000,
                bytes(1000),
                WIRE_PREFIX_STRUCT.pack(WIRE_MAGIC, WIRE_VERSION, 65535),
                WIRE_PREFIX_STRUCT.pack(WIRE_MAGIC, WIRE_VERSION + 1, 100),
                elsewhere,
            ):
                raw = socket.create_connection(port_of(here.endpoint), timeout=5)
                with raw, suppress(OSError):  # it may hang up before it has read all
                    raw.sendall(garbage)
            expected = {
                RejectionReason.UNFINISHED: 3,
                RejectionReason.STRANGER: 4,
                RejectionReason.MALFORMED: 1,
                RejectionReason.FORGED: 1,
            }
            until(lambda: sum(ranks[0].refused.values()) >= 9)
            assert ranks[0].refused == expected
            with pytest.raises(PeerLate):
                next_message(ranks[0], 1, LABEL, monotonic() + 0.05)
            exchange(ranks[0], ranks[1])

    in_a_process(work)


def test_who_says_who_it_is_is_believed_where_nothing_is_encrypted() -> None:
    def work() -> None:
        with plain(0, 1) as (store, ranks):
            with calling(strange_identity(9, encrypted=False), record_of(store, 0)) as ninth:
                ninth.say(header(5), b"hello")
                assert next_message(ranks[0], 9, LABEL, soon()).tobytes() == b"hello"
            assert not ranks[0].refused

    in_a_process(work)


def test_a_message_longer_than_memory_ends_its_connection_alone(transports: Opener) -> None:
    def work() -> None:
        with transports(0, 1) as (_, ranks):
            exchange(ranks[0], ranks[1])
            listening = ranks[1]._wire.endpoint
            with calling(listening.identity, ranks[0]._wire.endpoint.record) as mad:
                mad.say(header(1 << 60), b"x")
                with pytest.raises(PeerLate):
                    next_message(ranks[0], 1, LABEL, monotonic() + 0.2)
                assert mad.is_dropped()
            assert ranks[0].refused == {RejectionReason.TOO_LARGE: 1}
            exchange(ranks[0], ranks[1])
            assert not ranks[1]._wire.outbound[0].has_broken

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
            first = Receiver(1)
            store.set("tcp/1", SecurityConfig().signer(TCP_PURPOSE).write(first.record))
            ranks[0].send(1, LABEL, np.array([1]), soon())
            assert first.message() == (header(8), np.array([1]).tobytes())
            first.close()
            outbound = ranks[0]._wire.outbound[1]
            until(lambda: outbound.down_since is not None)
            for value in (2, 3):
                ranks[0].send(1, LABEL, np.array([value]), soon())
            second = Receiver(1, first.port)
            for value in (2, 3):
                assert second.message()[1] == np.array([value]).tobytes()
            until(lambda: outbound.down_since is None)
            assert outbound.has_broken
            second.close()

    in_a_process(work)


def test_waiting_for_one_that_is_gone_fails(transports: Opener) -> None:
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
                    next_message(ranks[rank], 2, LABEL, soon())
                assert caught.value.peer == 2
            exchange(ranks[0], ranks[1])  # the others go on

    in_a_process(work)


def send_on_and_on(rank: TcpTransport, peer: int) -> None:
    """What is on its way when a connection breaks is lost, so the first may seem to have left."""
    while True:
        rank.send(peer, LABEL, LARGE, soon()).wait(soon())


def test_sending_to_one_that_is_gone_fails(transports: Opener) -> None:
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
                next_message(ranks[0], 1, LABEL, monotonic() + GRACE + 0.5)
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
                assert next_message(ranks[0], 1, LABEL, soon()).view("i8")[0] == value

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
                next_message(ranks[1], 0, LABEL, soon())
            exchange(ranks[0], ranks[1])
            return {"sent": sent}

    assert 256 <= in_a_process(work)["sent"] <= 2 * 256 + 20_000_000 // nbytes


def test_a_rank_that_never_opens_is_late(transports: Opener) -> None:
    def work() -> None:
        with transports(0) as (_, ranks):
            for call in (
                lambda: ranks[0].send(1, Label(4, 0, 0, 1), LARGE, monotonic() + 0.2),
                lambda: next_message(ranks[0], 1, Label(4, 0, 0, 1), monotonic() + 0.4),
            ):
                with pytest.raises(
                    PeerLate, match=r"rank 0 timed out waiting for rank 1 \(step 4, round 0\)"
                ):
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


def test_strangers_that_are_rejected_while_they_send(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than there is room for: the oldest go, also those that just say something."""
    monkeypatch.setattr(endpoint, "ENDPOINT_BACKLOG_COUNT", 8)

    def work() -> None:
        with plain(0, 1) as (store, ranks):
            where = port_of(record_of(store, 0).endpoint)
            for _ in range(20):
                waiting = [socket.create_connection(where) for _ in range(8)]
                sleep(0.01)
                more = []
                for stranger in waiting:
                    with suppress(OSError):
                        stranger.send(b"t")
                    more.append(socket.create_connection(where))
                for stranger in (*waiting, *more):
                    stranger.close()
            exchange(ranks[0], ranks[1])
            assert ranks[0]._wire.endpoint._thread.is_alive()

    in_a_process(work)


def test_without_descriptors_it_goes_on_when_there_are_some() -> None:
    def work() -> None:
        with plain(0, 1) as (_, ranks):
            _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            held = []
            resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
            with suppress(OSError):
                while True:
                    held.append(socket.socket())
            ranks[0].send(1, LABEL, np.array([1]), soon())
            sleep(0.5)
            for each in held:
                each.close()
            assert next_message(ranks[1], 0, LABEL, soon()).view("i8")[0] == 1

    in_a_process(work)


def test_a_fork_neither_sends_nor_closes(transports: Opener) -> None:
    """It has the same keys and the same numbers of records."""

    def work() -> None:
        with transports(0, 1) as (_, ranks):
            exchange(ranks[0], ranks[1])
            child = os.fork()
            if not child:
                try:
                    ranks[0].send(1, LABEL, LARGE, soon())
                except TransportError as error:
                    ranks[0].close()
                    os._exit("from a fork" not in str(error))
                os._exit(2)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            exchange(ranks[0], ranks[1])

    in_a_process(work)


def test_an_address_that_is_not_here() -> None:
    def work() -> None:
        with pytest.raises(TransportError, match=r"rank 3 can't listen on 192\.0\.2\.1: .*; name"):
            TcpTransport(3, dist.HashStore(), "192.0.2.1")

    in_a_process(work)
