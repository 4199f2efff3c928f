"""Strangers, replays, forgeries: none of it gets in, all of it is counted, and nobody is harmed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from time import monotonic, sleep

import numpy as np
import psutil
import pytest
import torch.distributed as dist
import zmq

from tests.transports.ranks import LABEL, PATIENCE, in_a_process, soon
from tests.transports.strangers import Eavesdropper, pushing, throw
from thalweg.errors import NotTrusted, PeerLate
from thalweg.transports import Label, Refusal, ZeroMqTransport, gate
from thalweg.transports.card import Card, Sealer
from thalweg.transports.framing import CURVE_FRAME, OVERHEAD
from thalweg.transports.gate import BURST
from thalweg.transports.post import Letter, Post, Sort
from thalweg.transports.protection import Protection
from thalweg.transports.zeromq import HEADER, MAGIC, PURPOSE, VERSION

SECRET = b"known to all workers"
LARGE = np.arange(500_000)
MINE = Sealer(purpose=PURPOSE, run="", secret=SECRET, curve=True)


def protection(secret: bytes | None = SECRET) -> Protection:
    return Protection(curve=True, secret=secret)


@contextmanager
def transports(*secrets: bytes | None) -> Iterator[tuple[dist.HashStore, list[ZeroMqTransport]]]:
    """Of ranks 0, 1 and so on, each with its secret."""
    store = dist.HashStore()
    with ExitStack() as stack:
        opened = [
            ZeroMqTransport(rank, store, grace=0.5, protection=protection(secret))
            for rank, secret in enumerate(secrets)
        ]
        for transport in opened:
            stack.callback(transport.close)
        yield store, opened


def card(store: dist.HashStore, rank: int, sealer: Sealer = MINE) -> Card:
    found = sealer.read(store.get(sealer.key_of(rank)))
    assert found is not None
    return found


def exchange(one: ZeroMqTransport, other: ZeroMqTransport) -> None:
    for source, target in ((one, other), (other, one)):
        for array in (LARGE, np.array([7]), np.zeros(0)):
            sending = source.send(target.rank, LABEL, array, soon())
            came = target.receive(source.rank, LABEL, soon())
            np.testing.assert_array_equal(came.view(array.dtype), array)
            sending.wait(soon())


def until(so: Callable[[], bool]) -> None:
    deadline = soon()
    while not so():
        assert monotonic() < deadline
        sleep(0.01)


def turned_away(transport: ZeroMqTransport) -> int:
    """Who is plain may notice first that the other isn't, and hang up."""
    return transport.refused[Refusal.STRANGER] + transport.refused[Refusal.UNFINISHED]


def message(sender: int, payload: bytes, nbytes: int | None = None) -> list[bytes]:
    length = len(payload) if nbytes is None else nbytes
    return [HEADER.pack(MAGIC, VERSION, 0, sender, 0, *LABEL, length), payload]


def nothing_comes(transport: ZeroMqTransport, sender: int) -> None:
    with pytest.raises(PeerLate):
        transport.receive(sender, LABEL, monotonic() + 0.3)


@pytest.mark.parametrize("curve", [False, True], ids=["plain", "with keys of its own"])
def test_a_stranger_does_not_get_in(curve: bool) -> None:
    def work() -> None:
        with transports(SECRET, SECRET) as (store, (here, there)):
            exchange(here, there)
            where = card(store, 0)
            with pushing(where.endpoint, server=where.key if curve else None) as stranger:
                stranger.send_multipart(message(1, b"x"))
                until(lambda: turned_away(here) >= 1)
                nothing_comes(here, 1)
            exchange(here, there)

    in_a_process(work)


def test_one_who_knows_another_key_of_ours_still_needs_its_private_half() -> None:
    def work() -> None:
        with transports(SECRET, SECRET) as (store, (here, there)):
            exchange(here, there)
            where, theirs = card(store, 0), card(store, 1)
            _, private = zmq.curve_keypair()
            keys = theirs.key, zmq.utils.z85.decode(private)
            with pushing(where.endpoint, server=where.key, keys=keys) as thief:
                thief.send_multipart(message(1, b"x"))
                until(lambda: here.refused[Refusal.STRANGER] >= 1)
                nothing_comes(here, 1)
            exchange(here, there)

    in_a_process(work)


def test_a_worker_with_another_secret_is_named() -> None:
    def work() -> None:
        with transports(SECRET, b"not quite the same") as (_, (here, there)):
            for one, other in ((here, there), (there, here)):
                wanted = rf"as rank {other.rank}'s address .* this job's secret.*; start all"
                with pytest.raises(NotTrusted, match=wanted):
                    one.send(other.rank, LABEL, LARGE, soon())
                assert one.refused[Refusal.FORGED] >= 1

    in_a_process(work)


def test_who_writes_to_the_store_without_the_secret_is_not_let_in() -> None:
    """Neither by a card of its own making, nor by one of ours with its key on it."""

    def work() -> None:
        with transports(SECRET, SECRET) as (store, (here, there)):
            exchange(here, there)
            public, private = (zmq.utils.z85.decode(key) for key in zmq.curve_keypair())
            theirs = replace(card(store, 1), key=public)
            sealed = json.loads(store.get(MINE.key_of(1)))
            for text in (
                replace(MINE, secret=b"a guess that is wrong").write(theirs),
                json.dumps({**sealed, "key": public.hex()}),
            ):
                store.set(MINE.key_by(public), text)
                where, before = card(store, 0), here.refused[Refusal.STRANGER]
                with pushing(where.endpoint, server=where.key, keys=(public, private)) as stranger:
                    stranger.send_multipart(message(1, b"x"))
                    until(lambda before=before: here.refused[Refusal.STRANGER] > before)
                    nothing_comes(here, 1)
            exchange(here, there)

    in_a_process(work)


def test_without_a_secret_the_store_is_believed() -> None:
    """It is encrypted all the same."""

    def work() -> None:
        with transports(None, None) as (store, (here, there)):
            exchange(here, there)
            where = card(store, 0, replace(MINE, secret=None))
            with pushing(where.endpoint) as stranger:
                stranger.send_multipart(message(1, b"x"))
                until(lambda: turned_away(here) >= 1)
                nothing_comes(here, 1)

    in_a_process(work)


def test_a_member_speaks_in_its_own_name_alone() -> None:
    def work() -> None:
        with transports(SECRET, SECRET, SECRET) as (_, (here, there, other)):
            exchange(here, there)
            exchange(here, other)
            other._rank = 1  # what it says from now on
            other.send(0, LABEL, np.array([13]), soon())
            until(lambda: here._take_in() or here.refused[Refusal.FORGED] == 1)
            nothing_comes(here, 1)
            exchange(here, there)

    in_a_process(work)


def test_frames_of_a_member_that_are_cut_short_or_too_long() -> None:
    """What is longer than any frame may be breaks the connection, which comes back."""

    def work() -> None:
        with transports(SECRET, SECRET) as (_, (here, there)):
            exchange(here, there)
            socket = there._outbound[0].socket
            for frames in (
                [b""],
                [b"x" * 1000],
                message(1, b"x")[:1],
                message(1, b"x", nbytes=2),
                [*message(1, b"x"), b"y"],
                message(1, b"", nbytes=1 << 63),
            ):
                socket.send_multipart(frames)
            socket.send_multipart([b"x" * (CURVE_FRAME + OVERHEAD + 1)])
            exchange(here, there)
            counts = dict(here.refused)
            assert counts[Refusal.MALFORMED] == 3
            assert counts[Refusal.TRUNCATED] == 2
            assert counts[Refusal.TOO_LARGE] == 1

    in_a_process(work)


def test_what_is_played_back_says_nothing() -> None:
    """Not one byte of it: the keys of a connection are made when it is, by both sides."""

    def work() -> None:
        with transports(SECRET, SECRET) as (store, (here, there)):
            where = card(store, 0)
            tap = Eavesdropper(where.endpoint)
            tapped = replace(where, endpoint=tap.endpoint)
            store.set(MINE.key_of(0), MINE.write(tapped))
            for value in range(20):
                there.send(0, LABEL, np.full(10_000, value), soon()).wait(soon())
                assert here.receive(1, LABEL, soon()).view("i8")[0] == value
            [recording] = tap.recordings
            assert len(recording) > 20 * 80_000
            assert bytes(np.full(100, 3)) not in bytes(recording)
            tap.replay(50)
            until(lambda: sum(dict(here.refused).values()) >= 50)
            nothing_comes(here, 1)
            there.send(0, LABEL, np.array([99]), soon())
            assert here.receive(1, LABEL, soon()).view("i8")[0] == 99
            tap.close()

    in_a_process(work)


def test_bytes_that_change_on_their_way_break_the_connection() -> None:
    """Nothing of them is taken; the sender is told, and the connection comes back."""

    def work() -> None:
        with transports(SECRET, SECRET) as (store, (here, there)):
            where = card(store, 0)
            tap = Eavesdropper(where.endpoint)
            store.set(MINE.key_of(0), MINE.write(replace(where, endpoint=tap.endpoint)))
            there.send(0, LABEL, np.full(10_000, 7), soon()).wait(soon())
            assert here.receive(1, LABEL, soon()).view("i8")[0] == 7
            connection = there._outbound[0]
            tap.meddles = True
            there.send(0, LABEL, np.full(10_000, 8), soon())
            until(lambda: connection.hear() is None and connection.broke)
            nothing_comes(here, 1)
            tap.meddles = False
            until(lambda: connection.seconds_down() == 0)
            there.send(0, LABEL, np.full(10_000, 9), soon()).wait(soon())
            assert here.receive(1, LABEL, soon()).view("i8")[0] == 9
            tap.close()

    in_a_process(work)


def test_garbage_is_counted_and_takes_no_memory() -> None:
    def work() -> dict[str, int]:
        with transports(SECRET, SECRET) as (store, (here, there)):
            exchange(here, there)
            where = card(store, 0)
            throw(where.endpoint, 200)
            until(lambda: sum(dict(here.refused).values()) >= 150)
            before = psutil.Process().memory_info().rss
            throw(where.endpoint, 2000)
            until(lambda: sum(dict(here.refused).values()) >= 2000)
            grown = psutil.Process().memory_info().rss - before
            exchange(here, there)
            return {"grown": grown}

    assert in_a_process(work)["grown"] < 8 << 20


def test_strangers_neither_flood_the_store_nor_keep_a_worker_out() -> None:
    """Every one of them with a key that must be looked up."""

    def work() -> None:
        with transports(SECRET, SECRET) as (store, ranks):
            exchange(*ranks)
            where = card(store, 0)
            with ExitStack() as stack:
                for _ in range(BURST):
                    stack.enter_context(pushing(where.endpoint, server=where.key))
                ranks[1].close()
                ranks[1] = ZeroMqTransport(1, store, grace=0.5, protection=protection())
                stack.callback(ranks[1].close)
                ranks[1].send(0, Label(1, 0, 0, 1), LARGE, soon())
                ranks[0].receive(1, Label(1, 0, 0, 1), soon())

    in_a_process(work)


def test_a_worker_that_is_back_gets_in_at_once() -> None:
    """The first time that it asks: whom the gate made wait would miss the deadline."""

    def work() -> None:
        gate.REST = 2 * PATIENCE
        with transports(SECRET, SECRET) as (store, ranks):
            exchange(*ranks)
            ranks[1].close()
            ranks[1] = ZeroMqTransport(1, store, grace=0.5, protection=protection())
            ranks[1].send(0, LABEL, LARGE, soon())
            ranks[0].receive(1, LABEL, soon())
            exchange(*ranks)
            ranks[1].close()

    in_a_process(work)


def test_a_greeting_with_a_forged_card_moves_nobody() -> None:
    def work() -> None:
        store = dist.HashStore()
        with ExitStack() as stack:
            here, there = (Post(rank, store, protection=protection()) for rank in range(2))
            for post, peer in ((here, 1), (there, 0)):
                stack.callback(post.close)
                post.meet([peer], soon())
            sealer = protection().sealer("post")
            elsewhere = Card(rank=1, endpoint="tcp://127.0.0.1:9", key=bytes(32))
            of_another = Card(rank=0, endpoint=there.endpoint, key=bytes(32))
            for text in (
                replace(sealer, secret=b"a guess that is wrong").write(elsewhere),
                sealer.write(of_another),
                "tcp://127.0.0.1:9",
            ):
                letter = np.frombuffer(text.encode(), np.uint8)
                there.send(Letter(0, Sort.HELLO, 0, array=letter))
            until(lambda: here.receive(0.05) == [] and here.refused[Refusal.FORGED] == 3)
            here.send(Letter(1, Sort.RESULT, 5))
            deadline = soon()
            while not (came := there.receive(0.05)):
                assert monotonic() < deadline
            assert came == [Letter(0, Sort.RESULT, 5)]

    in_a_process(work)


def test_nothing_listens_wider_than_its_interface() -> None:
    def work() -> None:
        with transports(SECRET, SECRET) as (_, ranks):
            exchange(*ranks)
            connections = psutil.Process().net_connections("tcp")
            listening = [c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN]
            assert listening == ["127.0.0.1"] * 2

    in_a_process(work)
