"""A payload as frames of bounded length, and back.

No frame is longer than its bound: ZeroMQ sets memory aside for a frame as soon as its length has
come, also a stranger's, and drops the connection if that is more than the socket allows. A message
says how long it is in all, so that one that was cut short or added to is known.

Under CURVE frames are short for another reason: one is decrypted when all of it has come, and the
next should be on its way meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import zmq

from thalweg.transports.refusal import Refusal
from thalweg.transports.transport import Array

PLAIN_FRAME = 64 << 20  # bytes
CURVE_FRAME = 256 << 10
OVERHEAD = 1024  # bytes that CURVE and ZMTP may add to a frame, and more than any handshake has


def frame_nbytes(*, curve: bool) -> int:
    """The longest frame that is sent."""
    return CURVE_FRAME if curve else PLAIN_FRAME


def cut(payload: memoryview, nbytes: int) -> list[memoryview]:
    """Into frames of at most so many bytes; at least one."""
    return [payload[at : at + nbytes] for at in range(0, max(1, payload.nbytes), nbytes)]


def joined(frames: Sequence[zmq.Frame], nbytes: int) -> Array | Refusal:
    """The payload, which its header says has so many bytes. A copy only if it has several
    frames."""
    came = sum(len(frame.buffer) for frame in frames)
    if came != nbytes:
        return Refusal.TRUNCATED if came < nbytes else Refusal.TOO_LARGE
    if len(frames) == 1:
        return np.frombuffer(frames[0].buffer, np.uint8)
    whole = np.empty(nbytes, np.uint8)
    at = 0
    for frame in frames:
        part = np.frombuffer(frame.buffer, np.uint8)
        whole[at : at + len(part)] = part
        at += len(part)
    return whole
