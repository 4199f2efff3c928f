"""Faults and records, as schedules see them."""

from __future__ import annotations

from collections import Counter
from time import monotonic

import numpy as np
import pytest

from tests.faulty import Effect, Fault, FaultyTransport
from tests.running import execute
from tests.schedules.test_topologies import VARIANTS, build
from tests.threads import run_threads
from tests.transports.ranks import KINDS, next_message, run_ranks
from thalweg.engine.execute import RankProgram, flat
from thalweg.errors import PeerLate, TransportError
from thalweg.facts import Cluster
from thalweg.schedules import Group, MoveKind, Schedule
from thalweg.transports import Array, Label, MemoryNetwork, RecordedTransport, Transport

GROUP = Group.everybody(Cluster.regular([2, 2]))
RING = build("ring", GROUP, 100_000)
FAULTS = {
    Effect.LOSE: Fault(rank=1, step=2, move=3, effect=Effect.LOSE),
    Effect.DELAY: Fault(rank=1, step=2, move=3, effect=Effect.DELAY, seconds=0.3),
    Effect.CUT_SHORT: Fault(rank=1, step=2, move=3, effect=Effect.CUT_SHORT),
}


def step_of(schedule: Schedule, transport: Transport, step: int, timeout: float = 20) -> Array:
    vector = np.full(schedule.elements, float(transport.rank))
    part = RankProgram.of(schedule, transport.rank)
    execute(part, transport, flat(schedule, vector), step=step, timeout=timeout)
    return vector


def receiver_of(fault: Fault) -> int:
    sends = [move for move in RING.moves(fault.rank) if move.kind is MoveKind.SEND]
    return sends[fault.move].peer


@pytest.mark.parametrize("kind", KINDS)
def test_a_delay_changes_the_time_and_not_the_result(kind: str) -> None:
    fault = FAULTS[Effect.DELAY]

    def work(transport: Transport) -> list[list[str]]:
        faulty = FaultyTransport(transport, FAULTS.values() if transport.rank == 3 else [fault])
        fired = []
        for step in range(4):
            start = monotonic()
            np.testing.assert_array_equal(step_of(RING, faulty, step), 0 + 1 + 2 + 3)
            if transport.rank == fault.rank and step == fault.step:
                assert monotonic() - start >= fault.seconds
            fired.append([f.effect.name for f in faulty.fired])
        return fired

    results = run_ranks(kind, 4, work)
    assert results[fault.rank] == [[], [], ["DELAY"], ["DELAY"]]
    assert [results[rank] for rank in (0, 2, 3)] == [[[]] * 4] * 3  # another's fault isn't theirs


@pytest.mark.parametrize("kind", KINDS)
def test_a_lost_message_is_missed_by_the_deadline(kind: str) -> None:
    fault = FAULTS[Effect.LOSE]

    def work(transport: Transport) -> list[int]:
        faulty = FaultyTransport(transport, [fault])
        for step in range(fault.step):
            step_of(RING, faulty, step)
        start = monotonic()
        with pytest.raises(PeerLate) as caught:
            step_of(RING, faulty, fault.step, timeout=1)
        assert monotonic() - start >= 1
        assert caught.value.step == fault.step
        assert faulty.fired == [fault] * (transport.rank == fault.rank)
        return list(caught.value.peers)

    blamed = run_ranks(kind, 4, work)
    assert blamed[receiver_of(fault)] == [fault.rank]


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_cut_short_is_refused(kind: str) -> None:
    fault = FAULTS[Effect.CUT_SHORT]
    receiver = receiver_of(fault)

    def work(transport: Transport) -> None:
        faulty = FaultyTransport(transport, [fault])
        for step in range(fault.step):
            step_of(RING, faulty, step)
        error = TransportError if transport.rank == receiver else PeerLate
        with pytest.raises(error) as caught:
            step_of(RING, faulty, fault.step, timeout=1)
        if transport.rank == receiver:
            nbytes = RING.sizes[0] * 8
            assert (
                f"rank {receiver} expected {nbytes} bytes from rank {fault.rank} at step 2, "
                f"round 0, and got {nbytes - 1}; give all ranks the same"
            ) in str(caught.value)

    run_ranks(kind, 4, work)


def test_each_fault_strikes_its_message_alone() -> None:
    """Of all (rank, step, move), for messages that would come to the same place."""
    struck = [(1, 0), (1, 2), (3, 1)]
    faults = [Fault(rank=0, step=s, move=m, effect=Effect.LOSE) for s, m in struck]
    network = MemoryNetwork([0, 1])
    faulty = FaultyTransport(network.transport(0), faults)
    recorded = RecordedTransport(network.transport(1))
    for step in range(5):
        for move in range(3):
            faulty.send(1, Label(step, 0, move, move + 1), np.array([1]), monotonic() + 5).wait(
                monotonic() + 5
            )
    lost = []
    for step in range(5):
        for move in range(3):
            try:
                next_message(recorded, 0, Label(step, 0, move, move + 1), monotonic() + 0.01)
            except PeerLate:
                lost.append((step, move))
    assert lost == struck
    assert faulty.fired == faults
    assert len(recorded.messages) == 12


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_record_is_the_schedule(variant: str) -> None:
    """Every move of every rank, with its bytes, once a step, and nothing else."""
    schedule = build(variant, GROUP, 1000, 8)

    def work(transport: Transport) -> RecordedTransport:
        recorded = RecordedTransport(transport)
        for step in range(2):
            step_of(schedule, recorded, step)
        return recorded

    for rank, recorded in run_threads(GROUP.ranks, work).items():
        expected: Counter[tuple[object, ...]] = Counter()
        for move in schedule.moves(rank):
            for step in range(2):
                sent = move.kind is MoveKind.SEND
                span = (step, 0, move.start, move.stop)
                expected[sent, move.peer, span, schedule.span_bytes(move)] += 1
        found = Counter((m.sent, m.peer, tuple(m.label), m.nbytes) for m in recorded.messages)
        assert found == expected
        times = [message.seconds for message in recorded.messages]
        assert times == sorted(times)


def test_a_record_keeps_the_last() -> None:
    network = MemoryNetwork([0, 1])
    recorded = RecordedTransport(network.transport(0), kept=3)
    for step in range(5):
        recorded.send(1, Label(step, 0, 0, 1), np.array([1]), monotonic() + 5)
    assert [message.label.step for message in recorded.messages] == [2, 3, 4]
