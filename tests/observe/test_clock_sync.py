"""Ranks whose clocks differ, asking over a real store."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from time import monotonic, sleep
from unittest.mock import patch

import pytest
import torch.distributed as dist

from thalweg.observe import clock_sync
from thalweg.observe.clock_sync import CLOCK_RETRY_SECONDS, CLOCK_SYNC_PERIOD_SECONDS, SyncedClock

RANK = 3
MILLISECONDS = 0.001


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=20))


def skewed(seconds: float, drift: float = 0.0) -> Callable[[], float]:
    began = monotonic()
    return lambda: monotonic() + seconds + drift * (monotonic() - began)


def aligned(store: dist.TCPStore, keeper: SyncedClock, asker: SyncedClock) -> bool:
    asker.requests += 1
    patient = patch.multiple(
        clock_sync, PING_BACK_TIMEOUT_SECONDS=60.0, CLOCK_PING_TIMEOUT_SECONDS=60.0
    )
    with patient, ThreadPoolExecutor() as threads:
        answered = threads.submit(keeper.serve, store.clone(), RANK, asker.requests)
        moment = asker.synchronise(store.clone(), RANK)
        answered.result()
    return moment is not None


@pytest.mark.parametrize("skew", [0.0, 5000.0, -123.456])
def test_a_clock_that_differs_is_aligned(store: dist.TCPStore, skew: float) -> None:
    keeper, asker = SyncedClock(), SyncedClock(skewed(skew))
    keeper.keep()
    assert aligned(store, keeper, asker)
    assert abs(asker.now() - keeper.now()) <= asker.error + MILLISECONDS
    assert asker.error < float("inf")


def test_what_drifts_is_aligned_again(store: dist.TCPStore) -> None:
    keeper, asker = SyncedClock(), SyncedClock(skewed(10.0, drift=0.05))
    keeper.keep()
    for _ in range(2):
        assert aligned(store, keeper, asker)
        assert abs(asker.now() - keeper.now()) <= asker.error + 2 * MILLISECONDS
        sleep(0.3)  # 15 ms of drift


def test_who_takes_over_goes_on_with_the_time_that_it_had(store: dist.TCPStore) -> None:
    first, second, third = SyncedClock(), SyncedClock(skewed(77.0)), SyncedClock(skewed(-5.0))
    first.keep()
    assert aligned(store, first, second)
    assert second.keep() is None
    third.requests = second.requests  # as the same rank's would be
    assert aligned(store, second, third)
    assert abs(third.now() - first.now()) <= third.error + second.error + 2 * MILLISECONDS


def test_a_keeper_that_is_gone_is_asked_again_soon(store: dist.TCPStore) -> None:
    asker = SyncedClock()
    asker.requests += 1
    assert asker.is_due
    with patch.object(clock_sync, "PING_BACK_TIMEOUT_SECONDS", 0.2):
        assert asker.synchronise(store.clone(), RANK) is None
    assert not asker.is_due
    assert asker.error == float("inf")
    assert CLOCK_RETRY_SECONDS < CLOCK_SYNC_PERIOD_SECONDS


def test_an_asker_that_is_gone_holds_nobody_up(store: dist.TCPStore) -> None:
    with patch.object(clock_sync, "PING_BACK_TIMEOUT_SECONDS", 0.2):
        SyncedClock().serve(store.clone(), RANK, 1)


def test_little_is_left_in_the_store(store: dist.TCPStore) -> None:
    keeper, asker = SyncedClock(), SyncedClock()
    keeper.keep()
    before = store.num_keys()
    for _ in range(3):
        assert aligned(store, keeper, asker)
    assert store.num_keys() - before <= 3 * 2
