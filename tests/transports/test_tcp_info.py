"""On real connections of this process."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Thread
from time import monotonic, sleep

import pytest

from thalweg.transports.tcp_info import (
    DESCRIPTORS_PATH,
    TCP_INFO_OPTION,
    Connections,
    ConnectionTraffic,
    answers,
    plain,
)

pytestmark = pytest.mark.skipif(TCP_INFO_OPTION is None, reason="only Linux tells")
MEGABYTE = 1 << 20


@contextmanager
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as one,
        server.accept()[0] as other,
    ):
        yield one, other


def send(one: socket.socket, other: socket.socket, nbytes: int, pause: float = 0.0) -> None:
    """The receiver takes nothing in for a while."""

    def receive() -> None:
        sleep(pause)
        left = nbytes
        while left:
            left -= len(other.recv(min(left, 1 << 16)))

    thread = Thread(target=receive)
    thread.start()
    one.sendall(bytes(nbytes))
    thread.join()
    sleep(0.05)  # for the last acknowledgement


def of(sent: list[ConnectionTraffic], sock: socket.socket) -> ConnectionTraffic:
    [found] = [s for s in sent if s.port == sock.getpeername()[1]]
    return found


def test_bytes_and_time_are_counted() -> None:
    with connection() as (one, other):
        seen = Connections(frozenset())
        seen.look_at_all()
        send(one, other, 8 * MEGABYTE)
        found = of(seen.look_at_all(), one)
        assert found.address == "127.0.0.1"
        assert found.nbytes == 8 * MEGABYTE
        assert 0 <= found.busy < 5  # in units of the kernel's clock, some milliseconds
        assert 0 < found.round_trip < 1


def test_only_what_is_new() -> None:
    with connection() as (one, other):
        seen = Connections(frozenset())
        seen.look_at_all()
        for _ in range(2):
            send(one, other, MEGABYTE)
            assert of(seen.look_at_all(), one).nbytes == MEGABYTE
        assert [s for s in seen.look_at_all() if s.port == one.getpeername()[1]] == []


def test_those_that_much_goes_over_are_looked_at_in_between() -> None:
    with connection() as (one, other), connection() as (little, there):
        seen = Connections(frozenset())
        seen.look_at_all()
        send(one, other, MEGABYTE)
        send(little, there, 100)
        seen.look_at_all()
        assert seen.sent() == []  # from here on
        for _ in range(2):
            send(one, other, 2 * MEGABYTE)
            send(little, there, 100)
            assert [sent.nbytes for sent in seen.sent()] == [2 * MEGABYTE]
        seen.look_at_all()
        seen.look_at_all()  # nothing went over it meanwhile
        send(one, other, MEGABYTE)
        assert [sent.nbytes for sent in seen.sent()] == [MEGABYTE]


def test_a_receiver_that_is_late_is_not_taken_for_a_slow_link() -> None:
    with connection() as (one, other):
        seen = Connections(frozenset())
        seen.look_at_all()
        began = monotonic()
        send(one, other, 32 * MEGABYTE, pause=1.0)
        taken = monotonic() - began
        assert taken > 1.0
        assert of(seen.look_at_all(), one).busy < taken - 0.7


def test_this_host_is_no_other() -> None:
    with connection() as (one, other):
        seen = Connections(frozenset({"127.0.0.1"}))
        seen.look_at_all()
        send(one, other, MEGABYTE)
        assert seen.look_at_all() == []


def test_descriptors_stay_open_and_may_close_at_any_time() -> None:
    with connection() as (one, other):
        seen = Connections(frozenset())
        seen.look_at_all()
        send(one, other, MEGABYTE)
        seen.look_at_all()
        before = len(list(DESCRIPTORS_PATH.iterdir()))
        for _ in range(100):
            seen.look_at_all()
            seen.sent()
        assert len(list(DESCRIPTORS_PATH.iterdir())) == before
        other.close()
        one.close()
        assert seen.sent() == seen.look_at_all() == []


@pytest.mark.parametrize(
    ("address", "expected"),
    [("::ffff:10.0.0.1", "10.0.0.1"), ("fe80::1%eth0", "fe80::1"), ("10.0.0.1", "10.0.0.1")],
)
def test_plain(address: str, expected: str) -> None:
    assert plain(address) == expected


def test_a_receiver_without_room_answers() -> None:
    """For longer than it takes to give one up that doesn't."""
    with connection() as (one, _):
        one.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                one.send(bytes(MEGABYTE))
        until = monotonic() + 5.0
        while monotonic() < until:
            assert answers(one)
            sleep(0.1)
