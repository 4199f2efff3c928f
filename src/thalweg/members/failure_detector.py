"""Heartbeats and the failure detector: every rank writes heartbeats to the store and reads others'.

A heartbeat is a growing number and the step of the training thread. A rank whose number stops is
silent: dead, paused or partitioned, or its host has no processor time for it. The kernel tells
these apart: the connections of a process that ends break at once, and so do those that its host no
longer acknowledges, after some seconds. So a silent rank has failed soon after a connection to it
broke, and otherwise only after some seconds. A rank whose number grows while its step doesn't,
though others wait for it, hangs. The time limits follow from the intervals between heartbeats and
steps so far.

The heartbeat has its own thread and store connection. While the store doesn't answer, no rank is
suspected: this rank itself is partitioned. After a delay of its own the thread resets all time
limits. If it fails, its rank ends with the error: it would wait for dead ranks.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from threading import Event, RLock, Thread
from time import monotonic
from typing import NamedTuple

import numpy as np

from thalweg.errors import RunError
from thalweg.transports.store_client import Store, StoreClient

HEARTBEAT_PERIOD_SECONDS = 0.15  # for a few ranks
HEARTBEATS_PER_SECOND = 150.0  # of all ranks together: limits the load of the store
HEARTBEAT_HISTORY_COUNT = 400  # heartbeat intervals, and step times
# Of a rank to which no connection broke: a loaded machine withholds the processor for a second.
MIN_SILENCE_TIMEOUT_SECONDS, MAX_SILENCE_TIMEOUT_SECONDS = 3.0, 10.0
MIN_SILENCE_TIMEOUT_PERIODS = 5.0  # of many ranks, whose heartbeats are rare
SILENCE_P95_FACTOR = 4.0  # ratio of the timeout to the 95th percentile of heartbeat intervals
BROKEN_CONNECTION_GAP_FACTOR = 2.5  # as SILENCE_P95_FACTOR, after a connection to the rank broke
MIN_HANG_TIMEOUT_SECONDS = 60.0
HANG_STEP_P95_FACTOR = 10.0
FIRST_HANG_TIMEOUT_SECONDS = 120.0  # before any step has been measured
SILENT_REASON = "silent"  # begins the reason of a rank that is dead, paused or partitioned
MAX_OWN_DELAY_PERIODS_FACTOR = 4.0  # a longer delay of this thread resets all time limits
log = logging.getLogger("thalweg")


class HeartbeatMessage(NamedTuple):
    number: int
    step: int
    last: bool = False  # the rank has finished and needs no other rank

    def text(self) -> str:
        return f"{self.number} {self.step} {int(self.last)}"

    @classmethod
    def read(cls, text: bytes | str) -> HeartbeatMessage | None:
        """The heartbeat in this text; None if it isn't one."""
        try:
            number, step, last = (int(part) for part in text.split())
        except ValueError:
            return None
        return cls(number, step, bool(last))


@dataclass(slots=True)
class _PeerHistory:
    """The last heartbeat of one rank, and when its number and its step last changed."""

    arrived: float  # when the number last changed
    advanced: float  # when the step last changed
    last: HeartbeatMessage = HeartbeatMessage(-1, -1)


class FailureDetector:
    """The arrival times of heartbeats by this rank's clock, and the ranks that are suspected to
    have failed. Any thread may use it."""

    def __init__(self) -> None:
        self._peers: dict[int, _PeerHistory] = {}
        self._gaps: deque[float] = deque(maxlen=HEARTBEAT_HISTORY_COUNT)
        self._step_seconds: deque[float] = deque(maxlen=HEARTBEAT_HISTORY_COUNT)
        self._broken: set[int] = set()
        self._lock = RLock()

    def note(self, rank: int, heartbeat: HeartbeatMessage, now: float) -> None:
        with self._lock:
            peer = self._peers.setdefault(rank, _PeerHistory(now, now))
            if heartbeat.number != peer.last.number:
                if peer.last.number >= 0:
                    self._gaps.append(now - peer.arrived)
                peer.arrived = now
                self._broken.discard(rank)
            if heartbeat.step != peer.last.step:
                if 0 <= peer.last.step < heartbeat.step:
                    steps = heartbeat.step - peer.last.step
                    self._step_seconds.append((now - peer.advanced) / steps)
                peer.advanced = now
            peer.last = heartbeat

    def reset_deadlines(self, now: float) -> None:
        """Restart all time limits, after no heartbeat could be read for a while."""
        with self._lock:
            for peer in self._peers.values():
                peer.arrived = peer.advanced = now

    def forget(self, rank: int) -> None:
        """Drop the history of a rank that was evicted, or joins."""
        with self._lock:
            self._peers.pop(rank, None)
            self._broken.discard(rank)

    def note_broken_connections(self, *ranks: int) -> None:
        """Shorten the silence timeout of these ranks: connections to them broke."""
        with self._lock:
            self._broken.update(ranks)

    def failure_reason(self, rank: int, period: float, now: float) -> str | None:
        """Why this rank is suspected to have failed; None if its heartbeats arrive."""
        with self._lock:
            peer = self._peers.get(rank)
            if peer is None or peer.last.last:
                return None
            silence = now - peer.arrived
            p95 = float(np.percentile(self._gaps, 95)) if self._gaps else period
            if silence > max(
                MIN_SILENCE_TIMEOUT_SECONDS,
                MIN_SILENCE_TIMEOUT_PERIODS * period,
                min(MAX_SILENCE_TIMEOUT_SECONDS, SILENCE_P95_FACTOR * p95),
            ):
                return f"{SILENT_REASON} for {silence:.1f} s"
            if rank in self._broken and silence > BROKEN_CONNECTION_GAP_FACTOR * max(period, p95):
                return f"connections broke, silent for {silence:.1f} s"
            return None

    def is_hung(self, rank: int, now: float) -> bool:
        """True if the rank's heartbeats arrive but its step doesn't change."""
        with self._lock:
            peer = self._peers.get(rank)
            if peer is None or peer.last.last:
                return False
            return now - peer.advanced > self.hang_timeout

    def has_finished(self, rank: int) -> bool:
        """True if the rank has sent its last heartbeat."""
        with self._lock:
            peer = self._peers.get(rank)
            return peer is not None and peer.last.last

    @property
    def furthest(self) -> int:
        """The highest step in any rank's heartbeat."""
        with self._lock:
            return max((peer.last.step for peer in self._peers.values()), default=0)

    def stalled_seconds(self, now: float) -> float:
        """The time since the last step of the rank that has taken none for longest."""
        with self._lock:
            return max((now - peer.advanced for peer in self._peers.values()), default=0.0)

    @property
    def hang_timeout(self) -> float:
        """The time limit in seconds of a step that others wait for."""
        with self._lock:
            if not self._step_seconds:
                return FIRST_HANG_TIMEOUT_SECONDS
            p95 = float(np.percentile(self._step_seconds, 95))
            return max(MIN_HANG_TIMEOUT_SECONDS, HANG_STEP_P95_FACTOR * p95)


class Heartbeat:
    """The heartbeat thread of one rank. `members` are the ranks to watch; `on_round` is called
    after each round of heartbeats with the numbers of the last rendezvous that was announced and of
    the one that joining ranks request. `begin` starts it."""

    def __init__(
        self,
        rank: int,
        size: int,
        members: Callable[[], Collection[int]],
        on_round: Callable[[int, int], None],
    ) -> None:
        self.detector = FailureDetector()
        self.period = max(HEARTBEAT_PERIOD_SECONDS, size / HEARTBEATS_PER_SECOND)
        self.step = 0  # of the training thread
        self.answered = monotonic()  # time of the store's last answer: ranks are judged as of then
        self.store_is_lost = False
        self.failure: RunError | None = None  # of this thread, which then detects nothing
        self.checks_for_end = False  # while this rank joins
        self.has_ended = False  # the run
        self._rank = rank
        self._members = members
        self._on_round = on_round
        self._number = 0
        self._ended = Event()
        self._thread: Thread | None = None

    def begin(self, store: Store) -> None:
        """Start a thread on this store; the previous one may hang with its store, and ends."""
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

    def close(self, store: StoreClient | None = None) -> None:
        """Stop; a last heartbeat to `store` keeps others from suspecting this rank."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(2 * self.period)
        if store is not None:
            last = HeartbeatMessage(self._number + 1, self.step, last=True).text()
            with suppress(RunError):  # the store is lost
                store.call(lambda s: s.set(key_of(self._rank), last))

    def _work(self, store: Store, ended: Event) -> None:
        try:
            own: Store | None = None
            while not ended.is_set():
                began = monotonic()
                try:
                    if own is None:
                        own = store.clone() if hasattr(store, "clone") else store
                    numbers = self._round(own)
                except RuntimeError:  # it takes no more connections, or is lost (DistError)
                    self.store_is_lost = self.store_is_lost or not ended.is_set()
                    return
                if ended.is_set():
                    return
                self._on_round(*numbers)
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
                "start this rank again; its log has the traceback",
            )

    def _round(self, store: Store) -> tuple[int, int]:
        """Write and read heartbeats; the last rendezvous announced, and the last requested."""
        self._number += 1
        store.set(key_of(self._rank), HeartbeatMessage(self._number, self.step).text())
        others = [rank for rank in self._members() if rank != self._rank]
        for rank, text in read_each(store, key_of, others).items():
            if (heartbeat := HeartbeatMessage.read(text)) is not None:
                self.detector.note(rank, heartbeat, monotonic())
        if self.checks_for_end:
            self.has_ended = store.check([RUN_ENDED_KEY])
        return store.add(RENDEZVOUS_KEY, 0), store.add(JOIN_REQUEST_KEY, 0)


# Keys of the store.
RENDEZVOUS_KEY = "rendezvous"  # number of the last rendezvous
JOIN_REQUEST_KEY = "join"  # number of the rendezvous that joining ranks request
RUN_ENDED_KEY = "ended"  # last step of the run


def key_of(rank: int) -> str:
    return f"heartbeat/{rank}"


def read_each(store: Store, key_of: Callable[[int], str], ranks: Iterable[int]) -> dict[int, bytes]:
    """The values at the keys of these ranks, by rank. A rank without a value is left out, as
    reading it would block."""
    keys = {rank: key_of(rank) for rank in ranks}
    if keys and store.check(list(keys.values())):
        return dict(zip(keys, store.multi_get(list(keys.values())), strict=True))
    return {rank: store.get(key) for rank, key in keys.items() if store.check([key])}
