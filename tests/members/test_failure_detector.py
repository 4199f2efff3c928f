"""Who counts as gone, by made-up clocks; and the thread that writes heartbeats, on real stores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from threading import Event
from time import monotonic, sleep
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from thalweg.members import failure_detector
from thalweg.members.failure_detector import (
    BROKEN_CONNECTION_GAP_FACTOR,
    FIRST_HANG_TIMEOUT_SECONDS,
    HANG_STEP_P95_FACTOR,
    HEARTBEAT_PERIOD_SECONDS,
    JOIN_REQUEST_KEY,
    MAX_SILENCE_TIMEOUT_SECONDS,
    MIN_HANG_TIMEOUT_SECONDS,
    MIN_SILENCE_TIMEOUT_PERIODS,
    MIN_SILENCE_TIMEOUT_SECONDS,
    RENDEZVOUS_KEY,
    RUN_ENDED_KEY,
    SILENCE_P95_FACTOR,
    FailureDetector,
    Heartbeat,
    HeartbeatMessage,
    key_of,
)
from thalweg.transports.store_client import StoreClient

PATIENCE = 30.0  # seconds
MANY = 40  # heartbeats
LITTLE = 2.0**-10  # seconds: clocks here are exact
EXACT = st.integers(1, 1000).map(lambda n: n / 64)  # seconds


def seen(
    gaps: list[float], rank: int = 1, steps: list[int] | None = None
) -> tuple[FailureDetector, float]:
    """What came of a rank at such gaps, and when it last came."""
    records, now = FailureDetector(), 0.0
    at = steps or [0] * (len(gaps) + 1)
    records.note(rank, HeartbeatMessage(0, at[0]), now)
    for number, gap in enumerate(gaps, start=1):
        now += gap
        records.note(rank, HeartbeatMessage(number, at[number]), now)
    return records, now


def is_gone(
    records: FailureDetector, now: float, rank: int = 1, period: float = HEARTBEAT_PERIOD_SECONDS
) -> bool:
    return records.failure_reason(rank, period, now) is not None


# Silence


def test_a_rank_that_a_loaded_machine_lets_wait_is_not_evicted() -> None:
    """Its heartbeats were regular until then, and its connections haven't broken."""
    for count in (1, MANY):
        records, last = seen([HEARTBEAT_PERIOD_SECONDS] * count)
        assert not is_gone(records, last + MIN_SILENCE_TIMEOUT_SECONDS)
        assert is_gone(records, last + MIN_SILENCE_TIMEOUT_SECONDS + LITTLE)
        late = last + 2 * MIN_SILENCE_TIMEOUT_SECONDS
        assert records.failure_reason(1, HEARTBEAT_PERIOD_SECONDS, late) == "silent for 6.0 s"


@given(EXACT)
def test_how_long_is_too_long_follows_from_how_regularly_heartbeats_came(gap: float) -> None:
    records, last = seen([gap] * MANY)
    longest = min(
        MAX_SILENCE_TIMEOUT_SECONDS, max(MIN_SILENCE_TIMEOUT_SECONDS, SILENCE_P95_FACTOR * gap)
    )
    assert not is_gone(records, last + longest)
    assert is_gone(records, last + longest + LITTLE)


def test_where_heartbeats_are_rare_silence_is_longer() -> None:
    """Of a thousand ranks, so that the store isn't busy."""
    period = Heartbeat(0, 1000, lambda: (), lambda announced, requested: None).period
    assert period > 5
    for count in (1, MANY):
        records, last = seen([period] * count)
        longest = MIN_SILENCE_TIMEOUT_PERIODS * period
        assert not is_gone(records, last + longest - LITTLE, period=period)
        assert is_gone(records, last + longest + LITTLE, period=period)
    few = Heartbeat(0, 4, lambda: (), lambda announced, requested: None)
    assert few.period == HEARTBEAT_PERIOD_SECONDS


def test_a_heartbeat_that_does_not_grow_is_none() -> None:
    records, last = seen([HEARTBEAT_PERIOD_SECONDS])
    records.note(1, HeartbeatMessage(1, 0), last + MIN_SILENCE_TIMEOUT_SECONDS)
    assert is_gone(records, last + MIN_SILENCE_TIMEOUT_SECONDS + LITTLE)
    records.note(1, HeartbeatMessage(2, 0), last + MIN_SILENCE_TIMEOUT_SECONDS + LITTLE)
    assert not is_gone(records, last + MIN_SILENCE_TIMEOUT_SECONDS + LITTLE)


def test_who_was_never_seen_is_not_missed() -> None:
    records, last = seen([HEARTBEAT_PERIOD_SECONDS])
    assert not is_gone(records, last + 1e6, rank=2)
    records.forget(1)
    assert not is_gone(records, last + 1e6)


def test_after_a_broken_connection_less_is_enough() -> None:
    records, last = seen([HEARTBEAT_PERIOD_SECONDS] * MANY)
    records.note_broken_connections(1)
    assert not is_gone(
        records, last + BROKEN_CONNECTION_GAP_FACTOR * HEARTBEAT_PERIOD_SECONDS - LITTLE
    )
    why = records.failure_reason(
        1,
        HEARTBEAT_PERIOD_SECONDS,
        last + BROKEN_CONNECTION_GAP_FACTOR * HEARTBEAT_PERIOD_SECONDS + LITTLE,
    )
    assert why is not None
    assert why.startswith("connections broke, silent for")
    records.note(1, HeartbeatMessage(MANY + 1, 0), last + 1)  # it lives: connections break
    assert not is_gone(
        records, last + 1 + BROKEN_CONNECTION_GAP_FACTOR * HEARTBEAT_PERIOD_SECONDS + LITTLE
    )


def test_forgiven_all_have_their_time_anew() -> None:
    records, last = seen([HEARTBEAT_PERIOD_SECONDS])
    late = last + 100
    assert is_gone(records, late)
    records.reset_deadlines(late)
    assert not is_gone(records, late + MIN_SILENCE_TIMEOUT_SECONDS)
    assert is_gone(records, late + MIN_SILENCE_TIMEOUT_SECONDS + LITTLE)


def test_after_its_last_sign_nobody_waits_for_another() -> None:
    records, last = seen([HEARTBEAT_PERIOD_SECONDS])
    assert not records.has_finished(1)
    records.note(1, HeartbeatMessage(2, 9, last=True), last)
    assert records.has_finished(1)
    assert not is_gone(records, last + 1e6)
    assert not records.is_hung(1, last + 1e6)
    assert not records.has_finished(2)


@given(st.builds(HeartbeatMessage, st.integers(0), st.integers(0), st.booleans()))
def test_a_heartbeat_is_read_as_it_was_written(heartbeat: HeartbeatMessage) -> None:
    assert (
        HeartbeatMessage.read(heartbeat.text())
        == HeartbeatMessage.read(heartbeat.text().encode())
        == heartbeat
    )


# Hanging


def test_while_no_step_was_seen_much_may_happen() -> None:
    records, _ = seen([HEARTBEAT_PERIOD_SECONDS] * 3)
    assert records.hang_timeout == FIRST_HANG_TIMEOUT_SECONDS
    assert not records.is_hung(1, FIRST_HANG_TIMEOUT_SECONDS)
    assert records.is_hung(1, FIRST_HANG_TIMEOUT_SECONDS + LITTLE)
    assert not records.is_hung(2, 1e6)


@given(EXACT)
def test_how_long_a_step_may_take_follows_from_those_before(step: float) -> None:
    records, last = seen([step] * 8, steps=list(range(9)))
    longest = max(MIN_HANG_TIMEOUT_SECONDS, HANG_STEP_P95_FACTOR * step)
    assert records.hang_timeout == longest
    assert not records.is_hung(1, last + longest)
    assert records.is_hung(1, last + longest + LITTLE)


def test_steps_that_went_by_unseen_count() -> None:
    """Four between two heartbeats: each took a quarter."""
    records, _ = seen([64.0] * 3, steps=[0, 4, 8, 12])
    assert records.hang_timeout == HANG_STEP_P95_FACTOR * 16


def test_the_time_since_the_last_step_is_that_of_the_rank_without_one_for_longest() -> None:
    records, now = seen([1.0] * 4, steps=[0, 1, 2, 2, 2])
    records.note(2, HeartbeatMessage(0, 9), now)
    assert records.stalled_seconds(now) == 2.0
    records.forget(1)
    assert records.stalled_seconds(now + 1) == 1.0
    assert FailureDetector().stalled_seconds(now) == 0.0


def test_signs_without_steps_are_a_hang_and_no_silence() -> None:
    records, now = seen([1.0] * MANY, steps=list(range(MANY + 1)))
    for number in range(1, 100):
        records.note(
            1,
            HeartbeatMessage(MANY + number, MANY),
            now + number,
        )
    assert records.is_hung(1, now + 99)
    assert not is_gone(records, now + 99)
    records.reset_deadlines(now + 99)
    assert not records.is_hung(1, now + 99)


# The thread


def wait_until(so: Callable[[], Any]) -> None:
    deadline = monotonic() + PATIENCE
    while not so():
        assert monotonic() < deadline
        sleep(0.01)


def tcp_store() -> dist.TCPStore:
    patience = timedelta(seconds=PATIENCE)
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=patience)


@contextmanager
def beating(
    store: Any, size: int, look: Callable[[int, int], None] = lambda announced, requested: None
) -> Iterator[list[Heartbeat]]:
    ranks = range(size)
    hearts = [Heartbeat(rank, size, lambda: ranks, look) for rank in ranks]
    for heartbeat in hearts:
        heartbeat.begin(store)
    try:
        yield hearts
    finally:
        for heartbeat in hearts:
            heartbeat.close()


def has_seen(heartbeat: Heartbeat, rank: int) -> bool:
    return rank in heartbeat.detector._peers


@pytest.mark.parametrize("make", [dist.HashStore, tcp_store], ids=["hash", "tcp"])
def test_one_that_stops_is_noticed(make: Callable[[], Any]) -> None:
    with beating(make(), 3) as (here, stops, goes_on):
        wait_until(lambda: has_seen(here, 1) and has_seen(goes_on, 1))
        stops.close()
        for heartbeat, other in ((here, 2), (goes_on, 0)):
            wait_until(lambda heart=heartbeat: heart.failure_reason(1))
            wait_until(lambda heart=heartbeat, other=other: heart.failure_reason(other) is None)


def test_one_that_is_back_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_detector, "MIN_SILENCE_TIMEOUT_SECONDS", HEARTBEAT_PERIOD_SECONDS)
    store = tcp_store()
    with beating(store, 2) as (here, there):
        wait_until(lambda: has_seen(here, 1))
        there.close()
        wait_until(lambda: here.failure_reason(1))
        there.begin(store)
        wait_until(lambda: here.failure_reason(1) is None)


def test_steps_and_musters_are_told() -> None:
    store = tcp_store()
    polled: list[tuple[int, int]] = []
    with beating(store, 2, lambda announced, requested: polled.append((announced, requested))) as (
        here,
        there,
    ):
        there.step = 17
        wait_until(lambda: has_seen(here, 1) and here.detector._peers[1].last.step == 17)
        wait_until(lambda: (0, 0) in polled)
        store.add(RENDEZVOUS_KEY, 4)
        store.add(JOIN_REQUEST_KEY, 5)
        wait_until(lambda: (4, 5) in polled)


def test_the_end_is_heard_by_those_who_ask() -> None:
    store = dist.HashStore()
    store.set(RUN_ENDED_KEY, "7")
    with beating(store, 2) as (asks, does_not):
        asks.checks_for_end = True
        wait_until(lambda: asks.has_ended)
        assert not does_not.has_ended


def test_the_last_sign_of_one_that_closes_is_seen() -> None:
    store = tcp_store()
    with beating(store, 2) as (here, there):
        wait_until(lambda: has_seen(here, 1))
        there.close(StoreClient(store, 1))
        wait_until(lambda: here.detector.has_finished(1))


def test_a_store_that_dies_is_lost_and_another_may_follow() -> None:
    first, second = tcp_store(), tcp_store()
    client = dist.TCPStore("127.0.0.1", first.port, timeout=timedelta(seconds=PATIENCE))
    with beating(client, 1) as [heartbeat]:
        wait_until(lambda: client.check([key_of(0)]))
        assert not heartbeat.store_is_lost
        del first
        wait_until(lambda: heartbeat.store_is_lost)
        heartbeat.begin(second)
        assert not heartbeat.store_is_lost
        wait_until(lambda: second.check([key_of(0)]))
        assert not heartbeat.store_is_lost


@pytest.mark.parametrize("text", ["2.0 17 0", "", "1 2", "\u2153"])
def test_what_is_no_sign_is_skipped_and_its_rank_counts_as_silent(text: str) -> None:
    store = tcp_store()
    with beating(store, 3) as (here, stops, _):
        wait_until(lambda: has_seen(here, 1) and has_seen(here, 2))
        stops.close()
        store.set(key_of(1), text)
        wait_until(lambda: here.failure_reason(1))
        assert here.failure_reason(2) is None
        assert here.failure is None


@pytest.mark.parametrize("kind", [ValueError, RuntimeError])  # which is what a lost store raises
def test_a_detector_that_fails_says_so_and_takes_no_store_for_lost(
    kind: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    def look(announced: int, requested: int) -> None:
        raise kind("out of order")

    with beating(dist.HashStore(), 1, look) as [heartbeat]:
        wait_until(lambda: heartbeat.failure)
        assert not heartbeat.store_is_lost
        assert str(heartbeat.failure).startswith(
            f"the failure detector of rank 0 has failed: {kind.__name__}: out of order; "
        )
    assert [record.exc_info is not None for record in caplog.records] == [True]


class Stuck:
    """A store that doesn't answer while `free` isn't set; it tells when it is first asked then."""

    def __init__(self, store: dist.Store) -> None:
        self.store = store
        self.free = Event()
        self.free.set()
        self.asked = Event()

    def __getattr__(self, name: str) -> Any:
        if name == "clone":
            raise AttributeError(name)

        def call(*arguments: Any) -> Any:
            if not self.free.is_set():
                self.asked.set()
                self.free.wait()
            return getattr(self.store, name)(*arguments)

        return call


def test_while_the_store_does_not_answer_nobody_is_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor with its first answer after that: others couldn't give heartbeats either."""
    monkeypatch.setattr(failure_detector, "MIN_SILENCE_TIMEOUT_SECONDS", HEARTBEAT_PERIOD_SECONDS)
    store = Stuck(dist.HashStore())
    judged: list[str | None] = []
    heartbeat = Heartbeat(
        0,
        2,
        lambda: (0, 1),
        lambda announced, requested: judged.append(heartbeat.failure_reason(1)),
    )
    store.set(key_of(1), HeartbeatMessage(0, 0).text())
    store.free.clear()
    heartbeat.begin(store)
    try:
        heartbeat.detector.note(1, HeartbeatMessage(0, 0), heartbeat.answered)
        assert store.asked.wait(PATIENCE)
        stuck = (
            heartbeat.answered + 10 * MIN_SILENCE_TIMEOUT_SECONDS
        )  # so long, for a clock that went on
        assert heartbeat.detector.failure_reason(1, HEARTBEAT_PERIOD_SECONDS, stuck)
        monkeypatch.setattr(failure_detector, "monotonic", lambda: stuck)
        assert heartbeat.failure_reason(1) is None
        store.free.set()
        wait_until(lambda: judged)
        assert judged[0] is None
        wait_until(lambda: heartbeat.answered == stuck)
        assert heartbeat.failure_reason(1) is None
    finally:
        heartbeat.close()
