"""Messages of the probe: over the transport that training will use, with an eye on the alarm.

Who waits looks around now and then: whether another rank has given up, and whether somebody calls
the roll. So nobody who merely waits for a dead rank is taken for one.
"""

from __future__ import annotations

import json
from time import monotonic
from typing import Any

import numpy as np

from thalweg.errors import FIRST_ROUND_BETWEEN_STEPS, PeerLate
from thalweg.members.abort import AbortFlag
from thalweg.transports import Array, Label, Sending, Transport

ORDERS_LABEL, ANSWERS_LABEL, PINGS_LABEL, PONGS_LABEL, BYTES_LABEL, CONFIRMATIONS_LABEL = (
    Label(0, FIRST_ROUND_BETWEEN_STEPS + number, 0, 0) for number in range(6)
)
PROBE_ABORT_POLL_SECONDS = 0.5  # seconds


class ProbeMessenger:
    """`patience` is how many seconds anything may take beyond what it should."""

    def __init__(self, transport: Transport, abort_flag: AbortFlag, patience: float) -> None:
        self.patience = patience
        self._transport = transport
        self._abort_flag = abort_flag

    def send(self, peer: int, label: Label, array: Array) -> Sending:
        return self._transport.send(peer, label, array, monotonic() + self.patience)

    def receive(self, peer: int, label: Label, seconds: float = 0.0) -> Array:
        """Within so many seconds and some patience, unless somebody gives up before."""
        deadline = monotonic() + seconds + self.patience
        while True:
            until = monotonic() + PROBE_ABORT_POLL_SECONDS
            try:
                return self._transport.receive(peer, label, min(until, deadline))
            except PeerLate:
                abort = self._abort_flag.poll()
                if abort is not None:
                    raise abort from None
                if monotonic() >= deadline:
                    raise

    def send_json(self, peer: int, label: Label, content: Any) -> None:
        text = np.frombuffer(json.dumps(content).encode(), np.uint8)
        self.send(peer, label, text).wait(monotonic() + self.patience)

    def receive_json(self, peer: int, label: Label, seconds: float = 0.0) -> Any:
        return json.loads(self.receive(peer, label, seconds).tobytes())
