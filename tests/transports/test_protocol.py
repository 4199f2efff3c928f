"""What every transport promises, on each of them."""

from __future__ import annotations

from threading import Timer
from time import monotonic

import numpy as np
import pytest

from tests.transports.ranks import KINDS, LABEL, hear, next_message, run_ranks, soon, tell
from thalweg.errors import PeerLate, TransportClosed
from thalweg.transports import Address, Array, Label, Sending, Transport

MANY = 1500  # more than any queue holds

every_kind = pytest.mark.parametrize("kind", KINDS)


def wait_for(sendings: list[Sending]) -> None:
    for sending in sendings:
        sending.wait(soon())


def noise(nbytes: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def in_bytes(array: Array) -> Array:
    return array.view(np.uint8)


@every_kind
def test_messages_under_one_label_keep_their_order(kind: str) -> None:
    """Whether they are copied or sent from where they are."""

    def work(transport: Transport) -> None:
        arrays = [np.full(100_000 if i % 3 else 1, i) for i in range(60)]
        if transport.rank == 0:
            wait_for([transport.send(1, LABEL, array, soon()) for array in arrays])
        else:
            for array in arrays:
                np.testing.assert_array_equal(
                    next_message(transport, 0, LABEL, soon()).view(array.dtype), array
                )

    run_ranks(kind, 2, work)


@every_kind
def test_any_of_these_takes_the_first_to_come(kind: str) -> None:
    def work(transport: Transport) -> None:
        if transport.rank == 0:
            wanted = [Address(peer, LABEL) for peer in (1, 2)]
            for first in (2, 1):
                tell(transport, first)
                address, array = transport.receive_any(wanted, soon())
                assert (address, array.view("i8")[0]) == (Address(first, LABEL), first)
        else:
            hear(transport, 0)
            transport.send(0, LABEL, np.array([transport.rank]), soon()).wait(soon())

    run_ranks(kind, 3, work)


@every_kind
def test_other_labels_and_other_senders_are_left_where_they_are(kind: str) -> None:
    other = Label(0, 1, 0, 1)

    def work(transport: Transport) -> None:
        if transport.rank == 0:
            for peer in (1, 2):
                hear(transport, peer)  # all that it sent came before
            for peer, label in ((1, LABEL), (2, LABEL), (1, other)):
                value = next_message(transport, peer, label, soon()).view("i8")[0]
                assert value == 10 * peer + label.round
        else:
            for label in (other, LABEL):
                array = np.array([10 * transport.rank + label.round])
                transport.send(0, label, array, soon()).wait(soon())
            tell(transport, 0)

    run_ranks(kind, 3, work)


@every_kind
def test_a_deadline_passes_and_what_is_late_still_comes(kind: str) -> None:
    label = Label(7, 3, 0, 1)

    def work(transport: Transport) -> None:
        if transport.rank == 0:
            start = monotonic()
            text = r"rank 0 timed out waiting for rank 1 \(step 7, round 3\); look at"
            with pytest.raises(PeerLate, match=text) as caught:
                next_message(transport, 1, label, start + 0.3)
            assert monotonic() - start >= 0.3
            late = caught.value
            assert (late.rank, late.peers, late.step, late.round_number) == (0, (1,), 7, 3)
            tell(transport, 1)
            assert next_message(transport, 1, label, soon()).view("i8")[0] == 5
        else:
            hear(transport, 0)
            transport.send(0, label, np.array([5]), soon()).wait(soon())

    run_ranks(kind, 2, work)


@every_kind
def test_all_that_are_late_are_named(kind: str) -> None:
    def work(transport: Transport) -> None:
        if transport.rank == 0:
            wanted = [Address(peer, LABEL) for peer in (2, 1)]
            with pytest.raises(PeerLate, match="waiting for ranks 1, 2 "):
                transport.receive_any(wanted, monotonic() + 0.1)

    run_ranks(kind, 3, work)


@every_kind
def test_closing_wakes_who_waits_and_ends_all_use(kind: str) -> None:
    def work(transport: Transport) -> None:
        tell(transport, 1 - transport.rank)
        hear(transport, 1 - transport.rank)
        if transport.rank == 0:
            closing = Timer(0.1, transport.close)
            closing.start()
            with pytest.raises(TransportClosed, match="rank 0 receives after close"):
                next_message(transport, 1, LABEL, soon())
            closing.join()
            transport.close()  # again
            with pytest.raises(TransportClosed, match="rank 0 sends after close"):
                transport.send(1, LABEL, np.array([1]), soon())
            with pytest.raises(TransportClosed):
                transport.receive_any([Address(1, LABEL)], soon())

    run_ranks(kind, 2, work)


@every_kind
def test_what_was_sent_before_close_arrives(kind: str) -> None:
    array = noise(3_000_000)

    def work(transport: Transport) -> None:
        if transport.rank == 0:
            wait_for([transport.send(1, LABEL, array, soon()) for _ in range(5)])
            transport.close()
        else:
            for _ in range(5):
                np.testing.assert_array_equal(next_message(transport, 0, LABEL, soon()), array)

    run_ranks(kind, 2, work)


@every_kind
def test_all_sizes_there_and_back(kind: str) -> None:
    """At and around the size from which no copy is made, up to a large bucket, and nothing."""
    sizes = (1, 0, 2, 1000, 65_535, 65_536, 65_537, 1_000_003, 50_000_000, 0)

    def work(transport: Transport) -> None:
        other = 1 - transport.rank
        for step, nbytes in enumerate(sizes):
            label = Label(step, 0, 0, 1)
            mine, its = (noise(nbytes, rank) for rank in (transport.rank, other))
            sending = transport.send(other, label, mine, soon())
            came = next_message(transport, other, label, soon())
            assert came.nbytes == nbytes
            np.testing.assert_array_equal(in_bytes(came), its)
            sending.wait(soon())

    run_ranks(kind, 2, work)


@every_kind
def test_any_array_is_sent_as_it_reads(kind: str) -> None:
    """Every other element, columns, read-only ones, matrices, scalars."""
    matrix = np.arange(90_000, dtype=np.float32).reshape(300, 300)
    read_only = np.frombuffer(bytes(range(200)), np.uint8)
    arrays = [matrix[0, ::2], matrix[:, 7], matrix.T, matrix[10:20], read_only, np.array(3.5)]

    def work(transport: Transport) -> None:
        for array in arrays:
            if transport.rank == 0:
                transport.send(1, LABEL, array, soon()).wait(soon())
            else:
                came = next_message(transport, 0, LABEL, soon())
                assert in_bytes(came.reshape(-1)).tobytes() == array.tobytes()

    run_ranks(kind, 2, work)


@every_kind
def test_thousands_of_small_messages(kind: str) -> None:
    """Under labels of their own, taken in the opposite order."""

    def work(transport: Transport) -> None:
        labels = [Label(0, 0, start, start + 1) for start in range(2 * MANY)]
        if transport.rank == 0:
            for label in labels:
                transport.send(1, label, np.array([label.start]), soon()).wait(soon())
        else:
            for label in reversed(labels):
                assert next_message(transport, 0, label, soon()).view("i8")[0] == label.start

    run_ranks(kind, 2, work)


@every_kind
@pytest.mark.parametrize("nbytes", [1000, 70_000])
def test_two_that_send_more_than_queues_hold_before_either_receives(kind: str, nbytes: int) -> None:
    """And wait for all of it to have left."""

    def work(transport: Transport) -> None:
        other = 1 - transport.rank
        array = noise(nbytes, transport.rank)
        wait_for([transport.send(other, LABEL, array, soon()) for _ in range(MANY)])
        expected = noise(nbytes, other).tobytes()
        for _ in range(MANY):
            assert next_message(transport, other, LABEL, soon()).tobytes() == expected

    run_ranks(kind, 2, work)


@every_kind
def test_what_changes_after_the_wait_does_not_change_what_arrives(kind: str) -> None:
    """The receiver takes nothing before all of it was overwritten."""
    sizes = (1000, 65_536, 65_537, 1_000_000, 20_000_000)

    def work(transport: Transport) -> None:
        for step, nbytes in enumerate(sizes):
            label = Label(step, 0, 0, 1)
            if transport.rank == 0:
                array = np.empty(nbytes, np.uint8)
                for value in range(8):
                    array.fill(value)
                    transport.send(1, label, array, soon()).wait(soon())
                    array.fill(255)
                tell(transport, 1, step)
            else:
                hear(transport, 0, step)
                for value in range(8):
                    came = next_message(transport, 0, label, soon())
                    assert came.nbytes == nbytes
                    assert came.min() == came.max() == value

    run_ranks(kind, 2, work)


@every_kind
def test_all_to_all_at_once(kind: str) -> None:
    size = 4

    def work(transport: Transport) -> None:
        others = [rank for rank in range(size) if rank != transport.rank]
        for step in range(20):
            label = Label(step, 0, 0, 1)
            mine = noise(100_000, transport.rank)
            sendings = [transport.send(peer, label, mine, soon()) for peer in others]
            wanted = {Address(peer, label) for peer in others}
            while wanted:
                address, array = transport.receive_any(wanted, soon())
                wanted.remove(address)
                np.testing.assert_array_equal(array, noise(100_000, address.peer))
            wait_for(sendings)

    run_ranks(kind, size, work)


def send_for_ever(transport: Transport) -> None:
    array = np.zeros(10_000)
    while True:
        transport.send(1, LABEL, array, soon()).wait(soon())


@every_kind
def test_a_thread_may_close_while_another_sends(kind: str) -> None:
    def work(transport: Transport) -> None:
        tell(transport, 1 - transport.rank)
        hear(transport, 1 - transport.rank)
        if transport.rank == 0:
            closing = Timer(0.1, transport.close)
            closing.start()
            with pytest.raises(TransportClosed):
                send_for_ever(transport)
            closing.join()

    run_ranks(kind, 2, work)
