from __future__ import annotations

from time import monotonic

import numpy as np
import pytest

from tests.transports.ranks import LABEL, soon
from thalweg.errors import PeerLate
from thalweg.transports import MemoryNetwork


def test_a_sent_array_may_be_changed_at_once() -> None:
    network = MemoryNetwork([0, 1])
    array = np.array([1.0])
    network.transport(0).send(1, LABEL, array, soon())
    array[0] = 2.0
    assert network.transport(1).receive(0, LABEL, soon())[0] == 1.0


def test_a_cut_pair_loses_messages_one_way() -> None:
    network = MemoryNetwork([0, 1], cut=[(1, 0)])
    network.transport(1).send(0, LABEL, np.array([1]), soon())
    network.transport(0).send(1, LABEL, np.array([2]), soon())
    with pytest.raises(PeerLate):
        network.transport(0).receive(1, LABEL, monotonic() + 0.05)
    assert network.transport(1).receive(0, LABEL, soon())[0] == 2
