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
from thalweg.launch.store import fork_store
from thalweg.launch.worker_process import fork_guard
from thalweg.members.abort import AbortFlag
from thalweg.transports.store_client import StoreClient


@pytest.fixture(params=["hash", "tcp", "prefix"])
def store(request: pytest.FixtureRequest) -> Any:
    if request.param == "hash":
        return dist.HashStore()
    tcp = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return dist.PrefixStore("run", tcp) if request.param == "prefix" else tcp


def test_all_but_the_one_that_raised_it_poll_it(store: Any) -> None:
    abort_flags = [AbortFlag(store, rank) for rank in range(3)]
    assert [abort_flag.poll() for abort_flag in abort_flags] == [None] * 3
    abort_flags[1].publish("the loss is NaN\n  at step 7 \u00e9\udc80")
    assert abort_flags[1].poll() is None
    for rank in (0, 2):
        abort = abort_flags[rank].poll()
        assert isinstance(abort, PeerFailed)
        assert abort.problem == "rank 1 aborted: the loss is NaN at step 7 \u00e9\udc80"
        assert abort.remedy == "look at the output of rank 1"


def test_the_first_is_the_cause() -> None:
    store = dist.HashStore()
    cause, consequence, late = (AbortFlag(store, rank) for rank in range(3))
    cause.publish("the disk is full")
    consequence.publish("rank 0 is gone")
    for abort_flag in (consequence, late):
        assert "rank 0 aborted: the disk is full" in str(abort_flag.poll())
    assert cause.poll() is None


def test_many_at_once_agree_on_one(store: Any) -> None:
    size = 8
    barrier = threading.Barrier(size, timeout=30)

    def work(rank: int) -> str | None:
        abort_flag = AbortFlag(store, rank)
        barrier.wait()
        abort_flag.publish("me")
        abort = abort_flag.poll()
        return abort and abort.problem

    with ThreadPoolExecutor(size) as pool:
        polled = list(pool.map(work, range(size)))
    winner = polled.index(None)
    assert [problem for problem in polled if problem] == [f"rank {winner} aborted: me"] * (size - 1)


def test_it_is_polled_while_another_thread_waits_for_the_store() -> None:
    master = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", master.port, timeout=timedelta(seconds=60))
    abort_flag, other = AbortFlag(client, 0), AbortFlag(master, 1)
    waiting = threading.Thread(target=client.get, args=("never until the end",))
    waiting.start()
    probes: list[threading.Thread] = []
    while not is_blocked(client, probes):
        pass
    other.publish("enough")
    assert "enough" in str(abort_flag.poll())
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


def test_a_store_that_is_gone_counts_as_raised() -> None:
    master = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", master.port, timeout=timedelta(seconds=60))
    abort_flag = AbortFlag(client, 0)
    assert abort_flag.poll() is None
    del master
    for _ in range(2):
        abort = abort_flag.poll()
        assert isinstance(abort, PeerFailed)
        assert abort.problem.startswith("the store is lost (rank 0 can't reach the store: ")
        assert "\n" not in str(abort)
    abort_flag.publish("and nobody hears it")


@contextmanager
def store_process() -> Iterator[tuple[int, int]]:
    """The pid and the port of a store in a process of its own."""
    guard, registrations = fork_guard()
    store, port = fork_store(HERE, registrations, port=0, to_close=())
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
        abort_flag, line = AbortFlag(client, 5), StoreClient(client, 5)
        assert abort_flag.poll() is None
        assert line.call(lambda store: store.add("x", 1)) == 1
        client.set_timeout(timedelta(seconds=1))
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)  # until then it may still answer
        start = monotonic()
        abort = abort_flag.poll()
        known = monotonic()
        abort_flag.publish("and nobody hears it")  # at once: it is known by now
        assert monotonic() - known < known - start
        assert abort is not None
        assert "the store is lost (rank 5 can't reach the store: no answer within 1 s)" in str(
            abort
        )
        with pytest.raises(RunError, match="no answer within 1 s; look whether the launcher"):
            line.call(lambda store: store.compare_set("x", "", "y"))
        os.kill(pid, signal.SIGCONT)


def test_a_line_that_nobody_holds_ends_its_thread() -> None:
    before = set(threading.enumerate())
    client = StoreClient(dist.HashStore(), 0)
    (thread,) = set(threading.enumerate()) - before
    assert client.call(lambda store: store.add("x", 1)) == 1
    del client
    thread.join(30)
    assert not thread.is_alive()
