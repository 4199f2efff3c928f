from __future__ import annotations

import threading
from time import monotonic

import numpy as np
import pytest

from thalweg.errors import PeerLate, TransportClosed
from thalweg.transports import Address, Label, MemoryNetwork

LABEL = Label(0, 0, 0, 1)


def soon() -> float:
    return monotonic() + 5


def test_messages_under_one_label_keep_their_order() -> None:
    network = MemoryNetwork([0, 1])
    sender, receiver = network.transport(0), network.transport(1)
    for value in range(3):
        sender.send(1, LABEL, np.array([value]), soon())
    assert [receiver.receive(0, LABEL, soon())[0] for _ in range(3)] == [0, 1, 2]


def test_a_sent_array_may_be_changed_at_once() -> None:
    network = MemoryNetwork([0, 1])
    array = np.array([1.0])
    network.transport(0).send(1, LABEL, array, soon())
    array[0] = 2.0
    assert network.transport(1).receive(0, LABEL, soon())[0] == 1.0


def test_any_of_these_waits_for_the_first_to_come() -> None:
    network = MemoryNetwork([0, 1, 2])
    receiver = network.transport(0)
    wanted = [Address(1, LABEL), Address(2, LABEL)]
    thread = threading.Timer(0.05, network.transport(2).send, (0, LABEL, np.array([7]), soon()))
    thread.start()
    address, array = receiver.receive_any(wanted, soon())
    thread.join()
    assert address == Address(2, LABEL)
    assert array[0] == 7


def test_other_labels_and_other_senders_are_left_where_they_are() -> None:
    network = MemoryNetwork([0, 1, 2])
    network.transport(1).send(0, Label(0, 1, 0, 1), np.array([1]), soon())
    network.transport(2).send(0, LABEL, np.array([2]), soon())
    network.transport(1).send(0, LABEL, np.array([3]), soon())
    receiver = network.transport(0)
    assert receiver.receive(1, LABEL, soon())[0] == 3
    assert receiver.receive(2, LABEL, soon())[0] == 2
    assert receiver.receive(1, Label(0, 1, 0, 1), soon())[0] == 1


def test_a_deadline_passes() -> None:
    receiver = MemoryNetwork([0, 1]).transport(0)
    start = monotonic()
    with pytest.raises(
        PeerLate, match=r"rank 0 waited at step 0, round 0, for rank 1, .*; look at"
    ) as caught:
        receiver.receive(1, LABEL, start + 0.05)
    assert (caught.value.rank, caught.value.peers) == (0, (1,))
    assert 0.05 <= monotonic() - start < 2


def test_closing_wakes_who_waits() -> None:
    network = MemoryNetwork([0, 1])
    threading.Timer(0.05, network.transport(0).close).start()
    with pytest.raises(TransportClosed):
        network.transport(0).receive(1, LABEL, soon())
    with pytest.raises(TransportClosed):
        network.transport(0).send(1, LABEL, np.array([1]), soon())


def test_a_cut_pair_loses_messages_one_way() -> None:
    network = MemoryNetwork([0, 1], cut=[(1, 0)])
    network.transport(1).send(0, LABEL, np.array([1]), soon())
    network.transport(0).send(1, LABEL, np.array([2]), soon())
    with pytest.raises(PeerLate):
        network.transport(0).receive(1, LABEL, monotonic() + 0.05)
    assert network.transport(1).receive(0, LABEL, soon())[0] == 2
