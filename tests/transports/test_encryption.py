"""Strangers, replays, forgeries: none of it gets in, all of it is counted, and nobody is harmed."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from time import monotonic, sleep
from typing import Any

import numpy as np
import psutil
import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.transports.ranks import LABEL, in_a_process, next_message, soon
from tests.transports.strangers import (
    Eavesdropper,
    Meddle,
    Meddler,
    calling,
    leave_alone,
    port_of,
    records_of,
    strange_identity,
    throw,
)
from thalweg.errors import NotTrusted, PeerLate
from thalweg.transports import Label, RejectionReason, TcpTransport, cipher, endpoint
from thalweg.transports.best_effort import BestEffortMessage, BestEffortTransport, MessageKind
from thalweg.transports.cipher import KEY_NBYTES, RECORD_NBYTES, TAG_NBYTES, RecordCipher
from thalweg.transports.peer_record import PeerRecord, RecordSigner
from thalweg.transports.rejections import USUAL_REASONS, RejectionCounter
from thalweg.transports.security import SecurityConfig
from thalweg.transports.tcp import TCP_HEADER_STRUCT, TCP_PURPOSE

SECRET = b"known to all workers"
LARGE = np.arange(500_000)
MINE = RecordSigner(purpose=TCP_PURPOSE, run="", secret=SECRET, encrypted=True)
SEVERAL = 3 * RECORD_NBYTES + 1000  # bytes of a message of four records


def protection(rank: int = 0, secret: bytes | None = SECRET) -> SecurityConfig:
    return SecurityConfig(encrypted=True, secret=secret, refused=RejectionCounter(rank))


def opened(rank: int, store: Any, secret: bytes | None = SECRET) -> TcpTransport:
    return TcpTransport(rank, store, grace=0.5, security=protection(rank, secret))


@contextmanager
def transports(*secrets: bytes | None) -> Iterator[tuple[dist.HashStore, list[TcpTransport]]]:
    """Of ranks 0, 1 and so on, each with its secret; those that a test puts in their place are
    closed as well."""
    store = dist.HashStore()
    ranks = [opened(rank, store, secret) for rank, secret in enumerate(secrets)]
    try:
        yield store, ranks
    finally:
        for transport in ranks:
            transport.close()


@contextmanager
def log_lines() -> Iterator[list[str]]:
    """What is said in the log of this process."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("thalweg")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def record_of(store: dist.HashStore, rank: int, signer: RecordSigner = MINE) -> PeerRecord:
    found = signer.read(store.get(signer.key_of(rank)))
    assert found is not None
    return found


def exchange(one: TcpTransport, other: TcpTransport) -> None:
    for source, target in ((one, other), (other, one)):
        for array in (LARGE, np.array([7]), np.zeros(0)):
            sending = source.send(target.rank, LABEL, array, soon())
            came = next_message(target, source.rank, LABEL, soon())
            np.testing.assert_array_equal(came.view(array.dtype), array)
            sending.wait(soon())


def until(so: Callable[[], bool]) -> None:
    deadline = soon()
    while not so():
        assert monotonic() < deadline
        sleep(0.01)


def refusals(transport: TcpTransport) -> int:
    """How many there are, once what has come is taken in."""
    transport._receive(0.0)
    return sum(transport.refused.values())


def nothing_comes(transport: TcpTransport, sender: int) -> None:
    with pytest.raises(PeerLate):
        next_message(transport, sender, LABEL, monotonic() + 0.2)


def message(payload: bytes, nbytes: int | None = None) -> tuple[bytes, bytes]:
    length = len(payload) if nbytes is None else nbytes
    return TCP_HEADER_STRUCT.pack(0, *LABEL, length), payload


@pytest.mark.parametrize("secret", [SECRET, None], ids=["secret", "no secret"])
@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "with keys of its own"])
def test_a_stranger_does_not_get_in(encrypted: bool, secret: bytes | None) -> None:
    """Without a secret the store is believed: whose card it does not have is a stranger. It is
    encrypted all the same."""

    def work() -> None:
        with log_lines() as lines, transports(secret, secret) as (store, (here, there)):
            exchange(here, there)
            where = record_of(store, 0, replace(MINE, secret=secret))
            identity = strange_identity(1, encrypted=encrypted)
            with calling(identity, where) as stranger:
                assert not stranger.let_in
                stranger.say(*message(b"x"))
            why = (
                RejectionReason.STRANGER if encrypted and secret is None else RejectionReason.FORGED
            )
            until(lambda: why in here.refused)
            nothing_comes(here, 1)
            assert here.refused == {why: 1}
            assert lines[0].startswith(f"rank 0 rejected {why.value} (1 so far)")
            exchange(here, there)

    in_a_process(work)


@pytest.mark.parametrize("secret", [SECRET, None], ids=["secret", "no secret"])
def test_one_that_shows_a_record_of_ours_still_needs_its_private_key(secret: bytes | None) -> None:
    def work() -> None:
        with transports(secret, secret) as (store, (here, there)):
            exchange(here, there)
            signer = replace(MINE, secret=secret)
            theirs = strange_identity(1, secret=secret, record=record_of(store, 1, signer))
            with calling(theirs, record_of(store, 0, signer)) as thief:
                assert not thief.let_in
            until(lambda: RejectionReason.STRANGER in here.refused)
            nothing_comes(here, 1)
            assert here.refused == {RejectionReason.STRANGER: 1}
            exchange(here, there)

    in_a_process(work)


def test_a_worker_with_another_secret_is_named() -> None:
    def work() -> None:
        with transports(SECRET, b"not quite the same") as (_, (here, there)):
            for one, other in ((here, there), (there, here)):
                wanted = rf"the address of rank {other.rank} .* this job's secret.*; start all"
                with pytest.raises(NotTrusted, match=wanted):
                    one.send(other.rank, LABEL, LARGE, soon())
                assert one.refused[RejectionReason.FORGED] >= 1

    in_a_process(work)


def test_who_writes_to_the_store_without_the_secret_is_not_let_in() -> None:
    """Neither by a card of its own making, nor by one of ours with its key on it."""

    def work() -> None:
        with transports(SECRET, SECRET) as (store, (here, there)):
            exchange(here, there)
            stranger = strange_identity(1, secret=b"a guess that is wrong")
            where, text = record_of(store, 0), store.get(MINE.key_of(1)).decode()
            ours_changed = {**json.loads(text), "key": stranger.record.key.hex()}
            for number, forged in enumerate((stranger.text.decode(), json.dumps(ours_changed)), 1):
                store.set(MINE.key_of(1), forged)
                with calling(stranger, where) as caller:
                    assert not caller.let_in
                until(lambda number=number: here.refused[RejectionReason.FORGED] >= number)
            with pytest.raises(NotTrusted, match="the address of rank 1"):
                here._wire.endpoint.find(1)
            store.set(MINE.key_of(1), text)
            nothing_comes(here, 1)
            exchange(here, there)

    in_a_process(work)


def test_a_member_speaks_in_its_own_name_alone() -> None:
    """It has the secret and a key of its own, but not the one on the other's card."""

    def work() -> None:
        with transports(SECRET, SECRET, SECRET) as (store, (here, there, other)):
            exchange(here, there)
            exchange(here, other)
            own = other._wire.endpoint.identity
            with calling(replace(own, record=record_of(store, 1)), record_of(store, 0)) as liar:
                assert not liar.let_in
            until(lambda: RejectionReason.STRANGER in here.refused)
            with calling(own, record_of(store, 0)) as itself:
                itself.say(*message(b"in its own name"))
                assert next_message(here, 2, LABEL, soon()).tobytes() == b"in its own name"
            nothing_comes(here, 1)
            assert here.refused == {RejectionReason.STRANGER: 1}
            exchange(here, there)

    in_a_process(work)


def cut_short(header: bytes, payload: bytes, under: RecordCipher) -> bytes:
    return b"".join(records_of(under, header, payload))[:-1]


@pytest.mark.parametrize(
    ("why", "said"),
    [
        (RejectionReason.TOO_LARGE, lambda under: message(b"", nbytes=1 << 63)[0]),
        (RejectionReason.TRUNCATED, lambda under: cut_short(*message(b"x"), under)),
        (RejectionReason.TRUNCATED, lambda under: cut_short(*message(bytes(SEVERAL)), under)),
        (
            RejectionReason.TAMPERED,
            lambda under: b"".join(message(b"x" + bytes(TAG_NBYTES), nbytes=1)),
        ),
        (
            RejectionReason.TAMPERED,
            lambda under: b"\xff" * (TCP_HEADER_STRUCT.size - 8) + bytes(99),
        ),
    ],
    ids=["too long", "cut short", "several records cut short", "plain", "garbage"],
)
def test_what_a_member_says_that_is_none_of_a_member(
    why: RejectionReason, said: Callable[[RecordCipher], bytes]
) -> None:
    """Its connection ends, and the log names it; its other connection is not touched."""

    def work() -> None:
        with log_lines() as lines, transports(SECRET, SECRET) as (_, (here, there)):
            exchange(here, there)
            with calling(there._wire.endpoint.identity, here._wire.endpoint.record) as mad:
                assert mad.cipher is not None
                mad.socket.sendall(said(mad.cipher))
                mad.socket.shutdown(socket.SHUT_WR)
                until(lambda: refusals(here) >= 1)
                assert mad.is_dropped()
            nothing_comes(here, 1)
            assert here.refused == {why: 1}
            if why not in USUAL_REASONS:
                assert lines[0].startswith(f"rank 0 rejected {why.value}, from rank 1 (1 so far)")
            exchange(here, there)
            assert not there._wire.outbound[0].has_broken

    in_a_process(work)


def test_what_is_played_back_says_nothing() -> None:
    """Not one byte of it: the keys of a connection are made when it is, by both sides."""

    def work() -> None:
        with transports(SECRET, SECRET) as (store, (here, there)):
            where = record_of(store, 0)
            tap = Eavesdropper(where.endpoint)
            store.set(MINE.key_of(0), MINE.write(replace(where, endpoint=tap.endpoint)))
            for value in range(20):
                there.send(0, LABEL, np.full(10_000, value), soon()).wait(soon())
                assert next_message(here, 1, LABEL, soon()).view("i8")[0] == value
            [recording] = tap.recordings
            assert len(recording) > 20 * 80_000
            assert bytes(np.full(100, 3)) not in bytes(recording)
            tap.replay(50)
            until(lambda: refusals(here) >= 50)
            nothing_comes(here, 1)
            assert set(here.refused) <= {
                RejectionReason.TAMPERED,
                RejectionReason.TRUNCATED,
                RejectionReason.UNFINISHED,
            }
            assert here.refused[RejectionReason.TAMPERED]
            there.send(0, LABEL, np.array([99]), soon())
            assert next_message(here, 1, LABEL, soon()).view("i8")[0] == 99
            tap.close()

    in_a_process(work)


def flipped(which: int, at: int) -> Meddle:
    def meddle(number: int, record: bytes) -> Iterable[bytes]:
        if number == which:
            changed = bytearray(record)
            changed[at] ^= 1
            record = bytes(changed)
        return (record,)

    return meddle


def repeated(number: int, record: bytes) -> Iterable[bytes]:
    return (record, record) if number == 1 else (record,)


def dropped(number: int, record: bytes) -> Iterable[bytes]:
    return () if number == 1 else (record,)


class Reordered:
    """The second and the third record change places."""

    def __init__(self) -> None:
        self._held = b""

    def __call__(self, number: int, record: bytes) -> Iterable[bytes]:
        if number == 1:
            self._held = record
            return ()
        return (record, self._held) if number == 2 else (record,)


def ended(number: int, record: bytes) -> Iterable[bytes]:
    if number == 2:
        raise ConnectionResetError
    return (record,)


@pytest.mark.parametrize(
    ("meddle", "why"),
    [
        (flipped(0, TCP_HEADER_STRUCT.size), RejectionReason.TAMPERED),
        (flipped(3, 500), RejectionReason.TAMPERED),
        (flipped(1, -1), RejectionReason.TAMPERED),
        (flipped(0, 0), RejectionReason.TAMPERED),
        (flipped(0, TCP_HEADER_STRUCT.size - 8), RejectionReason.TAMPERED),
        (repeated, RejectionReason.TAMPERED),
        (dropped, RejectionReason.TAMPERED),
        (Reordered(), RejectionReason.TAMPERED),
        (ended, RejectionReason.TRUNCATED),
    ],
    ids=[
        *("first record", "last record", "tag", "formation in the header", "length in the header"),
        *("repeated", "dropped", "reordered", "ended"),
    ],
)
def test_what_changes_on_its_way_breaks_the_connection(
    meddle: Meddle, why: RejectionReason
) -> None:
    """Nothing of it is handed out, its sender is named, and the connection comes back."""

    def work() -> None:
        with log_lines() as lines, transports(SECRET, SECRET) as (store, (here, there)):
            where = record_of(store, 0)
            tap = Meddler(where.endpoint)
            store.set(MINE.key_of(0), MINE.write(replace(where, endpoint=tap.endpoint)))
            there.send(0, LABEL, np.full(SEVERAL, 7, np.uint8), soon()).wait(soon())
            assert next_message(here, 1, LABEL, soon())[-1] == 7
            outbound = there._wire.outbound[0]
            tap.meddle = meddle
            there.send(0, LABEL, np.full(SEVERAL, 8, np.uint8), soon())
            until(lambda: refusals(here) >= 1)
            nothing_comes(here, 1)
            tap.meddle = leave_alone
            assert here.refused == {why: 1}
            if why not in USUAL_REASONS:
                assert lines[0].startswith(f"rank 0 rejected {why.value}, from rank 1 (1 so far)")
            until(lambda: outbound.has_broken and outbound.down_since is None)
            there.send(0, LABEL, np.full(SEVERAL, 9, np.uint8), soon()).wait(soon())
            assert set(next_message(here, 1, LABEL, soon())) == {9}
            tap.close()

    in_a_process(work)


def test_garbage_is_counted_and_takes_no_memory() -> None:
    def work() -> dict[str, int]:
        with transports(SECRET, SECRET) as (store, (here, there)):
            exchange(here, there)
            where = record_of(store, 0)
            throw(where.endpoint, 200)
            until(lambda: sum(here.refused.values()) >= 200)
            before = psutil.Process().memory_info().rss
            throw(where.endpoint, 2000)
            until(lambda: sum(here.refused.values()) >= 2200)
            grown = psutil.Process().memory_info().rss - before
            exchange(here, there)
            return {"grown": grown}

    assert in_a_process(work)["grown"] < 8 << 20


class Asked:
    """A store that counts the questions."""

    def __init__(self, store: dist.HashStore) -> None:
        self._store = store
        self.questions = 0

    def __getattr__(self, name: str) -> Any:
        if name == "clone":
            raise AttributeError(name)
        self.questions += 1
        return getattr(self._store, name)


def test_strangers_neither_ask_the_store_nor_keep_a_worker_out() -> None:
    """More of them than there is room for are silent, and others have keys of their own."""

    def work() -> None:
        endpoint.ENDPOINT_BACKLOG_COUNT = 50
        store = dist.HashStore()
        asked = Asked(store)
        with ExitStack() as stack:
            here, there = opened(0, asked), opened(1, store)
            stack.callback(here.close)
            exchange(here, there)
            where, before = record_of(store, 0), asked.questions
            for _ in range(120):
                silent = socket.create_connection(port_of(where.endpoint), timeout=5)
                stack.callback(silent.close)
            for _ in range(50):
                with suppress(OSError), calling(strange_identity(1), where) as stranger:
                    assert not stranger.let_in
            until(lambda: here.refused[RejectionReason.FORGED] >= 50)
            until(lambda: here.refused[RejectionReason.UNFINISHED] >= 70)
            assert asked.questions == before
            there.close()
            back = opened(1, store)
            stack.callback(back.close)
            back.send(0, Label(1, 0, 0, 1), LARGE, soon())
            next_message(here, 1, Label(1, 0, 0, 1), soon())

    in_a_process(work)


@pytest.mark.parametrize("secret", [SECRET, None], ids=["secret", "no secret"])
def test_a_worker_that_is_back_gets_in_at_once(secret: bytes | None) -> None:
    """The first time that it asks: whoever was made to wait would be tried again."""

    def work() -> None:
        endpoint.REDIAL_SECONDS = 1000.0
        with transports(secret, secret) as (store, ranks):
            exchange(*ranks)
            ranks[1].close()
            ranks[1] = opened(1, store, secret)
            ranks[1].send(0, LABEL, LARGE, soon())
            next_message(ranks[0], 1, LABEL, soon())
            exchange(*ranks)
            assert not ranks[0].refused

    in_a_process(work)


def test_a_hello_with_a_forged_record_moves_no_connection() -> None:
    def work() -> None:
        store = dist.HashStore()
        with ExitStack() as stack:
            here, there = (
                BestEffortTransport(rank, store, security=protection(rank)) for rank in range(2)
            )
            for transport, peer in ((here, 1), (there, 0)):
                stack.callback(transport.close)
                transport.wait_for_peers([peer], soon())
            signer = protection().signer("post")
            elsewhere = PeerRecord(rank=1, endpoint="tcp://127.0.0.1:9", key=bytes(32))
            of_another = PeerRecord(rank=0, endpoint=there.endpoint, key=bytes(32))
            for text in (
                replace(signer, secret=b"a guess that is wrong").write(elsewhere),
                signer.write(of_another),
                "tcp://127.0.0.1:9",
            ):
                message = np.frombuffer(text.encode(), np.uint8)
                there.send(BestEffortMessage(0, MessageKind.HELLO, 0, array=message))
            until(lambda: here.receive(0.05) == [] and here.refused[RejectionReason.FORGED] == 3)
            here.send(BestEffortMessage(1, MessageKind.RESULT, 5))
            deadline = soon()
            while not (came := there.receive(0.05)):
                assert monotonic() < deadline
            assert came == [BestEffortMessage(0, MessageKind.RESULT, 5)]

    in_a_process(work)


def test_nothing_listens_wider_than_its_interface() -> None:
    def work() -> None:
        with transports(SECRET, SECRET) as (_, ranks):
            exchange(*ranks)
            connections = psutil.Process().net_connections("tcp")
            listening = [c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN]
            assert listening == ["127.0.0.1"] * 2

    in_a_process(work)


def test_keys_change_and_messages_go_on() -> None:
    """In the middle of messages too, on both ends at the same record."""

    def work() -> None:
        cipher.RECORDS_PER_KEY = 3
        with transports(SECRET, SECRET) as (_, (here, there)):
            for value in range(20):
                for nbytes in (0, 100, SEVERAL):
                    array = np.full(nbytes, value, np.uint8)
                    sending = there.send(0, LABEL, array, soon())
                    np.testing.assert_array_equal(next_message(here, 1, LABEL, soon()), array)
                    sending.wait(soon())
            exchange(here, there)
            assert not here.refused

    in_a_process(work)


@given(number=st.integers(1, 60), per_key=st.integers(1, 20))
def test_no_key_sees_a_nonce_twice(number: int, per_key: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cipher, "RECORDS_PER_KEY", per_key)
        under = RecordCipher(bytes(KEY_NBYTES))
        used = []
        for _ in range(number):
            nonce = under._next_nonce()
            used.append((under._key, nonce))
    assert len(set(used)) == len({nonce for _, nonce in used}) == number
    assert len({key for key, _ in used}) == -(-number // per_key)
    assert {len(nonce) for _, nonce in used} == {12}


@given(numbers=st.lists(st.integers(0, 9), max_size=15), per_key=st.integers(1, 5))
def test_only_the_next_record_opens(numbers: list[int], per_key: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cipher, "RECORDS_PER_KEY", per_key)
        sealing, opening = (RecordCipher(bytes(KEY_NBYTES)) for _ in range(2))
        records = [records_of(sealing, b"h", b"same")[0][1:] for _ in range(10)]
        out = memoryview(bytearray(4))
        for expected, number in enumerate(numbers[:10]):
            opens = opening.open(memoryview(records[number]), b"h", out)
            assert opens == (number == expected)
            if opens:
                assert out == b"same"
