"""Who counts as gone, by made-up clocks; and the thread that gives signs, on real stores."""

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
    BEAT,
    BROKEN_OFF,
    CALLED,
    ENDED,
    ENOUGH,
    FIRST_HANG,
    FIRST_SILENCE,
    FOR_A_WHILE,
    LONGEST_SILENCE,
    SHORTEST_HANG,
    SHORTEST_SILENCE,
    TIMES_A_STEP,
    TIMES_LONGEST,
    TIMES_USUAL,
    WISHED,
    Heartbeat,
    Records,
    Sign,
    key_of,
)
from thalweg.transports.store_client import Line

PATIENCE = 30.0  # seconds
LITTLE = 2.0**-10  # seconds: clocks here are exact
EXACT = st.integers(1, 1000).map(lambda n: n / 64)  # seconds


def seen(gaps: list[float], rank: int = 1, steps: list[int] | None = None) -> tuple[Records, float]:
    """What came of a rank at such gaps, and when it last came."""
    records, now = Records(), 0.0
    at = steps or [0] * (len(gaps) + 1)
    records.note(rank, Sign(0, at[0]), now)
    for number, gap in enumerate(gaps, start=1):
        now += gap
        records.note(rank, Sign(number, at[number]), now)
    return records, now


def is_gone(records: Records, now: float, rank: int = 1, beat: float = BEAT) -> bool:
    return records.why_gone(rank, beat, now) is not None


# Silence


def test_at_first_much_may_happen() -> None:
    records, last = seen([BEAT] * (ENOUGH - 1))
    assert not is_gone(records, last + FIRST_SILENCE)
    assert is_gone(records, last + FIRST_SILENCE + LITTLE)
    assert records.why_gone(1, BEAT, last + 2 * FIRST_SILENCE) == "silent for 6.0 s"


@given(EXACT)
def test_how_long_is_too_long_follows_from_how_regularly_signs_came(gap: float) -> None:
    records, last = seen([gap] * ENOUGH)
    longest = min(LONGEST_SILENCE, max(SHORTEST_SILENCE, TIMES_USUAL * gap))
    assert not is_gone(records, last + longest)
    assert is_gone(records, last + longest + LITTLE)


def test_one_that_was_late_once_may_be_so_again_for_a_while() -> None:
    records, last = seen([0.25] * 38 + [8.0, 0.25])
    assert not is_gone(records, last + FIRST_SILENCE)
    assert is_gone(records, last + FIRST_SILENCE + LITTLE)
    records, last = seen([0.25] * 38 + [8.0] + [0.25] * int(FOR_A_WHILE / 0.25))
    assert is_gone(records, last + TIMES_USUAL * 0.25 + LITTLE)
    assert not is_gone(records, last + TIMES_USUAL * 0.25)


def test_where_signs_are_rare_silence_is_longer() -> None:
    """Of a thousand ranks, so that the store isn't busy."""
    beat = Heartbeat(0, 1000, lambda: (), lambda called, wished: None).beat
    assert beat > 5
    records, last = seen([beat] * (ENOUGH - 1))
    assert not is_gone(records, last + beat + FIRST_SILENCE, beat=beat)
    few = Heartbeat(0, 4, lambda: (), lambda called, wished: None)
    assert few.beat == BEAT


def test_a_sign_that_does_not_grow_is_none() -> None:
    records, last = seen([BEAT])
    records.note(1, Sign(1, 0), last + FIRST_SILENCE)
    assert is_gone(records, last + FIRST_SILENCE + LITTLE)
    records.note(1, Sign(2, 0), last + FIRST_SILENCE + LITTLE)
    assert not is_gone(records, last + FIRST_SILENCE + LITTLE)


def test_who_was_never_seen_is_not_missed() -> None:
    records, last = seen([BEAT])
    assert not is_gone(records, last + 1e6, rank=2)
    records.forget(1, last)
    assert not is_gone(records, last + 1e6)


def test_who_was_left_out_and_lives_may_be_silent_for_longer() -> None:
    records, last = seen([BEAT] * ENOUGH)
    silence = SHORTEST_SILENCE + LITTLE
    assert is_gone(records, last + silence)
    records.forget(1, last + silence)
    records.note(1, Sign(ENOUGH + 1, 0), last + silence)
    assert not is_gone(records, last + silence + silence)
    assert is_gone(records, last + silence + TIMES_LONGEST * silence + LITTLE)


def test_after_a_broken_connection_less_is_enough() -> None:
    records, last = seen([BEAT] * ENOUGH)
    records.broke(1)
    assert not is_gone(records, last + BROKEN_OFF * BEAT - LITTLE)
    why = records.why_gone(1, BEAT, last + BROKEN_OFF * BEAT + LITTLE)
    assert why is not None
    assert why.startswith("gone: its connections broke")
    records.note(1, Sign(ENOUGH + 1, 0), last + 1)  # it lives: connections break
    assert not is_gone(records, last + 1 + BROKEN_OFF * BEAT + LITTLE)


def test_forgiven_all_have_their_time_anew() -> None:
    records, last = seen([BEAT])
    late = last + 100
    assert is_gone(records, late)
    records.forgive(late)
    assert not is_gone(records, late + FIRST_SILENCE)
    assert is_gone(records, late + FIRST_SILENCE + LITTLE)


def test_after_its_last_sign_nobody_waits_for_another() -> None:
    records, last = seen([BEAT])
    assert not records.is_through(1)
    records.note(1, Sign(2, 9, last=True), last)
    assert records.is_through(1)
    assert not is_gone(records, last + 1e6)
    assert not records.hangs(1, last + 1e6)
    assert not records.is_through(2)


@given(st.builds(Sign, st.integers(0), st.integers(0), st.booleans()))
def test_a_sign_is_read_as_it_was_written(sign: Sign) -> None:
    assert Sign.read(sign.text()) == Sign.read(sign.text().encode()) == sign


# Hanging


def test_while_no_step_was_seen_much_may_happen() -> None:
    records, _ = seen([BEAT] * 3)
    assert records.patience == FIRST_HANG
    assert not records.hangs(1, FIRST_HANG)
    assert records.hangs(1, FIRST_HANG + LITTLE)
    assert not records.hangs(2, 1e6)


@given(EXACT)
def test_how_long_a_step_may_take_follows_from_those_before(step: float) -> None:
    records, last = seen([step] * 8, steps=list(range(9)))
    longest = max(SHORTEST_HANG, TIMES_A_STEP * step)
    assert records.patience == longest
    assert not records.hangs(1, last + longest)
    assert records.hangs(1, last + longest + LITTLE)


def test_steps_that_went_by_unseen_count() -> None:
    """Four between two signs: each took a quarter."""
    records, _ = seen([64.0] * 3, steps=[0, 4, 8, 12])
    assert records.patience == TIMES_A_STEP * 16


def test_signs_without_steps_are_a_hang_and_no_silence() -> None:
    records, now = seen([1.0] * ENOUGH, steps=list(range(ENOUGH + 1)))
    for number in range(1, 100):
        records.note(1, Sign(ENOUGH + number, ENOUGH), now + number)
    assert records.hangs(1, now + 99)
    assert not is_gone(records, now + 99)
    records.forgive(now + 99)
    assert not records.hangs(1, now + 99)


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
    store: Any, size: int, look: Callable[[int, int], None] = lambda called, wished: None
) -> Iterator[list[Heartbeat]]:
    ranks = range(size)
    hearts = [Heartbeat(rank, size, lambda: ranks, look) for rank in ranks]
    for heart in hearts:
        heart.begin(store)
    try:
        yield hearts
    finally:
        for heart in hearts:
            heart.close()


def has_seen(heart: Heartbeat, rank: int) -> bool:
    return rank in heart.records._seen


@pytest.mark.parametrize("make", [dist.HashStore, tcp_store], ids=["hash", "tcp"])
def test_one_that_stops_is_noticed(make: Callable[[], Any]) -> None:
    with beating(make(), 3) as (here, stops, goes_on):
        wait_until(lambda: has_seen(here, 1) and has_seen(goes_on, 1))
        stops.close()
        for heart, other in ((here, 2), (goes_on, 0)):
            wait_until(lambda heart=heart: heart.why_gone(1))
            wait_until(lambda heart=heart, other=other: heart.why_gone(other) is None)


def test_one_that_is_back_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_detector, "FIRST_SILENCE", BEAT)
    store = tcp_store()
    with beating(store, 2) as (here, there):
        wait_until(lambda: has_seen(here, 1))
        there.close()
        wait_until(lambda: here.why_gone(1))
        there.begin(store)
        wait_until(lambda: here.why_gone(1) is None)


def test_steps_and_musters_are_told() -> None:
    store = tcp_store()
    heard: list[tuple[int, int]] = []
    with beating(store, 2, lambda called, wished: heard.append((called, wished))) as (here, there):
        there.step = 17
        wait_until(lambda: has_seen(here, 1) and here.records._seen[1].sign.step == 17)
        wait_until(lambda: (0, 0) in heard)
        store.add(CALLED, 4)
        store.add(WISHED, 5)
        wait_until(lambda: (4, 5) in heard)


def test_the_end_is_heard_by_those_who_ask() -> None:
    store = dist.HashStore()
    store.set(ENDED, "7")
    with beating(store, 2) as (asks, does_not):
        asks.asks_for_the_end = True
        wait_until(lambda: asks.has_ended)
        assert not does_not.has_ended


def test_the_last_sign_of_one_that_closes_is_seen() -> None:
    store = tcp_store()
    with beating(store, 2) as (here, there):
        wait_until(lambda: has_seen(here, 1))
        there.close(Line(store, 1))
        wait_until(lambda: here.records.is_through(1))


def test_a_store_that_dies_is_lost_and_another_may_follow() -> None:
    first, second = tcp_store(), tcp_store()
    client = dist.TCPStore("127.0.0.1", first.port, timeout=timedelta(seconds=PATIENCE))
    with beating(client, 1) as [heart]:
        wait_until(lambda: client.check([key_of(0)]))
        assert not heart.lost
        del first
        wait_until(lambda: heart.lost)
        heart.begin(second)
        assert not heart.lost
        wait_until(lambda: second.check([key_of(0)]))
        assert not heart.lost


@pytest.mark.parametrize("text", ["2.0 17 0", "", "1 2", "\u2153"])
def test_what_is_no_sign_is_skipped_and_its_rank_counts_as_silent(text: str) -> None:
    store = tcp_store()
    with beating(store, 3) as (here, stops, _):
        wait_until(lambda: has_seen(here, 1) and has_seen(here, 2))
        stops.close()
        store.set(key_of(1), text)
        wait_until(lambda: here.why_gone(1))
        assert here.why_gone(2) is None
        assert here.failure is None


@pytest.mark.parametrize("kind", [ValueError, RuntimeError])  # which is what a lost store raises
def test_a_detector_that_fails_says_so_and_takes_no_store_for_lost(
    kind: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    def look(called: int, wished: int) -> None:
        raise kind("out of order")

    with beating(dist.HashStore(), 1, look) as [heart]:
        wait_until(lambda: heart.failure)
        assert not heart.lost
        assert str(heart.failure).startswith(
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
    """Nor with its first answer after that: others couldn't give signs either."""
    monkeypatch.setattr(failure_detector, "FIRST_SILENCE", BEAT)
    store = Stuck(dist.HashStore())
    judged: list[str | None] = []
    heart = Heartbeat(0, 2, lambda: (0, 1), lambda called, wished: judged.append(heart.why_gone(1)))
    store.set(key_of(1), Sign(0, 0).text())
    store.free.clear()
    heart.begin(store)
    try:
        heart.records.note(1, Sign(0, 0), heart.answered)
        assert store.asked.wait(PATIENCE)
        stuck = heart.answered + 10 * FIRST_SILENCE  # so long, for a clock that went on
        assert heart.records.why_gone(1, BEAT, stuck)
        monkeypatch.setattr(failure_detector, "monotonic", lambda: stuck)
        assert heart.why_gone(1) is None
        store.free.set()
        wait_until(lambda: judged)
        assert judged[0] is None
        wait_until(lambda: heart.answered == stuck)
        assert heart.why_gone(1) is None
    finally:
        heart.close()
