"""Whether anybody is at the other end of a connection, also after that has moved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import monotonic, sleep

import pytest
import zmq

from tests.transports.ranks import soon
from thalweg.transports.card import Card
from thalweg.transports.connection import Connection

Context = zmq.Context[zmq.Socket[bytes]]


@pytest.fixture
def context() -> Iterator[Context]:
    made: Context = zmq.Context()
    yield made
    made.destroy(linger=0)


def listener(context: Context) -> tuple[zmq.Socket[bytes], Card]:
    socket = context.socket(zmq.PULL)
    endpoint = f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"
    return socket, Card(rank=1, endpoint=endpoint, key=b"")


def heard(connection: Connection, so: Callable[[], bool]) -> None:
    deadline = soon()
    while not so():
        assert monotonic() < deadline
        connection.hear()
        sleep(0.01)


def test_news_of_where_the_peer_was_before_do_not_count(context: Context) -> None:
    """The old address is tried for a while; that nobody is there is no news of the new one."""
    first, here = listener(context)
    second, elsewhere = listener(context)
    connection = Connection(context, here)
    connection.socket.send(b"")
    first.recv()
    first.close(linger=0)
    heard(connection, lambda: connection.down)
    sleep(0.2)
    connection.socket.send(b"lost", zmq.NOBLOCK)
    assert connection.move_to(elsewhere)
    assert not connection.down
    until = monotonic() + 1.0
    while monotonic() < until:
        connection.hear()
        assert not connection.down
        sleep(0.01)
    connection.close(linger=0)
    second.close(linger=0)
