"""Signs of life: every rank writes one into the store a few times a second, and reads the others'.

A sign is a number that grows, and the step that the training thread is at. Whose number stands
still is silent: dead, paused or cut off. Whose number grows while its step doesn't, though others
wait for it, hangs. How long is too long follows from how regularly signs and steps came before.

A thread of its own does this, on a connection of its own. While the store doesn't answer, nobody
is judged: then it is this rank that is cut off. A thread that was held up itself forgives all. If
it fails, its rank ends with the error: a rank that can't see others die would wait for them.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from threading import Event, Lock, Thread
from time import monotonic
from typing import NamedTuple

import numpy as np

from thalweg.errors import RunError
from thalweg.transports.store_client import Line, Store

BEAT = 0.15  # seconds between two signs of a few ranks; of many, so that the store isn't busy
RANKS_A_SECOND = 150.0
REMEMBERED = 400  # gaps between signs, and durations of steps
SHORTEST_SILENCE, LONGEST_SILENCE = 0.75, 10.0  # seconds after which a rank may count as silent
FIRST_SILENCE, ENOUGH = 3.0, 30  # the same until so many gaps were seen: much happens at the start
TIMES_USUAL = 4.0  # a silence is so many times the gap that 95 % of signs keep to
LONG = 0.5  # seconds; longer gaps are remembered by themselves
TIMES_LONGEST, FOR_A_WHILE = 1.5, 120.0  # a silence is longer than these, for so many seconds
BROKEN_OFF = 2.5  # usual gaps, if a connection to that rank broke as well
SHORTEST_HANG = 60.0  # seconds after which a rank may count as hanging
TIMES_A_STEP = 10.0
FIRST_HANG = 120.0  # while it isn't known how long steps take
SILENT = "silent"  # for so long, who may be dead, paused or cut off
HELD_UP = 4.0  # signs that this thread itself may be late
log = logging.getLogger("thalweg")


class Sign(NamedTuple):
    number: int
    step: int
    last: bool = False  # its part of the run is over, and it needs nobody any more

    def text(self) -> str:
        return f"{self.number} {self.step} {int(self.last)}"

    @classmethod
    def read(cls, text: bytes | str) -> Sign | None:
        """The sign in this text; None if there is none, whoever wrote it."""
        try:
            number, step, last = (int(part) for part in text.split())
        except ValueError:
            return None
        return cls(number, step, bool(last))


class _Seen:
    """What was seen of one rank, and when it last changed."""

    def __init__(self, now: float) -> None:
        self.sign = Sign(-1, -1)
        self.came = now
        self.moved = now


class Records:
    """When signs came, by this rank's clock, and who is judged by that. For any thread."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}
        self._gaps: deque[float] = deque(maxlen=REMEMBERED)
        self._long: deque[tuple[float, float]] = deque(maxlen=REMEMBERED)  # when, and how long
        self._gone: dict[int, float] = {}  # for how long those were silent who were left out
        self._steps: deque[float] = deque(maxlen=REMEMBERED)
        self._broken: set[int] = set()
        self._lock = Lock()

    def note(self, rank: int, sign: Sign, now: float) -> None:
        with self._lock:
            seen = self._seen.setdefault(rank, _Seen(now))
            if rank in self._gone:  # it lives: the next silence is to be longer than that
                self._long.append((now, self._gone.pop(rank)))
            if sign.number != seen.sign.number:
                if seen.sign.number >= 0:
                    gap = now - seen.came
                    self._gaps.append(gap)
                    if gap > LONG:
                        self._long.append((now, gap))
                seen.came = now
                self._broken.discard(rank)
            if sign.step != seen.sign.step:
                if 0 <= seen.sign.step < sign.step:
                    self._steps.append((now - seen.moved) / (sign.step - seen.sign.step))
                seen.moved = now
            seen.sign = sign

    def forgive(self, now: float) -> None:
        """Nobody could be seen for a while: all have their time anew."""
        with self._lock:
            for seen in self._seen.values():
                seen.came = seen.moved = now

    def forget(self, rank: int, now: float) -> None:
        """It was left out, or comes anew."""
        with self._lock:
            seen = self._seen.pop(rank, None)
            if seen is not None:
                self._gone[rank] = now - seen.came
            self._broken.discard(rank)

    def broke(self, rank: int) -> None:
        """A connection to this rank broke: a shorter silence tells enough."""
        with self._lock:
            self._broken.add(rank)

    def why_gone(self, rank: int, beat: float, now: float) -> str | None:
        """Why this rank counts as gone: what its signs say; None if they come."""
        with self._lock:
            seen = self._seen.get(rank)
            if seen is None or seen.sign.last:
                return None
            silence = now - seen.came
            if silence > self._longest_silence(beat, now):
                return f"{SILENT} for {silence:.1f} s"
            if rank in self._broken and silence > BROKEN_OFF * max(beat, self._usual(beat)):
                return f"gone: its connections broke, and it is silent for {silence:.1f} s"
            return None

    def hangs(self, rank: int, now: float) -> bool:
        """Its signs come, but its step doesn't move."""
        with self._lock:
            seen = self._seen.get(rank)
            if seen is None or seen.sign.last:
                return False
            return now - seen.moved > self._longest_step()

    def is_through(self, rank: int) -> bool:
        """It has given its last sign."""
        with self._lock:
            seen = self._seen.get(rank)
            return seen is not None and seen.sign.last

    @property
    def furthest(self) -> int:
        """The highest step that was seen of anybody."""
        with self._lock:
            return max((seen.sign.step for seen in self._seen.values()), default=0)

    @property
    def patience(self) -> float:
        """Seconds for a step that others wait for."""
        with self._lock:
            return self._longest_step()

    def _longest_silence(self, beat: float, now: float) -> float:
        if len(self._gaps) < ENOUGH:
            return max(FIRST_SILENCE, 2 * BROKEN_OFF * beat)
        usual = self._usual(beat)
        rare = max((gap for came, gap in self._long if now - came < FOR_A_WHILE), default=0.0)
        shortest = max(SHORTEST_SILENCE, 2 * BROKEN_OFF * beat if beat > BEAT else 0.0)
        learnt = min(TIMES_LONGEST * rare, FIRST_SILENCE)
        return min(LONGEST_SILENCE, max(shortest, TIMES_USUAL * usual, learnt))

    def _usual(self, beat: float) -> float:
        """The gap that 95 % of signs keep to."""
        return float(np.percentile(self._gaps, 95)) if self._gaps else beat

    def _longest_step(self) -> float:
        if not self._steps:
            return FIRST_HANG
        return max(SHORTEST_HANG, TIMES_A_STEP * float(np.percentile(self._steps, 95)))


class Heartbeat:
    """`members` are the ranks to watch; `look` is called after each round of signs, with the
    numbers of the last muster that was called, and of that which is asked for. `begin` starts
    it."""

    def __init__(
        self,
        rank: int,
        size: int,
        members: Callable[[], Collection[int]],
        look: Callable[[int, int], None],
    ) -> None:
        self.records = Records()
        self.beat = max(BEAT, size / RANKS_A_SECOND)
        self.step = 0  # of the training thread
        self.answered = monotonic()  # by the store: what is judged is what was seen until then
        self.lost = False  # the store
        self.failure: RunError | None = None  # of this thread: nobody's death is noticed any more
        self.asks_for_the_end = False  # while this rank comes in
        self.has_ended = False  # the run
        self._rank = rank
        self._members = members
        self._look = look
        self._number = 0
        self._ended = Event()
        self._thread: Thread | None = None

    def begin(self, store: Store) -> None:
        """At this store from now on; one before it may be gone, with a thread that waits for it."""
        self._ended.set()
        self._ended = Event()
        self.records.forgive(monotonic())
        self.lost = False
        self._thread = Thread(
            target=self._work, args=(store, self._ended), name="thalweg-heartbeat", daemon=True
        )
        self._thread.start()

    def why_gone(self, rank: int) -> str | None:
        return self.records.why_gone(rank, self.beat, self.answered)

    def hangs(self, rank: int) -> bool:
        return self.records.hangs(rank, self.answered)

    def close(self, store: Line | None = None) -> None:
        """With a last sign there, that nobody takes for silence."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(2 * self.beat)
        if store is not None:
            last = Sign(self._number + 1, self.step, last=True).text()
            with suppress(RunError):  # it is gone
                store.ask(lambda s: s.set(key_of(self._rank), last))

    def _work(self, store: Store, ended: Event) -> None:
        try:
            try:
                own = store.clone() if hasattr(store, "clone") else store
            except RuntimeError:  # it takes no more connections
                self.lost = self.lost or not ended.is_set()
                return
            while not ended.is_set():
                began = monotonic()
                try:
                    heard = self._round(own)
                except RuntimeError:  # torch's DistError is one
                    self.lost = self.lost or not ended.is_set()
                    return
                if ended.is_set():
                    return
                self._look(*heard)
                now = monotonic()
                if now - began > HELD_UP * self.beat:
                    self.records.forgive(now)
                self.answered = now
                ended.wait(self.beat)
                if monotonic() - self.answered > HELD_UP * self.beat:
                    self.records.forgive(monotonic())
        except Exception as error:
            log.exception("the failure detector of rank %d has failed", self._rank)
            self.failure = RunError(
                f"the failure detector of rank {self._rank} has failed: {type(error).__name__}: "
                f"{error}",
                "start this rank again; what it logged tells where the error is",
            )

    def _round(self, store: Store) -> tuple[int, int]:
        """The last muster that was called, and the last that was asked for."""
        self._number += 1
        store.set(key_of(self._rank), Sign(self._number, self.step).text())
        others = [rank for rank in self._members() if rank != self._rank]
        for rank, text in zip(others, _signs(store, others), strict=True):
            if text is not None and (sign := Sign.read(text)) is not None:
                self.records.note(rank, sign, monotonic())
        if self.asks_for_the_end:
            self.has_ended = store.check([ENDED])
        return store.add(CALLED, 0), store.add(WISHED, 0)


CALLED = "muster"  # in the store: the number of the last one
WISHED = "wish"  # in the store: the number of the one that those ask for who want to come in
ENDED = "ended"  # in the store: the step that all ended after


def key_of(rank: int) -> str:
    return f"sign/{rank}"


def _signs(store: Store, ranks: Sequence[int]) -> list[bytes | None]:
    """None for a rank that hasn't given one: asking for it would wait."""
    keys = [key_of(rank) for rank in ranks]
    if not keys:
        return []
    if store.check(keys):
        return list(store.multi_get(keys))
    return [store.get(key) if store.check([key]) else None for key in keys]
