from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from itertools import pairwise
from threading import Barrier
from time import monotonic, sleep
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from tests.faulty import Effect, Fault, FaultyTransport
from tests.schedules.test_topologies import build
from tests.threads import run_threads
from tests.transports.ranks import LABEL, in_a_process, next_message, soon
from thalweg.engine.arithmetic import Arithmetic
from thalweg.engine.engine import Engine
from thalweg.engine.execute import RankProgram, Task
from thalweg.errors import (
    Interrupted,
    PeerFailed,
    PeerLate,
    PeerLost,
    ThalwegError,
    TransportClosed,
    TransportError,
    WorkerFailed,
)
from thalweg.facts import Cluster
from thalweg.launch.supervisor import SendMessage, run_workers
from thalweg.members.abort import AbortFlag
from thalweg.members.membership import Membership
from thalweg.members.world import World
from thalweg.schedules import Group, Schedule
from thalweg.transports import Array, Label, Sending, TcpTransport, Transport

GROUP = Group.everybody(Cluster.flat(3))
RING = build("ring", GROUP, 300)
TIMEOUT = 20.0


def task(
    rank: int, vector: Array, step: int = 0, number: int = 0, schedule: Schedule = RING
) -> Task:
    return Task(
        program=RankProgram.of(schedule, rank),
        vector=vector,
        step=step,
        round_number=number,
        bucket=number,
    )


def ones() -> Array:
    return np.ones(300)


def run_engines(
    work: Callable[[Engine], Any],
    timeout: float = TIMEOUT,
    wrap: Callable[[Transport], Transport] = lambda transport: transport,
) -> dict[int, Any]:
    """On three threads; each engine is closed after its work."""
    store = dist.HashStore()

    def with_engine(transport: Transport) -> Any:
        engine = Engine(wrap(transport), AbortFlag(store, transport.rank), timeout)
        try:
            return work(engine)
        finally:
            engine.close()

    return run_threads(GROUP.ranks, with_engine)


def failure_of(future: Future[None]) -> BaseException | None:
    return future.exception(TIMEOUT)


def test_rounds_begin_in_the_order_they_were_handed_in_two_at_a_time() -> None:
    def work(engine: Engine) -> None:
        vectors = [np.full(300, float(engine.rank + 10 * number)) for number in range(12)]
        futures = [
            engine.submit(task(engine.rank, vector, number // 4, number % 4))
            for number, vector in enumerate(vectors)
        ]
        engine.wait(futures)
        for number, vector in enumerate(vectors):
            np.testing.assert_array_equal(vector, 0 + 1 + 2 + 30.0 * number)
        arrivals = sorted(engine.arrivals, key=lambda a: (a.step, a.bucket))
        assert [(a.step, a.bucket) for a in arrivals] == [divmod(n, 4) for n in range(12)]
        assert arrivals == sorted(arrivals, key=lambda a: a.started)
        for arrival in arrivals:
            under_way = [a for a in arrivals if a.started <= arrival.started < a.ended]
            assert len(under_way) <= 2

    run_engines(work)


def test_a_round_begins_while_another_waits() -> None:
    def work(engine: Engine) -> list[Any]:
        if engine.rank == 2:
            sleep(0.3)
        engine.run([task(engine.rank, ones(), number=number) for number in range(3)])
        return sorted(engine.arrivals, key=lambda a: a.bucket)

    first, second, _ = run_engines(work)[0]
    assert first.ended - first.started > 0.25
    assert second.started < first.ended


def test_rounds_on_one_vector_follow_each_other() -> None:
    def work(engine: Engine) -> None:
        vector = ones()
        engine.run([task(engine.rank, vector, number=number) for number in range(5)])
        np.testing.assert_array_equal(vector, np.full(300, 3.0**5))
        arrivals = list(engine.arrivals)
        assert all(a.ended <= b.started for a, b in pairwise(arrivals))

    run_engines(work)


class LeavesLate:
    """A transport whose messages may be read from their arrays until somebody waits for that."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.log: list[tuple[str, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def send(self, peer: int, label: Label, array: Array, deadline: float) -> Sending:
        self.log.append(("sent", label.round))
        self._transport.send(peer, label, array, deadline)
        return _Leaving(self.log, label.round)


class _Leaving:
    def __init__(self, log: list[tuple[str, int]], number: int) -> None:
        self._log = log
        self._number = number

    def wait(self, deadline: float) -> None:
        self._log.append(("left", self._number))


def test_a_round_leaves_a_vector_alone_that_another_still_sends() -> None:
    transports: dict[int, LeavesLate] = {}

    def wrap(transport: Transport) -> Transport:
        transports[transport.rank] = LeavesLate(transport)
        return transports[transport.rank]

    def work(engine: Engine) -> None:
        one, other = ones(), ones()
        futures = [engine.submit(task(engine.rank, one, number=0))]
        if engine.rank == 2:
            sleep(0.3)  # the others have done round 0, and wait in round 1
        futures.append(engine.submit(task(engine.rank, other, number=1)))
        futures.append(engine.submit(task(engine.rank, one, number=2)))
        engine.wait(futures)

    run_engines(work, wrap=wrap)
    for transport in transports.values():
        last_left = max(i for i, entry in enumerate(transport.log) if entry == ("left", 0))
        assert last_left < transport.log.index(("sent", 2))


def test_the_training_thread_goes_on_meanwhile() -> None:
    barrier = Barrier(3, timeout=TIMEOUT)

    def work(engine: Engine) -> None:
        if engine.rank == 2:
            barrier.wait()
        future = engine.submit(task(engine.rank, ones()))
        if engine.rank != 2:
            assert not future.done()  # rank 2 isn't there yet
            barrier.wait()
        engine.wait([future])

    run_engines(work)


def test_who_is_late_is_seen_by_its_peers_and_by_itself() -> None:
    """0.3 s at the second step, though the round takes equally long for all."""

    def work(engine: Engine) -> list[Any]:
        for step in range(3):
            if (engine.rank, step) == (1, 1):
                sleep(0.3)
            engine.run([task(engine.rank, ones(), step)])
        return list(engine.arrivals)

    arrivals = run_engines(work)
    follower = arrivals[2][1]  # hears from rank 1 in the ring
    assert follower.peers[1] - follower.ready > 0.25
    assert follower.ended - follower.started > 0.25
    late, early = arrivals[1][1], arrivals[0][1]
    assert late.ready - early.ready > 0.25
    assert late.ended - late.ready < follower.ended - follower.ready


def test_a_round_that_waits_for_those_before_is_not_late_itself() -> None:
    def work(engine: Engine) -> list[Any]:
        if engine.rank == 1:
            sleep(0.3)
        engine.run([task(engine.rank, ones(), number=number) for number in range(3)])
        return sorted(engine.arrivals, key=lambda a: a.bucket)

    first, second, third = run_engines(work)[0]
    assert third.started - third.ready > 0.25
    assert third.started >= min(first.ended, second.ended)


def test_the_first_error_fails_all_that_follow() -> None:
    def work(engine: Engine) -> None:
        if engine.rank == 1:
            return  # never comes
        futures = [engine.submit(task(engine.rank, ones(), number=n)) for n in range(3)]
        first = failure_of(futures[0])
        assert isinstance(first, PeerLate | PeerFailed | PeerLost)
        assert [failure_of(future) for future in futures[1:]] == [first] * 2
        assert failure_of(engine.submit(task(engine.rank, ones(), step=1))) is first
        with pytest.raises(type(first)):
            engine.wait(futures)

    run_engines(work, timeout=0.5)


class Broken(Arithmetic):
    def add(self, target: Array, incoming: Array) -> None:
        raise ZeroDivisionError("mine")


def test_an_error_of_no_kind_of_ours_reaches_the_training_thread() -> None:
    def work(engine: Engine) -> None:
        if engine.rank == 1:
            with pytest.raises(ZeroDivisionError, match="mine"):
                engine.run([replace(task(engine.rank, ones()), arithmetic=Broken())])
        else:
            with pytest.raises(PeerFailed, match="rank 1 aborted: ZeroDivisionError: mine"):
                engine.run([task(engine.rank, ones())])

    run_engines(work)


def test_a_vector_of_another_size_is_refused() -> None:
    def work(engine: Engine) -> None:
        if engine.rank == 0:
            with pytest.raises(TransportError, match="ring is for 300 elements, and there are 7"):
                engine.run([task(0, np.ones(7))])
        else:
            with pytest.raises(PeerFailed, match="rank 0 aborted: ring is for 300 elements"):
                engine.run([task(engine.rank, ones())])

    run_engines(work)


def test_an_alarm_ends_the_waiting_of_others_soon_and_names_the_cause() -> None:
    def work(engine: Engine) -> None:
        if engine.rank == 0:
            engine._abort_flag.publish("the loss is NaN")
            return
        with pytest.raises(PeerFailed, match="rank 0 aborted: the loss is NaN; look at the output"):
            engine.run([task(engine.rank, ones())])

    run_engines(work, timeout=3600)


def test_the_first_cause_is_named_and_not_its_consequences() -> None:
    """Rank 1's message is cut short: rank 2 refuses it, and the others hear of that."""
    fault = Fault(rank=1, step=0, move=0, effect=Effect.CUT_SHORT)

    def work(engine: Engine) -> str:
        with pytest.raises(ThalwegError) as caught:
            engine.run([task(engine.rank, ones())])
        return str(caught.value)

    said = run_engines(work, wrap=lambda transport: FaultyTransport(transport, [fault]))
    assert said[2].startswith("rank 2 expected 800 bytes from rank 1")
    for rank in (0, 1):
        assert said[rank].startswith("rank 2 aborted: rank 2 expected 800 bytes from rank 1")


def test_close_waits_for_what_was_handed_in() -> None:
    def work(engine: Engine) -> None:
        vector = ones()
        if engine.rank == 1:
            sleep(0.2)
        future = engine.submit(task(engine.rank, vector))
        engine.close()
        assert future.done()
        np.testing.assert_array_equal(vector, 3.0)
        engine.close()  # again
        with pytest.raises(TransportClosed, match=rf"rank {engine.rank} communicates after close"):
            engine.submit(task(engine.rank, ones()))

    run_engines(work)


def test_close_ends_a_round_that_never_would() -> None:
    def work(engine: Engine) -> None:
        if engine.rank == 1:
            return
        future = engine.submit(task(engine.rank, ones()))
        engine.timeout = 0.3
        engine.close()
        assert isinstance(failure_of(future), ThalwegError)

    run_engines(work, timeout=3600)


SIZE, VICTIM = 4, 2
LARGE = build("ring", Group.everybody(Cluster.flat(SIZE)), 5_000_000)


def test_a_rank_that_is_killed_is_noticed_at_once_and_named() -> None:
    """In the middle of a ring of large messages, with an hour to go to the deadline."""
    reported: dict[int, dict[str, Any]] = {}
    killing = Fault(rank=VICTIM, step=3, move=4, effect=Effect.DIE)

    def work(rank: int, report: SendMessage) -> None:
        world = World.join(TIMEOUT)
        transport = FaultyTransport(world.transport(), [killing])
        engine = Engine(transport, AbortFlag(world.store, rank), timeout=3600)
        try:
            for step in range(5):
                vector = np.ones(LARGE.elements, np.float32)
                engine.run([task(rank, vector, step, schedule=LARGE)])
        except ThalwegError as error:
            report({"step": step, "kind": type(error).__name__, "said": str(error)})
            engine.close()

    with pytest.raises(WorkerFailed, match=f"rank {VICTIM} was killed by SIGKILL"):
        run_workers(SIZE, work, grace=60, timeout=120, on_message=reported.__setitem__)
    assert sorted(reported) == [rank for rank in range(SIZE) if rank != VICTIM]
    for message in reported.values():
        assert message["kind"] in ("PeerLost", "PeerFailed")
        assert f"rank {VICTIM}" in message["said"]
        assert message["step"] == killing.step


def test_one_that_waits_for_nothing_hears_of_a_broken_connection() -> None:
    """Others may wait for what it has sent."""

    def work() -> None:
        store = dist.HashStore()
        here, there = (TcpTransport(rank, store, forgives=False) for rank in range(2))
        membership = Membership(store, 0, 2, TIMEOUT)
        engine = Engine(here, AbortFlag(store, 0), TIMEOUT, membership)
        here.send(1, LABEL, ones(), soon())
        next_message(there, 0, LABEL, soon())
        assert not membership.rendezvous_pending
        there.close()
        deadline = soon()
        while not membership.rendezvous_pending:
            assert monotonic() < deadline
            sleep(0.01)
        with pytest.raises(Interrupted, match="a connection of rank 0 to rank 1 broke"):
            engine.run([task(0, ones())])
        membership.close()
        engine.close()

    in_a_process(work)


def test_an_idle_engine_takes_in_what_early_peers_send() -> None:
    """More than the kernel's buffers hold, before the engine is handed anything in."""

    def work() -> None:
        store = dist.HashStore()
        early, late = (TcpTransport(rank, store) for rank in range(2))
        engine = Engine(late, AbortFlag(store, 1), TIMEOUT)
        early.send(1, LABEL, np.zeros(5_000_000), soon()).wait(soon())
        engine.close()
        early.close()

    in_a_process(work)
