"""Faults on purpose: a wrapper over any transport, so that no code has an `if` for tests.

A fault strikes one message: the `move`-th that a rank sends at a step, counted from 0. Each strikes
once, and `fired` says which have.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from time import sleep

from thalweg.transports import SENT, Array, Label, RecordedTransport, Sending, Transport


class Effect(Enum):
    LOSE = "the message is never sent"
    DELAY = "it is sent `seconds` later, and so is what follows"
    CUT_SHORT = "its last byte is missing"
    DIE = "the process is killed instead"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    rank: int
    step: int
    move: int
    effect: Effect
    seconds: float = 0.0


class FaultyTransport(RecordedTransport):
    def __init__(self, inner: Transport, faults: Collection[Fault]) -> None:
        super().__init__(inner)
        self.fired: list[Fault] = []
        self._waiting = {(f.step, f.move): f for f in faults if f.rank == inner.rank}
        self._step = -1
        self._sends = 0

    def send(self, peer: int, label: Label, array: Array, deadline: float) -> Sending:
        fault = self._waiting.pop((label.step, self._count(label.step)), None)
        if fault is None:
            return super().send(peer, label, array, deadline)
        self.fired.append(fault)
        match fault.effect:
            case Effect.LOSE:
                return SENT
            case Effect.DELAY:
                sleep(fault.seconds)
            case Effect.CUT_SHORT:
                array = array.view("u1")[:-1]
            case Effect.DIE:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().send(peer, label, array, deadline)

    def _count(self, step: int) -> int:
        if step != self._step:
            self._step, self._sends = step, 0
        self._sends += 1
        return self._sends - 1
