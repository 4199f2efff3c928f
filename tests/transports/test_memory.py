from __future__ import annotations

import numpy as np

from tests.transports.ranks import LABEL, next_message, soon
from thalweg.transports import MemoryNetwork


def test_a_sent_array_may_be_changed_at_once() -> None:
    network = MemoryNetwork([0, 1])
    array = np.array([1.0])
    network.transport(0).send(1, LABEL, array, soon())
    array[0] = 2.0
    assert next_message(network.transport(1), 0, LABEL, soon())[0] == 1.0
