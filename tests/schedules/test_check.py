"""The check refuses every schedule that isn't right: each move of small ones is tampered with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from tests.running import mean_sets, run, whole_numbers
from tests.schedules.test_topologies import VARIANTS, build
from thalweg.errors import ScheduleError
from thalweg.facts import Cluster
from thalweg.schedules import Group, Move, MoveKind, Schedule, all_gather, all_to_all, check

Lists = dict[int, list[Move]]
CLUSTERS = [[2], [3], [4], [5], [2, 2], [1, 3], [2, 1, 2]]


def small_schedules() -> Iterator[Schedule]:
    for rack_sizes in CLUSTERS:
        group = Group.everybody(Cluster.regular(rack_sizes, interleaved=True))
        for variant in VARIANTS:
            yield build(variant, group, 24, step=1)
            yield build(variant, group, group.size - 1, step=1)  # some chunks are empty
        yield all_gather(group, 24, 4)
        yield all_to_all(group, 24, 4)


def with_moves(schedule: Schedule, lists: Lists) -> Schedule:
    return replace(schedule, program=lambda rank: iter(lists[rank]))


def lists_of(schedule: Schedule) -> Lists:
    return {rank: list(schedule.moves(rank)) for rank in schedule.ranks}


def tampered(
    schedule: Schedule, rank: int, index: int, moves: list[Move], width: int = 1
) -> Schedule:
    lists = lists_of(schedule)
    lists[rank][index : index + width] = moves
    return with_moves(schedule, lists)


def every_move(schedule: Schedule) -> Iterator[tuple[int, int, Move]]:
    for rank, moves in lists_of(schedule).items():
        for index, move in enumerate(moves):
            yield rank, index, move


def test_untouched_they_pass() -> None:
    for schedule in small_schedules():
        check(schedule)


def test_a_move_removed() -> None:
    for schedule in small_schedules():
        for rank, index, _ in every_move(schedule):
            with pytest.raises(ScheduleError):
                check(tampered(schedule, rank, index, []))


def test_a_move_doubled() -> None:
    for schedule in small_schedules():
        for rank, index, move in every_move(schedule):
            with pytest.raises(ScheduleError):
                check(tampered(schedule, rank, index, [move, move]))


def test_a_move_redirected() -> None:
    """To every other member, to the rank itself, and to a rank outside."""
    for schedule in small_schedules():
        for rank, index, move in every_move(schedule):
            for peer in {*schedule.ranks, 99} - {move.peer}:
                with pytest.raises(ScheduleError):
                    check(tampered(schedule, rank, index, [move._replace(peer=peer)]))


def test_another_kind_of_move() -> None:
    other = {MoveKind.ADD: MoveKind.COPY, MoveKind.COPY: MoveKind.ADD}
    for schedule in small_schedules():
        for rank, index, move in every_move(schedule):
            if move.kind in other:
                with pytest.raises(ScheduleError):
                    check(tampered(schedule, rank, index, [move._replace(kind=other[move.kind])]))


def test_other_chunks() -> None:
    """Shifted up or down, grown by one, or empty."""
    for schedule in small_schedules():
        for rank, index, move in every_move(schedule):
            start, stop = move.start, move.stop
            for span in (
                (start + 1, stop + 1),
                (start - 1, stop - 1),
                (start, stop + 1),
                (start, start),
            ):
                with pytest.raises(ScheduleError):
                    check(
                        tampered(
                            schedule, rank, index, [move._replace(start=span[0], stop=span[1])]
                        )
                    )


def commute(first: Move, second: Move) -> bool:
    """Moves of different chunks don't wait for one another; of one chunk, two sends or two sums
    may be exchanged."""
    apart = first.stop <= second.start or second.stop <= first.start
    return apart or (first.kind is second.kind and first.kind in (MoveKind.SEND, MoveKind.ADD))


def test_moves_reordered() -> None:
    """Refused whenever the exchange changes what is sent or held; where it doesn't, the result of
    the exchanged schedule is still right."""
    refused = harmless = 0
    for schedule in small_schedules():
        for rank, moves in lists_of(schedule).items():
            for index, (first, second) in enumerate(pairwise(moves)):
                mutant = tampered(schedule, rank, index, [second, first], width=2)
                if not commute(first, second):
                    with pytest.raises(ScheduleError):
                        check(mutant)
                    refused += 1
                else:
                    check(mutant)
                    harmless += 1
    assert refused > 500
    assert harmless > 500


def test_what_the_check_lets_pass_is_right_when_it_runs() -> None:
    """Any move put anywhere else in its list: refused, or right on real threads."""
    group = Group.everybody(Cluster.regular([2, 1]))
    for variant in VARIANTS:
        schedule = build(variant, group, 12)
        inputs = whole_numbers(schedule)
        for rank, index, move in every_move(schedule):
            without = lists_of(schedule)
            del without[rank][index]
            for place in range(len(without[rank]) + 1):
                lists = {r: list(moves) for r, moves in without.items()}
                lists[rank].insert(place, move)
                mutant = with_moves(schedule, lists)
                try:
                    check(mutant)
                except ScheduleError:
                    continue
                for r, result in run(mutant, inputs).items():
                    expected = np.sum([inputs[o] for o in mean_sets(schedule, r)], axis=0)
                    np.testing.assert_array_equal(result, expected)


def test_the_error_says_who_and_what() -> None:
    """The cause, not one of those who wait because of it."""
    schedule = build("tree", Group.everybody(Cluster.flat(7)), 24)
    moves = lists_of(schedule)
    assert moves[5][0] == Move(MoveKind.SEND, 2, 0, 1)
    with pytest.raises(
        ScheduleError, match=r"tree: rank 2 waits for what never comes \(add 0 from 5\); .*wrong"
    ):
        check(tampered(schedule, 5, 0, []))


def test_a_wait_in_a_circle_is_found() -> None:
    schedule = build("ring", Group.everybody(Cluster.flat(2)), 2)
    lists = {
        rank: [Move(MoveKind.ADD, 1 - rank, 0, 1), Move(MoveKind.SEND, 1 - rank, 0, 1)]
        for rank in (0, 1)
    }
    with pytest.raises(ScheduleError, match="waits in a circle"):
        check(with_moves(schedule, lists))


def test_a_chunk_that_waits_does_not_hold_up_another() -> None:
    """In list order these two would wait for one another; chunk by chunk they don't."""
    schedule = build("ring", Group.everybody(Cluster.flat(2)), 2)
    lists = {
        0: [
            Move(MoveKind.ADD, 1, 0, 1),
            Move(MoveKind.SEND, 1, 0, 1),
            Move(MoveKind.SEND, 1, 1, 2),
            Move(MoveKind.COPY, 1, 1, 2),
        ],
        1: [
            Move(MoveKind.ADD, 0, 1, 2),
            Move(MoveKind.SEND, 0, 1, 2),
            Move(MoveKind.SEND, 0, 0, 1),
            Move(MoveKind.COPY, 0, 0, 1),
        ],
    }
    crossed = with_moves(schedule, lists)
    check(crossed)
    inputs = whole_numbers(crossed)
    results = run(crossed, inputs)
    assert all(np.array_equal(result, inputs[0] + inputs[1]) for result in results.values())
