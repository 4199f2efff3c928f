"""Messages between ranks: never waited for, lost where nobody takes them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from threading import Timer
from time import monotonic

import numpy as np
import pytest
import torch.distributed as dist

from tests.transports.ranks import PATIENCE, soon
from tests.transports.strangers import Eavesdropper, calling, strange_identity
from thalweg.errors import PeerLost, TransportError
from thalweg.transports import RejectionReason
from thalweg.transports.best_effort import (
    POST_HEADER_STRUCT,
    POST_PURPOSE,
    BestEffortMessage,
    BestEffortTransport,
    MessageKind,
)
from thalweg.transports.security import SecurityConfig


class Opener:
    """Of posts, plain or encrypted ones."""

    def __init__(self, *, encrypted: bool) -> None:
        self._encrypted = encrypted

    def at(
        self, store: dist.Store, rank: int, queue: int = 64, room: str = ""
    ) -> BestEffortTransport:
        secret = b"known to all of them" if self._encrypted else None
        security = SecurityConfig(encrypted=self._encrypted, secret=secret)
        return BestEffortTransport(rank, store, queue=queue, security=security, namespace=room)

    @contextmanager
    def __call__(self, number: int, queue: int = 64) -> Iterator[list[BestEffortTransport]]:
        """Which have met."""
        store = dist.HashStore()
        with ExitStack() as stack:
            made = [self.at(store, rank, queue) for rank in range(number)]
            for transport in made:
                stack.callback(transport.close)
            for transport in made:
                transport.wait_for_peers(
                    [peer.rank for peer in made if peer is not transport], soon()
                )
            yield made


@pytest.fixture(params=[False, True], ids=["plain", "encrypted"])
def opener(request: pytest.FixtureRequest) -> Opener:
    return Opener(encrypted=request.param)


plain = Opener(encrypted=False)


def received(transport: BestEffortTransport, number: int) -> list[BestEffortMessage]:
    messages: list[BestEffortMessage] = []
    deadline = monotonic() + PATIENCE
    while len(messages) < number:
        assert monotonic() < deadline, messages
        messages += transport.receive(0.1)
    return messages


@pytest.mark.parametrize("elements", [0, 1, 1000, 100_000])
def test_a_message_is_what_was_sent(elements: int, opener: Opener) -> None:
    array = np.random.default_rng(0).standard_normal(elements)
    with opener(2) as (here, there):
        assert here.send(BestEffortMessage(1, MessageKind.ANSWER, 1 << 40, 3, 4, array))
        [message] = received(there, 1)
        assert message[:5] == (0, MessageKind.ANSWER, 1 << 40, 3, 4)
        assert message.array is not None
        np.testing.assert_array_equal(message.array.view(float), array)
        here.send(BestEffortMessage(1, MessageKind.REQUEST_PARTIAL, 7))
        assert received(there, 1) == [BestEffortMessage(0, MessageKind.REQUEST_PARTIAL, 7)]


@pytest.mark.parametrize("elements", [1000, 100_000])
def test_what_came_is_passed_on_as_it_is(elements: int, opener: Opener) -> None:
    """It can't be written to, and needn't be."""
    with opener(3) as (first, second, third):
        first.send(BestEffortMessage(1, MessageKind.RESULT, 0, array=np.arange(elements)))
        [came] = received(second, 1)
        second.send(came._replace(peer=2))
        [at_last] = received(third, 1)
        assert at_last.peer == 1
        assert at_last.array is not None
        np.testing.assert_array_equal(at_last.array.view(int), np.arange(elements))


def test_a_peer_that_takes_nothing_is_not_waited_for(opener: Opener) -> None:
    """Its queue fills, and what doesn't fit is lost; what it got is whole, and in order."""
    with opener(2, queue=8) as (here, there):
        array = np.zeros(1 << 20, np.uint8)
        sent = [
            here.send(BestEffortMessage(1, MessageKind.RESULT, step, array=array))
            for step in range(200)
        ]
        assert not all(sent)
        taken = [step for step, accepted in enumerate(sent) if accepted]
        came = received(there, len(taken))
        assert [message.step for message in came] == taken
        assert {message.array.nbytes for message in came if message.array is not None} == {1 << 20}


def test_one_that_is_gone_is_known_to_be(opener: Opener) -> None:
    with opener(2) as (here, there):
        here.send(BestEffortMessage(1, MessageKind.RESULT, 0))
        received(there, 1)
        assert not here.is_down(1)
        there.close()
        deadline = soon()
        while not here.is_down(1):
            assert monotonic() < deadline
            here.receive(0.05)
        assert here.seconds_down(1) >= 0
        assert not here.send(BestEffortMessage(1, MessageKind.RESULT, 0))
        assert not here.send(BestEffortMessage(5, MessageKind.RESULT, 0))  # was never there


def test_one_that_is_slow_to_come_gets_what_was_sent_before(opener: Opener) -> None:
    """Its address is known, and nobody is there yet."""
    store = dist.HashStore()
    with ExitStack() as stack:
        here, there = opener.at(store, 0), opener.at(store, 1)
        stack.callback(here.close)
        with socket.create_server(("127.0.0.1", 0)) as closes:
            port = closes.getsockname()[1]
        record = there._endpoint.record
        elsewhere = replace(record, endpoint=f"tcp://127.0.0.1:{port}")
        store.set("post/1", there._endpoint._signer.write(elsewhere))
        here.wait_for_peers([1], soon())
        deadline = soon()
        while not here.is_down(1):
            assert monotonic() < deadline
            here.receive(0.05)
        stack.callback(there.close)
        assert here.send(BestEffortMessage(1, MessageKind.RESULT, 7))
        relay = Eavesdropper(record.endpoint, port)
        stack.callback(relay.close)
        [came] = received(there, 1)
        assert came == BestEffortMessage(0, MessageKind.RESULT, 7)


def test_one_that_is_back_elsewhere_says_so(opener: Opener) -> None:
    store = dist.HashStore()
    with ExitStack() as stack:
        here, there = opener.at(store, 0), opener.at(store, 1)
        stack.callback(here.close)
        here.wait_for_peers([1], soon())
        there.wait_for_peers([0], soon())
        here.send(BestEffortMessage(1, MessageKind.RESULT, 0))
        received(there, 1)
        there.close()
        deadline = soon()
        while not here.is_down(1):
            here.send(BestEffortMessage(1, MessageKind.RESULT, 1))  # what waits for nobody
            assert monotonic() < deadline
            here.receive(0.05)
        back = opener.at(store, 1)
        stack.callback(back.close)
        assert back.endpoint != there.endpoint
        back.wait_for_peers([0], soon())
        back.send(back.hello(0))
        [hello] = received(here, 1)
        assert hello.kind is MessageKind.HELLO
        assert not here.is_down(1)
        assert here.send(BestEffortMessage(1, MessageKind.RESULT, 8))
        assert received(back, 1) == [BestEffortMessage(0, MessageKind.RESULT, 8)]
        for _ in range(50):  # no late news of the old address
            here.receive(0.02)
            assert not here.is_down(1)


def test_a_greeting_from_where_one_is_changes_nothing(opener: Opener) -> None:
    with opener(2) as (here, there):
        there.send(there.hello(0))
        received(here, 1)
        here.send(BestEffortMessage(1, MessageKind.RESULT, 0))
        assert len(received(there, 1)) == 1


def test_messages_for_another_namespace_or_rank_are_rejected(opener: Opener) -> None:
    """Ports are used again: who knows an old address may reach somebody else there. Such a
    connection is never let in."""
    with ExitStack() as stack:
        rooms = {
            room: [opener.at(store, rank, room=room) for rank in range(2)]
            for room, store in (("tree/0", dist.HashStore()), ("tree/9", dist.HashStore()))
        }
        for transport in (transport for made in rooms.values() for transport in made):
            stack.callback(transport.close)
        (old, _), (here, there) = rooms["tree/0"], rooms["tree/9"]
        old._wire.connect(there._endpoint.record)
        here._wire.connect(replace(there._endpoint.record, rank=7))  # it takes rank 1 for another
        here.wait_for_peers([1], soon())
        old.send(BestEffortMessage(1, MessageKind.RESULT, 3))
        here.send(BestEffortMessage(7, MessageKind.RESULT, 4))
        here.send(BestEffortMessage(1, MessageKind.RESULT, 5))
        assert [message.step for message in received(there, 1)] == [5]
        deadline = soon()
        while not (old.is_down(1) and here.is_down(7)) or there.refused[RejectionReason.FORGED] < 2:
            assert monotonic() < deadline
            assert there.receive(0.02) == []
        assert set(there.refused) == {RejectionReason.FORGED}


def test_what_is_not_a_message_is_dropped(opener: Opener) -> None:
    """Though its sender is a member; only what leaves no way to go on ends the connection."""
    unknown = POST_HEADER_STRUCT.pack(255, 0, 0, 0, 0, 1)
    hello = POST_HEADER_STRUCT.pack(MessageKind.HELLO, 1, 0, 0, 0, 1)
    without_array = POST_HEADER_STRUCT.pack(MessageKind.HELLO, 0, 0, 0, 0, 0)
    endless = POST_HEADER_STRUCT.pack(MessageKind.RESULT, 1, 0, 0, 0, 1 << 60)
    ours = POST_HEADER_STRUCT.pack(MessageKind.RESULT, 0, 8, 0, 0, 0)
    with (
        opener(2) as (here, there),
        calling(here._endpoint.identity, there._endpoint.record) as mad,
    ):
        mad.say(unknown, b"x")
        mad.say(hello, b"x")
        mad.say(without_array, b"")
        mad.say(ours, b"")
        assert received(there, 1) == [BestEffortMessage(0, MessageKind.RESULT, 8)]
        assert there.refused == {RejectionReason.MALFORMED: 1, RejectionReason.FORGED: 2}
        mad.say(endless, b"")
        here.send(BestEffortMessage(1, MessageKind.RESULT, 5))
        assert received(there, 1) == [BestEffortMessage(0, MessageKind.RESULT, 5)]
        deadline = soon()
        while RejectionReason.TOO_LARGE not in there.refused:
            assert monotonic() < deadline
            assert there.receive(0.02) == []
        assert mad.is_dropped()
        assert there.refused[RejectionReason.TOO_LARGE] == 1
        here.send(BestEffortMessage(1, MessageKind.RESULT, 6))
        assert received(there, 1) == [BestEffortMessage(0, MessageKind.RESULT, 6)]


def test_a_message_that_is_truncated_is_dropped(opener: Opener) -> None:
    header = POST_HEADER_STRUCT.pack(MessageKind.RESULT, 1, 0, 0, 0, 100)
    with opener(2) as (here, there):
        with calling(here._endpoint.identity, there._endpoint.record) as mad:
            mad.socket.sendall(header + bytes(50))
        deadline = soon()
        while not there.refused:
            assert monotonic() < deadline
            assert there.receive(0.02) == []
        assert there.refused == {RejectionReason.TRUNCATED: 1}


def test_a_transports_connection_is_none_of_the_posts() -> None:
    with plain(2) as (_, there):
        for purpose, is_let_in in ((POST_PURPOSE, True), ("tcp", False)):
            identity = strange_identity(0, encrypted=False, purpose=purpose)
            with calling(identity, there._endpoint.record) as caller:
                assert caller.let_in == is_let_in


def test_a_wait_ends_when_woken_or_in_time(opener: Opener) -> None:
    with opener(1) as [transport]:
        assert transport.receive(0.01) == []
        Timer(0.05, transport.wake).start()
        assert transport.receive(None) == []
        for _ in range(100_000):
            transport.wake()  # never waits
        transport.receive(1)
    transport.wake()  # nor after close
    transport.close()


def test_who_never_comes_is_named(opener: Opener) -> None:
    missing = r"rank 3 hasn't joined; is it running, with the same"
    with opener(1) as [transport], pytest.raises(PeerLost, match=missing):
        transport.wait_for_peers([3], monotonic() + 0.05)


def test_an_address_that_is_not_here() -> None:
    with pytest.raises(TransportError, match=r"rank 0 can't listen on 192.0.2.1: .*; name another"):
        BestEffortTransport(0, dist.HashStore(), "192.0.2.1")
