"""Programs drawn at random: what the check accepts is what happens on real threads.

A chunk is represented by its weights over the ranks' inputs, so that any sum is allowed and the
promise can be worked out by a plain interpreter that moves one message at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.running import run
from thalweg.errors import ScheduleError
from thalweg.schedules import Condition, Move, MoveKind, Schedule, check


@dataclass(frozen=True)
class Message:
    source: int
    target: int
    start: int
    stop: int
    kind: MoveKind


@st.composite
def messages(draw: st.DrawFn, ranks: int, chunks: int) -> Message:
    source, target = draw(st.permutations(range(ranks)))[:2]
    start = draw(st.integers(0, chunks - 1))
    stop = draw(st.integers(start + 1, chunks))
    return Message(
        source, target, start, stop, draw(st.sampled_from([MoveKind.ADD, MoveKind.COPY]))
    )


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    ranks, chunks = draw(st.integers(2, 4)), draw(st.integers(1, 4))
    sizes = tuple(draw(st.lists(st.integers(0, 2), min_size=chunks, max_size=chunks)))
    listed: dict[int, list[Move]] = {rank: [] for rank in range(ranks)}
    held = {(rank, chunk): np.eye(ranks)[rank] for rank in range(ranks) for chunk in range(chunks)}
    for message in draw(st.lists(messages(ranks, chunks), max_size=8)):
        span = message.start, message.stop
        listed[message.source].append(Move(MoveKind.SEND, message.target, *span))
        listed[message.target].append(Move(message.kind, message.source, *span))
        for chunk in range(*span):
            sent = held[message.source, chunk]
            own = held[message.target, chunk] if message.kind is MoveKind.ADD else 0
            held[message.target, chunk] = sent + own
    return Schedule(
        name="random",
        ranks=tuple(range(ranks)),
        sizes=sizes,
        itemsize=8,
        program=lambda rank: iter(listed[rank]),
        before=Condition("", lambda rank, _: np.eye(ranks)[rank]),
        after=Condition("", lambda rank, chunk: held[rank, chunk]),
    )


def assert_run_keeps_the_promise(schedule: Schedule) -> None:
    primes = [2.0, 3.0, 5.0, 7.0]
    inputs = {rank: np.full(schedule.elements, primes[rank]) for rank in schedule.ranks}
    for rank, result in run(schedule, inputs).items():
        for chunk in range(len(schedule.sizes)):
            weights = schedule.after.content(rank, chunk)
            assert isinstance(weights, np.ndarray)
            expected = weights @ primes[: len(weights)]
            got = result[schedule.offsets[chunk] : schedule.offsets[chunk + 1]]
            np.testing.assert_array_equal(got, np.full(schedule.sizes[chunk], expected))


@examples(300)
@given(schedules())
def test_any_program_that_moves_one_message_after_the_other(schedule: Schedule) -> None:
    check(schedule)
    assert_run_keeps_the_promise(schedule)


@examples(300)
@given(schedules(), st.data())
def test_whatever_else_passes_keeps_its_promise_too(
    schedule: Schedule, data: st.DataObject
) -> None:
    """One rank's list in any other order: refused, or right when it runs."""
    rank = data.draw(st.sampled_from(schedule.ranks))
    shuffled = data.draw(st.permutations(list(schedule.program(rank))))
    mutant = replace(
        schedule,
        program=lambda of: iter(shuffled) if of == rank else schedule.program(of),
    )
    try:
        check(mutant)
    except ScheduleError:
        return
    assert_run_keeps_the_promise(mutant)
