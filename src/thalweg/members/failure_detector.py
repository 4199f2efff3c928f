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
from thalweg.transports.store_client import Store, StoreClient

# Seconds between two signs of a few ranks; of many, so that the store isn't busy.
HEARTBEAT_PERIOD_SECONDS = 0.15
HEARTBEATS_PER_SECOND = 150.0
HEARTBEAT_HISTORY_COUNT = 400  # gaps between signs, and durations of steps
MIN_SILENCE_TIMEOUT_SECONDS, MAX_SILENCE_TIMEOUT_SECONDS = (
    0.75,
    10.0,
)  # seconds after which a rank may count as silent
FIRST_SILENCE_TIMEOUT_SECONDS, MIN_HEARTBEAT_GAP_COUNT = (
    3.0,
    30,
)  # the same until so many gaps were seen: much happens at the start
SILENCE_P95_FACTOR = 4.0  # a silence is so many times the gap that 95 % of signs keep to
LONG_GAP_SECONDS = 0.5  # seconds; longer gaps are remembered by themselves
SILENCE_LONG_GAP_FACTOR, LONG_GAP_MEMORY_SECONDS = (
    1.5,
    120.0,
)  # a silence is longer than these, for so many seconds
BROKEN_CONNECTION_GAP_FACTOR = 2.5  # usual gaps, if a connection to that rank broke as well
MIN_HANG_TIMEOUT_SECONDS = 60.0  # seconds after which a rank may count as hanging
HANG_STEP_P95_FACTOR = 10.0
FIRST_HANG_TIMEOUT_SECONDS = 120.0  # while it isn't known how long steps take
SILENT_REASON = "silent"  # for so long, who may be dead, paused or cut off
MAX_OWN_DELAY_PERIODS_FACTOR = 4.0  # signs that this thread itself may be late
log = logging.getLogger("thalweg")


class HeartbeatMessage(NamedTuple):
    number: int
    step: int
    last: bool = False  # its part of the run is over, and it needs nobody any more

    def text(self) -> str:
        return f"{self.number} {self.step} {int(self.last)}"

    @classmethod
    def read(cls, text: bytes | str) -> HeartbeatMessage | None:
        """The sign in this text; None if there is none, whoever wrote it."""
        try:
            number, step, last = (int(part) for part in text.split())
        except ValueError:
            return None
        return cls(number, step, bool(last))


class _PeerHistory:
    """What was seen of one rank, and when it last changed."""

    def __init__(self, now: float) -> None:
        self.sign = HeartbeatMessage(-1, -1)
        self.came = now
        self.moved = now


class FailureDetector:
    """When signs came, by this rank's clock, and who is judged by that. For any thread."""

    def __init__(self) -> None:
        self._seen: dict[int, _PeerHistory] = {}
        self._gaps: deque[float] = deque(maxlen=HEARTBEAT_HISTORY_COUNT)
        self._long: deque[tuple[float, float]] = deque(
            maxlen=HEARTBEAT_HISTORY_COUNT
        )  # when, and how long
        self._gone: dict[int, float] = {}  # for how long those were silent who were left out
        self._steps: deque[float] = deque(maxlen=HEARTBEAT_HISTORY_COUNT)
        self._broken: set[int] = set()
        self._lock = Lock()

    def note(self, rank: int, sign: HeartbeatMessage, now: float) -> None:
        with self._lock:
            seen = self._seen.setdefault(rank, _PeerHistory(now))
            if rank in self._gone:  # it lives: the next silence is to be longer than that
                self._long.append((now, self._gone.pop(rank)))
            if sign.number != seen.sign.number:
                if seen.sign.number >= 0:
                    gap = now - seen.came
                    self._gaps.append(gap)
                    if gap > LONG_GAP_SECONDS:
                        self._long.append((now, gap))
                seen.came = now
                self._broken.discard(rank)
            if sign.step != seen.sign.step:
                if 0 <= seen.sign.step < sign.step:
                    self._steps.append((now - seen.moved) / (sign.step - seen.sign.step))
                seen.moved = now
            seen.sign = sign

    def reset_deadlines(self, now: float) -> None:
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

    def note_broken_connection(self, rank: int) -> None:
        """A connection to this rank broke: a shorter silence tells enough."""
        with self._lock:
            self._broken.add(rank)

    def failure_reason(self, rank: int, beat: float, now: float) -> str | None:
        """Why this rank counts as gone: what its signs say; None if they come."""
        with self._lock:
            seen = self._seen.get(rank)
            if seen is None or seen.sign.last:
                return None
            silence = now - seen.came
            if silence > self._longest_silence(beat, now):
                return f"{SILENT_REASON} for {silence:.1f} s"
            if rank in self._broken and silence > BROKEN_CONNECTION_GAP_FACTOR * max(
                beat, self._usual(beat)
            ):
                return f"gone: its connections broke, and it is silent for {silence:.1f} s"
            return None

    def is_hung(self, rank: int, now: float) -> bool:
        """Its signs come, but its step doesn't move."""
        with self._lock:
            seen = self._seen.get(rank)
            if seen is None or seen.sign.last:
                return False
            return now - seen.moved > self._longest_step()

    def has_finished(self, rank: int) -> bool:
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
        if len(self._gaps) < MIN_HEARTBEAT_GAP_COUNT:
            return max(FIRST_SILENCE_TIMEOUT_SECONDS, 2 * BROKEN_CONNECTION_GAP_FACTOR * beat)
        usual = self._usual(beat)
        rare = max(
            (gap for came, gap in self._long if now - came < LONG_GAP_MEMORY_SECONDS), default=0.0
        )
        shortest = max(
            MIN_SILENCE_TIMEOUT_SECONDS,
            2 * BROKEN_CONNECTION_GAP_FACTOR * beat if beat > HEARTBEAT_PERIOD_SECONDS else 0.0,
        )
        learnt = min(SILENCE_LONG_GAP_FACTOR * rare, FIRST_SILENCE_TIMEOUT_SECONDS)
        return min(MAX_SILENCE_TIMEOUT_SECONDS, max(shortest, SILENCE_P95_FACTOR * usual, learnt))

    def _usual(self, beat: float) -> float:
        """The gap that 95 % of signs keep to."""
        return float(np.percentile(self._gaps, 95)) if self._gaps else beat

    def _longest_step(self) -> float:
        if not self._steps:
            return FIRST_HANG_TIMEOUT_SECONDS
        return max(
            MIN_HANG_TIMEOUT_SECONDS, HANG_STEP_P95_FACTOR * float(np.percentile(self._steps, 95))
        )


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
        self.detector = FailureDetector()
        self.period = max(HEARTBEAT_PERIOD_SECONDS, size / HEARTBEATS_PER_SECOND)
        self.step = 0  # of the training thread
        self.answered = monotonic()  # by the store: what is judged is what was seen until then
        self.store_is_lost = False  # the store
        self.failure: RunError | None = None  # of this thread: nobody's death is noticed any more
        self.checks_for_end = False  # while this rank comes in
        self.has_ended = False  # the run
        self._rank = rank
        self._members = members
        self._on_round = look
        self._number = 0
        self._ended = Event()
        self._thread: Thread | None = None

    def begin(self, store: Store) -> None:
        """At this store from now on; one before it may be gone, with a thread that waits for it."""
        self._ended.set()
        self._ended = Event()
        self.detector.reset_deadlines(monotonic())
        self.store_is_lost = False
        self._thread = Thread(
            target=self._work, args=(store, self._ended), name="thalweg-heartbeat", daemon=True
        )
        self._thread.start()

    def failure_reason(self, rank: int) -> str | None:
        return self.detector.failure_reason(rank, self.period, self.answered)

    def is_hung(self, rank: int) -> bool:
        return self.detector.is_hung(rank, self.answered)

    def close(self, store: StoreClient | None = None) -> None:
        """With a last sign there, that nobody takes for silence."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(2 * self.period)
        if store is not None:
            last = HeartbeatMessage(self._number + 1, self.step, last=True).text()
            with suppress(RunError):  # it is gone
                store.call(lambda s: s.set(key_of(self._rank), last))

    def _work(self, store: Store, ended: Event) -> None:
        try:
            try:
                own = store.clone() if hasattr(store, "clone") else store
            except RuntimeError:  # it takes no more connections
                self.store_is_lost = self.store_is_lost or not ended.is_set()
                return
            while not ended.is_set():
                began = monotonic()
                try:
                    heard = self._round(own)
                except RuntimeError:  # torch's DistError is one
                    self.store_is_lost = self.store_is_lost or not ended.is_set()
                    return
                if ended.is_set():
                    return
                self._on_round(*heard)
                now = monotonic()
                if now - began > MAX_OWN_DELAY_PERIODS_FACTOR * self.period:
                    self.detector.reset_deadlines(now)
                self.answered = now
                ended.wait(self.period)
                if monotonic() - self.answered > MAX_OWN_DELAY_PERIODS_FACTOR * self.period:
                    self.detector.reset_deadlines(monotonic())
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
        store.set(key_of(self._rank), HeartbeatMessage(self._number, self.step).text())
        others = [rank for rank in self._members() if rank != self._rank]
        for rank, text in zip(others, _signs(store, others), strict=True):
            if text is not None and (sign := HeartbeatMessage.read(text)) is not None:
                self.detector.note(rank, sign, monotonic())
        if self.checks_for_end:
            self.has_ended = store.check([RUN_ENDED_KEY])
        return store.add(RENDEZVOUS_KEY, 0), store.add(JOIN_REQUEST_KEY, 0)


RENDEZVOUS_KEY = "muster"  # in the store: the number of the last one
# In the store: the number of the one that those ask for who want to come in.
JOIN_REQUEST_KEY = "wish"
RUN_ENDED_KEY = "ended"  # in the store: the step that all ended after


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
