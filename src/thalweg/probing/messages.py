"""Messages of the probe: over the transport that training will use, with an eye on the alarm.

Who waits looks around now and then: whether another rank has given up, and whether somebody calls
the roll. So nobody who merely waits for a dead rank is taken for one.
"""

from __future__ import annotations

import json
from time import monotonic
from typing import Any

import numpy as np

from thalweg.errors import BETWEEN_STEPS, PeerLate
from thalweg.members.abort import Alarm
from thalweg.transports import Array, Label, Sending, Transport

ORDERS, ANSWERS, PINGS, PONGS, BYTES, CONFIRMATIONS = (
    Label(0, BETWEEN_STEPS + number, 0, 0) for number in range(6)
)
LOOK_AROUND = 0.5  # seconds


class Exchange:
    """`patience` is how many seconds anything may take beyond what it should."""

    def __init__(self, transport: Transport, alarm: Alarm, patience: float) -> None:
        self.patience = patience
        self._transport = transport
        self._alarm = alarm

    def send(self, peer: int, label: Label, array: Array) -> Sending:
        return self._transport.send(peer, label, array, monotonic() + self.patience)

    def receive(self, peer: int, label: Label, seconds: float = 0.0) -> Array:
        """Within so many seconds and some patience, unless somebody gives up before."""
        deadline = monotonic() + seconds + self.patience
        while True:
            until = monotonic() + LOOK_AROUND
            try:
                return self._transport.receive(peer, label, min(until, deadline))
            except PeerLate:
                heard = self._alarm.heard()
                if heard is not None:
                    raise heard from None
                if monotonic() >= deadline:
                    raise

    def tell(self, peer: int, label: Label, content: Any) -> None:
        text = np.frombuffer(json.dumps(content).encode(), np.uint8)
        self.send(peer, label, text).wait(monotonic() + self.patience)

    def hear(self, peer: int, label: Label, seconds: float = 0.0) -> Any:
        return json.loads(self.receive(peer, label, seconds).tobytes())
