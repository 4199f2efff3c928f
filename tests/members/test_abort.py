from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from time import monotonic
from typing import Any

import pytest
import torch.distributed as dist

from thalweg.errors import PeerFailed, RunError
from thalweg.launch.place import HERE
from thalweg.launch.store_process import fork_store
from thalweg.launch.worker_process import fork_guard
from thalweg.members.abort import Alarm
from thalweg.transports.store_client import Line


@pytest.fixture(params=["hash", "tcp", "prefix"])
def store(request: pytest.FixtureRequest) -> Any:
    if request.param == "hash":
        return dist.HashStore()
    tcp = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return dist.PrefixStore("run", tcp) if request.param == "prefix" else tcp


def test_all_but_the_one_that_sounded_it_hear_it(store: Any) -> None:
    alarms = [Alarm(store, rank) for rank in range(3)]
    assert [alarm.heard() for alarm in alarms] == [None] * 3
    alarms[1].sound("the loss is NaN\n  at step 7 \u00e9\udc80")
    assert alarms[1].heard() is None
    for rank in (0, 2):
        heard = alarms[rank].heard()
        assert isinstance(heard, PeerFailed)
        assert heard.problem == "rank 1 gave up: the loss is NaN at step 7 \u00e9\udc80"
        assert heard.remedy == "look at the output of rank 1"


def test_the_first_is_the_cause() -> None:
    store = dist.HashStore()
    cause, consequence, late = (Alarm(store, rank) for rank in range(3))
    cause.sound("the disk is full")
    consequence.sound("rank 0 is gone")
    for alarm in (consequence, late):
        assert "rank 0 gave up: the disk is full" in str(alarm.heard())
    assert cause.heard() is None


def test_many_at_once_agree_on_one(store: Any) -> None:
    size = 8
    barrier = threading.Barrier(size, timeout=30)

    def work(rank: int) -> str | None:
        alarm = Alarm(store, rank)
        barrier.wait()
        alarm.sound("me")
        heard = alarm.heard()
        return heard and heard.problem

    with ThreadPoolExecutor(size) as pool:
        heard = list(pool.map(work, range(size)))
    winner = heard.index(None)
    assert [problem for problem in heard if problem] == [f"rank {winner} gave up: me"] * (size - 1)


def test_it_is_heard_while_another_thread_waits_for_the_store() -> None:
    master = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", master.port, timeout=timedelta(seconds=60))
    alarm, other = Alarm(client, 0), Alarm(master, 1)
    waiting = threading.Thread(target=client.get, args=("never until the end",))
    waiting.start()
    probes: list[threading.Thread] = []
    while not is_blocked(client, probes):
        pass
    other.sound("enough")
    assert "enough" in str(alarm.heard())
    assert waiting.is_alive()
    master.set("never until the end", "")
    for thread in (waiting, *probes):  # before the store is gone
        thread.join(30)


def is_blocked(store: Any, probes: list[threading.Thread]) -> bool:
    probe = threading.Thread(target=store.check, args=(["x"],))
    probes.append(probe)
    probe.start()
    probe.join(0.1)
    return probe.is_alive()


def test_a_store_that_is_gone_counts_as_heard() -> None:
    master = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", master.port, timeout=timedelta(seconds=60))
    alarm = Alarm(client, 0)
    assert alarm.heard() is None
    del master
    for _ in range(2):
        heard = alarm.heard()
        assert isinstance(heard, PeerFailed)
        assert heard.problem.startswith("the store is gone (rank 0 can't reach the store: ")
        assert "\n" not in str(heard)
    alarm.sound("and nobody hears it")


@contextmanager
def store_process() -> Iterator[tuple[int, int]]:
    """The pid and the port of a store in a process of its own."""
    guard, registrations = fork_guard()
    store, port = fork_store(HERE, registrations)
    try:
        yield store, port
    finally:
        os.close(registrations)
        os.kill(store, signal.SIGKILL)
        for process in (store, guard):
            os.waitpid(process, 0)


def test_a_store_that_does_not_answer() -> None:
    """Its process is stopped, so that the connection stays and nothing comes."""
    with store_process() as (pid, port):
        client = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=60))
        alarm, line = Alarm(client, 5), Line(client, 5)
        assert alarm.heard() is None
        assert line.ask(lambda store: store.add("x", 1)) == 1
        client.set_timeout(timedelta(seconds=1))
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)  # until then it may still answer
        start = monotonic()
        heard = alarm.heard()
        known = monotonic()
        alarm.sound("and nobody hears it")  # at once: it is known by now
        assert monotonic() - known < known - start
        assert heard is not None
        assert "the store is gone (rank 5 can't reach the store: no answer within 1 s)" in str(
            heard
        )
        with pytest.raises(RunError, match="no answer within 1 s; look whether the launcher"):
            line.ask(lambda store: store.compare_set("x", "", "y"))
        os.kill(pid, signal.SIGCONT)


def test_a_line_that_nobody_holds_ends_its_thread() -> None:
    before = set(threading.enumerate())
    line = Line(dist.HashStore(), 0)
    (thread,) = set(threading.enumerate()) - before
    assert line.ask(lambda store: store.add("x", 1)) == 1
    del line
    thread.join(30)
    assert not thread.is_alive()
