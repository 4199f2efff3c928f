"""Letters between ranks: never waited for, lost where nobody takes them."""

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
from thalweg.transports import Refusal
from thalweg.transports.best_effort import HEADER, PURPOSE, Letter, Post, Sort
from thalweg.transports.security import Protection


class Opener:
    """Of posts, plain or encrypted ones."""

    def __init__(self, *, encrypted: bool) -> None:
        self._encrypted = encrypted

    def at(self, store: dist.Store, rank: int, queue: int = 64, room: str = "") -> Post:
        secret = b"known to all of them" if self._encrypted else None
        protection = Protection(encrypted=self._encrypted, secret=secret)
        return Post(rank, store, queue=queue, protection=protection, room=room)

    @contextmanager
    def __call__(self, number: int, queue: int = 64) -> Iterator[list[Post]]:
        """Which have met."""
        store = dist.HashStore()
        with ExitStack() as stack:
            made = [self.at(store, rank, queue) for rank in range(number)]
            for post in made:
                stack.callback(post.close)
            for post in made:
                post.meet([peer.rank for peer in made if peer is not post], soon())
            yield made


@pytest.fixture(params=[False, True], ids=["plain", "encrypted"])
def posts(request: pytest.FixtureRequest) -> Opener:
    return Opener(encrypted=request.param)


plain = Opener(encrypted=False)


def received(post: Post, number: int) -> list[Letter]:
    letters: list[Letter] = []
    deadline = monotonic() + PATIENCE
    while len(letters) < number:
        assert monotonic() < deadline, letters
        letters += post.receive(0.1)
    return letters


@pytest.mark.parametrize("elements", [0, 1, 1000, 100_000])
def test_a_letter_is_what_was_sent(elements: int, posts: Opener) -> None:
    array = np.random.default_rng(0).standard_normal(elements)
    with posts(2) as (here, there):
        assert here.send(Letter(1, Sort.ANSWER, 1 << 40, 3, 4, array))
        [letter] = received(there, 1)
        assert letter[:5] == (0, Sort.ANSWER, 1 << 40, 3, 4)
        assert letter.array is not None
        np.testing.assert_array_equal(letter.array.view(float), array)
        here.send(Letter(1, Sort.HURRY, 7))
        assert received(there, 1) == [Letter(0, Sort.HURRY, 7)]


@pytest.mark.parametrize("elements", [1000, 100_000])
def test_what_came_is_passed_on_as_it_is(elements: int, posts: Opener) -> None:
    """It can't be written to, and needn't be."""
    with posts(3) as (first, second, third):
        first.send(Letter(1, Sort.RESULT, 0, array=np.arange(elements)))
        [came] = received(second, 1)
        second.send(came._replace(peer=2))
        [at_last] = received(third, 1)
        assert at_last.peer == 1
        assert at_last.array is not None
        np.testing.assert_array_equal(at_last.array.view(int), np.arange(elements))


def test_a_peer_that_takes_nothing_is_not_waited_for(posts: Opener) -> None:
    """Its queue fills, and what doesn't fit is lost; what it got is whole, and in order."""
    with posts(2, queue=8) as (here, there):
        array = np.zeros(1 << 20, np.uint8)
        sent = [here.send(Letter(1, Sort.RESULT, step, array=array)) for step in range(200)]
        assert not all(sent)
        taken = [step for step, accepted in enumerate(sent) if accepted]
        came = received(there, len(taken))
        assert [letter.step for letter in came] == taken
        assert {letter.array.nbytes for letter in came if letter.array is not None} == {1 << 20}


def test_one_that_is_gone_is_known_to_be(posts: Opener) -> None:
    with posts(2) as (here, there):
        here.send(Letter(1, Sort.RESULT, 0))
        received(there, 1)
        assert not here.is_down(1)
        there.close()
        deadline = soon()
        while not here.is_down(1):
            assert monotonic() < deadline
            here.receive(0.05)
        assert here.seconds_down(1) >= 0
        assert not here.send(Letter(1, Sort.RESULT, 0))
        assert not here.send(Letter(5, Sort.RESULT, 0))  # was never there


def test_one_that_is_slow_to_come_gets_what_was_sent_before(posts: Opener) -> None:
    """Its address is known, and nobody is there yet."""
    store = dist.HashStore()
    with ExitStack() as stack:
        here, there = posts.at(store, 0), posts.at(store, 1)
        stack.callback(here.close)
        with socket.create_server(("127.0.0.1", 0)) as closes:
            port = closes.getsockname()[1]
        card = there._door.card
        elsewhere = replace(card, endpoint=f"tcp://127.0.0.1:{port}")
        store.set("post/1", there._door._sealer.write(elsewhere))
        here.meet([1], soon())
        deadline = soon()
        while not here.is_down(1):
            assert monotonic() < deadline
            here.receive(0.05)
        stack.callback(there.close)
        assert here.send(Letter(1, Sort.RESULT, 7))
        relay = Eavesdropper(card.endpoint, port)
        stack.callback(relay.close)
        [came] = received(there, 1)
        assert came == Letter(0, Sort.RESULT, 7)


def test_one_that_is_back_elsewhere_says_so(posts: Opener) -> None:
    store = dist.HashStore()
    with ExitStack() as stack:
        here, there = posts.at(store, 0), posts.at(store, 1)
        stack.callback(here.close)
        here.meet([1], soon())
        there.meet([0], soon())
        here.send(Letter(1, Sort.RESULT, 0))
        received(there, 1)
        there.close()
        deadline = soon()
        while not here.is_down(1):
            here.send(Letter(1, Sort.RESULT, 1))  # what waits for nobody
            assert monotonic() < deadline
            here.receive(0.05)
        back = posts.at(store, 1)
        stack.callback(back.close)
        assert back.endpoint != there.endpoint
        back.meet([0], soon())
        back.send(back.hello(0))
        [hello] = received(here, 1)
        assert hello.sort is Sort.HELLO
        assert not here.is_down(1)
        assert here.send(Letter(1, Sort.RESULT, 8))
        assert received(back, 1) == [Letter(0, Sort.RESULT, 8)]
        for _ in range(50):  # no late news of the old address
            here.receive(0.02)
            assert not here.is_down(1)


def test_a_greeting_from_where_one_is_changes_nothing(posts: Opener) -> None:
    with posts(2) as (here, there):
        there.send(there.hello(0))
        received(here, 1)
        here.send(Letter(1, Sort.RESULT, 0))
        assert len(received(there, 1)) == 1


def test_letters_for_another_room_or_rank_are_refused(posts: Opener) -> None:
    """Ports are used again: who knows an old address may reach somebody else there. Such a
    connection is never let in."""
    with ExitStack() as stack:
        rooms = {
            room: [posts.at(store, rank, room=room) for rank in range(2)]
            for room, store in (("tree/0", dist.HashStore()), ("tree/9", dist.HashStore()))
        }
        for post in (post for made in rooms.values() for post in made):
            stack.callback(post.close)
        (old, _), (here, there) = rooms["tree/0"], rooms["tree/9"]
        old._wire.connect(there._door.card)
        here._wire.connect(replace(there._door.card, rank=7))  # it takes rank 1 for another
        here.meet([1], soon())
        old.send(Letter(1, Sort.RESULT, 3))
        here.send(Letter(7, Sort.RESULT, 4))
        here.send(Letter(1, Sort.RESULT, 5))
        assert [letter.step for letter in received(there, 1)] == [5]
        deadline = soon()
        while not (old.is_down(1) and here.is_down(7)) or there.refused[Refusal.FORGED] < 2:
            assert monotonic() < deadline
            assert there.receive(0.02) == []
        assert set(there.refused) == {Refusal.FORGED}


def test_what_is_not_a_letter_is_dropped(posts: Opener) -> None:
    """Though its sender is a member; only what leaves no way to go on ends the connection."""
    unknown = HEADER.pack(255, 0, 0, 0, 0, 1)
    hello = HEADER.pack(Sort.HELLO, 1, 0, 0, 0, 1)
    without_array = HEADER.pack(Sort.HELLO, 0, 0, 0, 0, 0)
    endless = HEADER.pack(Sort.RESULT, 1, 0, 0, 0, 1 << 60)
    ours = HEADER.pack(Sort.RESULT, 0, 8, 0, 0, 0)
    with posts(2) as (here, there), calling(here._door._identity, there._door.card) as mad:
        mad.say(unknown, b"x")
        mad.say(hello, b"x")
        mad.say(without_array, b"")
        mad.say(ours, b"")
        assert received(there, 1) == [Letter(0, Sort.RESULT, 8)]
        assert there.refused == {Refusal.MALFORMED: 1, Refusal.FORGED: 2}
        mad.say(endless, b"")
        here.send(Letter(1, Sort.RESULT, 5))
        assert received(there, 1) == [Letter(0, Sort.RESULT, 5)]
        deadline = soon()
        while Refusal.TOO_LARGE not in there.refused:
            assert monotonic() < deadline
            assert there.receive(0.02) == []
        assert mad.is_dropped()
        assert there.refused[Refusal.TOO_LARGE] == 1
        here.send(Letter(1, Sort.RESULT, 6))
        assert received(there, 1) == [Letter(0, Sort.RESULT, 6)]


def test_a_letter_that_is_cut_short_is_dropped(posts: Opener) -> None:
    header = HEADER.pack(Sort.RESULT, 1, 0, 0, 0, 100)
    with posts(2) as (here, there):
        with calling(here._door._identity, there._door.card) as mad:
            mad.socket.sendall(header + bytes(50))
        deadline = soon()
        while not there.refused:
            assert monotonic() < deadline
            assert there.receive(0.02) == []
        assert there.refused == {Refusal.TRUNCATED: 1}


def test_a_transports_connection_is_none_of_the_posts() -> None:
    with plain(2) as (_, there):
        for purpose, is_let_in in ((PURPOSE, True), ("tcp", False)):
            identity = strange_identity(0, encrypted=False, purpose=purpose)
            with calling(identity, there._door.card) as caller:
                assert caller.let_in == is_let_in


def test_a_wait_ends_when_woken_or_in_time(posts: Opener) -> None:
    with posts(1) as [post]:
        assert post.receive(0.01) == []
        Timer(0.05, post.wake).start()
        assert post.receive(None) == []
        for _ in range(100_000):
            post.wake()  # never waits
        post.receive(1)
    post.wake()  # nor after close
    post.close()


def test_who_never_comes_is_named(posts: Opener) -> None:
    missing = r"rank 3 hasn't come; is it running, with the same"
    with posts(1) as [post], pytest.raises(PeerLost, match=missing):
        post.meet([3], monotonic() + 0.05)


def test_an_address_that_is_not_here() -> None:
    with pytest.raises(TransportError, match=r"rank 0 can't listen on 192.0.2.1: .*; name another"):
        Post(0, dist.HashStore(), "192.0.2.1")
