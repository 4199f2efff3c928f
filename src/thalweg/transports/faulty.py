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

from thalweg.transports.line import Store
from thalweg.transports.transport import SENT, Address, Array, Label, Landings, Sending, Transport


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


class FaultyTransport:
    def __init__(self, inner: Transport, faults: Collection[Fault]) -> None:
        self.fired: list[Fault] = []
        self._inner = inner
        self._waiting = {(f.step, f.move): f for f in faults if f.rank == inner.rank}
        self._step = -1
        self._sends = 0

    @property
    def rank(self) -> int:
        return self._inner.rank

    def send(self, peer: int, label: Label, array: Array, deadline: float) -> Sending:
        fault = self._waiting.pop((label.step, self._count(label.step)), None)
        if fault is None:
            return self._inner.send(peer, label, array, deadline)
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
        return self._inner.send(peer, label, array, deadline)

    def receive(self, peer: int, label: Label, deadline: float) -> Array:
        return self._inner.receive(peer, label, deadline)

    def receive_any(
        self, wanted: Collection[Address], deadline: float, landings: Landings | None = None
    ) -> tuple[Address, Array]:
        return self._inner.receive_any(wanted, deadline, landings)

    def enter(self, formation: int, members: Collection[int]) -> None:
        self._inner.enter(formation, members)

    def look_about(self) -> None:
        self._inner.look_about()

    def meet_at(self, store: Store) -> None:
        self._inner.meet_at(store)

    def close(self) -> None:
        self._inner.close()

    def _count(self, step: int) -> int:
        if step != self._step:
            self._step, self._sends = step, 0
        self._sends += 1
        return self._sends - 1
