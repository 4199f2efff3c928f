"""Formations: what belongs to an older one is never taken for what belongs to the present one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from time import monotonic

import numpy as np
import pytest
import torch.distributed as dist

from tests.faulty import FaultyTransport
from tests.transports.ranks import LABEL, in_a_process, next_message, soon
from thalweg.errors import PeerLate, PeerLost, TransportClosed, TransportError
from thalweg.transports import (
    Address,
    Label,
    MemoryNetwork,
    RecordedTransport,
    RejectionReason,
    TcpTransport,
    Transport,
)
from thalweg.transports.inbox import MAX_EARLY_BYTES, MAX_EARLY_MESSAGES, Inbox

Network = Callable[[int], AbstractContextManager[list[Transport]]]
OTHER = Label(1, 0, 0, 1)


@contextmanager
def in_memory(size: int) -> Iterator[list[Transport]]:
    network = MemoryNetwork(range(size))
    yield [network.transport(rank) for rank in range(size)]


@contextmanager
def over_zeromq(size: int) -> Iterator[list[Transport]]:
    store = dist.HashStore()
    opened = [TcpTransport(rank, store, grace=0.5) for rank in range(size)]
    try:
        yield list(opened)
    finally:
        for transport in opened:
            transport.close()


on_both = pytest.mark.parametrize("network", [in_memory, over_zeromq])


def send(source: Transport, target: Transport, value: int, label: Label = LABEL) -> None:
    source.send(target.rank, label, np.array([value]), soon()).wait(soon())


def receive(source: Transport, target: Transport, label: Label = LABEL) -> int:
    return int(next_message(target, source.rank, label, soon()).view("i8")[0])


def nothing_comes(source: Transport, target: Transport) -> None:
    with pytest.raises(PeerLate):
        next_message(target, source.rank, LABEL, monotonic() + 0.2)


@on_both
def test_what_came_before_entering_is_never_handed_out(network: Network) -> None:
    def work() -> None:
        with network(2) as (here, there):
            send(there, here, 1)
            send(there, here, 2, OTHER)
            assert receive(there, here, OTHER) == 2  # so the first has come as well
            for transport in (here, there):
                transport.enter_epoch(1, [0, 1])
            nothing_comes(there, here)
            send(there, here, 3)
            assert receive(there, here) == 3
            send(here, there, 4)
            assert receive(here, there) == 4

    in_a_process(work)


@on_both
def test_messages_of_one_that_stays_behind_are_not_delivered(network: Network) -> None:
    """It sends for the older epoch, under a label that the new one uses too."""

    def work() -> None:
        with network(3) as (here, there, behind):
            for transport in (here, there, behind):
                transport.enter_epoch(4, [0, 1, 2])
            for transport in (here, there):
                transport.enter_epoch(5, [0, 1, 2])
            send(behind, here, 4)
            nothing_comes(behind, here)
            behind.enter_epoch(5, [0, 1, 2])
            send(behind, here, 5)
            assert receive(behind, here) == 5
            nothing_comes(behind, here)

    in_a_process(work)


@on_both
def test_messages_of_the_first_to_enter_are_delivered_when_the_others_enter(
    network: Network,
) -> None:
    """In the order in which it sent them, and one epoch after the other."""

    def work() -> None:
        with network(2) as (here, there):
            for epoch in (1, 2, 3):
                there.enter_epoch(epoch, [0, 1])
                for value in range(3):
                    send(there, here, 10 * epoch + value)
                nothing_comes(there, here)  # it is taken in all the same
            here.enter_epoch(2, [0, 1])
            assert [receive(there, here) for _ in range(3)] == [20, 21, 22]
            nothing_comes(there, here)
            here.enter_epoch(3, [0, 1])
            assert [receive(there, here) for _ in range(3)] == [30, 31, 32]

    in_a_process(work)


@on_both
def test_one_that_is_not_a_member_is_fenced_off(network: Network) -> None:
    """Even if it calls itself one, and until it is let in again."""

    def work() -> None:
        with network(3) as (here, there, outside):
            send(here, outside, 0)
            for transport in (here, there):
                transport.enter_epoch(1, [0, 1])
            outside.enter_epoch(1, [0, 1, 2])
            send(outside, here, 7)
            send(there, here, 8)
            assert receive(there, here) == 8
            text = "rank 2 isn't in membership epoch 1 of rank 0; exchange"
            with pytest.raises(TransportError, match=text):
                next_message(here, 2, LABEL, soon())
            with pytest.raises(TransportError, match=text):
                here.send(2, LABEL, np.zeros(1), soon())
            for transport in (here, there, outside):
                transport.enter_epoch(2, [0, 1, 2])
            for source, target in ((outside, here), (here, outside), (there, outside)):
                send(source, target, 9)
                assert receive(source, target) == 9

    in_a_process(work)


@on_both
def test_epoch_numbers_only_grow(network: Network) -> None:
    def work() -> None:
        with network(1) as [here]:
            here.enter_epoch(3, [0])
            for epoch in (2, 3):
                text = f"rank 0 can't enter membership epoch {epoch}: it is in 3; give each"
                with pytest.raises(TransportError, match=text):
                    here.enter_epoch(epoch, [0])
            here.close()
            with pytest.raises(
                TransportClosed, match="rank 0 enters membership epoch 4 after close"
            ):
                here.enter_epoch(4, [0])

    in_a_process(work)


def test_refusals_are_counted() -> None:
    inbox = Inbox(0)
    message = np.zeros(1)
    for peer in (1, 2, 2):
        inbox.put(Address(peer, LABEL), message)
    inbox.enter_epoch(2, [0, 1])
    inbox.put(Address(1, LABEL), message, 1)
    inbox.put(Address(2, LABEL), message, 2)
    assert inbox.refused == {RejectionReason.STALE: 4, RejectionReason.OUTSIDER: 1}


def test_what_is_early_is_bounded_in_number_and_bytes() -> None:
    def early(nbytes: int, sent: int) -> int:
        inbox = Inbox(0)
        message = np.broadcast_to(np.uint8(0), nbytes)
        for _ in range(sent):
            inbox.put(Address(1, LABEL), message, 1)
        kept = sent - inbox.refused[RejectionReason.TOO_EARLY]
        inbox.enter_epoch(1, [0, 1])
        for _ in range(kept):
            assert inbox.receive_now([Address(1, LABEL)]) is not None
        assert inbox.receive_now([Address(1, LABEL)]) is None
        return kept

    assert early(1, 2 * MAX_EARLY_MESSAGES) == MAX_EARLY_MESSAGES
    assert early(MAX_EARLY_BYTES // 3, 10) == 3


def test_what_is_sent_while_an_epoch_ends_is_given_back() -> None:
    """To a peer that takes nothing in: its queues are full, and the array is free all the same, to
    be changed and sent again. The peer finds only what was sent in its epoch."""

    def work() -> None:
        with over_zeromq(3) as (here, there, gone):
            array = np.zeros(10_000_000)
            sendings = [
                here.send(peer.rank, LABEL, array, soon()) for peer in (there, gone) for _ in "12"
            ]
            here.enter_epoch(1, [0, 1])
            for sending in sendings:
                sending.wait(soon())
            array.fill(1)
            there.enter_epoch(1, [0, 1])
            sending = here.send(1, LABEL, array, soon())
            came = next_message(there, 0, LABEL, soon()).view(array.dtype)
            assert (came.min(), came.max()) == (1, 1)
            sending.wait(soon())
            nothing_comes(here, there)

    in_a_process(work)


def test_a_member_that_is_back_elsewhere_is_found_in_the_next_epoch() -> None:
    def work() -> None:
        store = dist.HashStore()
        here, there = (TcpTransport(rank, store, grace=0.5) for rank in (0, 1))
        send(here, there, 1)
        assert receive(here, there) == 1
        there.close()
        with pytest.raises(PeerLost) as caught:
            next_message(here, 1, LABEL, soon())
        assert caught.value.peer == 1
        here.enter_epoch(1, [0])
        there = TcpTransport(1, store, grace=0.5)
        for transport in (here, there):
            transport.enter_epoch(2, [0, 1])
        for source, target in ((here, there), (there, here)):
            send(source, target, 2)
            assert receive(source, target) == 2
        here.close()
        there.close()

    in_a_process(work)


def test_ranks_meet_at_another_store_when_theirs_is_gone() -> None:
    def work() -> None:
        first = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ranks = [TcpTransport(rank, dist.TCPStore("127.0.0.1", first.port)) for rank in range(2)]
        del first
        second = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for transport in ranks:
            transport.use_store(dist.TCPStore("127.0.0.1", second.port))
        here, there = ranks
        for source, target in ((here, there), (there, here)):
            send(source, target, 3)
            assert receive(source, target) == 3
        here.close()
        there.close()

    in_a_process(work)


def test_wrappers_pass_it_on() -> None:
    network = MemoryNetwork([0, 1])
    here = RecordedTransport(FaultyTransport(network.transport(0), []))
    there = network.transport(1)
    there.enter_epoch(1, [0, 1])
    send(here, there, 0)
    here.enter_epoch(1, [0, 1])
    send(here, there, 1)
    assert receive(here, there) == 1
