"""Quorum gathers: exact for every promised straggler set, by check and by nodes that run it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.running import SimulatedTree, contributions, run, tree_schedule
from thalweg.catalog import parse_plan
from thalweg.codes import TREE_ROOT, Allocation, CodedTree, allocate
from thalweg.codes.fractional import FractionalRepetition
from thalweg.declarations import Code
from thalweg.errors import LayoutError, ScheduleError
from thalweg.facts import Cluster
from thalweg.redundancy import allocation_of
from thalweg.schedules import (
    Condition,
    Group,
    Move,
    MoveKind,
    Quorum,
    Schedule,
    check,
    check_code,
    coded_tree,
)


@dataclass(frozen=True)
class SmallCyclic:
    """The three-worker code of Tandon et al., figure 2: real weights, one straggler."""

    members: int = 3
    stragglers: int = 1
    teams: tuple[int, ...] = ()

    def row(self, member: int) -> NDArray[np.float64]:
        return np.array([[0.5, 1, 0], [0, 1, -1], [0.5, 0, 1]])[member]

    def decode(self, arrived: frozenset[int]) -> Mapping[int, float] | None:
        for pair, weights in (((1, 2), (1, 2)), ((0, 2), (1, 1)), ((0, 1), (2, -1))):
            if set(pair) <= arrived:
                return dict(zip(pair, map(float, weights), strict=True))
        return None


def star(workers: int, code: Code, *, separate: bool = False) -> Allocation:
    """Its root lives with worker 0, or on a rank 0 of its own."""
    children = tuple(range(separate, workers + separate))
    return allocate(
        CodedTree({TREE_ROOT: children} | dict.fromkeys(children, ()), {TREE_ROOT: code}), 0
    )


def coded(workers: int, code: Code, elements: int = 40) -> Schedule:
    return tree_schedule(star(workers, code), elements, 4)


FITTING = [(4, 1), (6, 1), (6, 2), (8, 3), (7, 1), (5, 4)]
CODES = [(3, SmallCyclic()), *((n, FractionalRepetition(n, s)) for n, s in FITTING)]


@pytest.mark.parametrize(("workers", "code"), CODES)
@pytest.mark.parametrize("separate", [False, True])
def test_every_promised_straggler_set(workers: int, code: Code, separate: bool) -> None:
    """Who is late contributes nothing, and gets the sum as well; the root's own process too."""
    allocation = star(workers, code, separate=separate)
    schedule = tree_schedule(allocation, 40)
    check(schedule)
    cells = np.random.default_rng(0).integers(-50, 50, (allocation.cells, 40)).astype(float)
    simulated = SimulatedTree(allocation, schedule)
    for late in combinations(allocation.workers, code.stragglers):
        for results in simulated.run(contributions(allocation, cells), late=late).values():
            assert results is not None
            np.testing.assert_allclose(np.concatenate(results.arrays), cells.sum(axis=0), atol=1e-9)


@pytest.mark.parametrize("separate", [False, True])
def test_one_too_many_gives_no_result(separate: bool) -> None:
    """Both members of a team gone: nobody gets anything; what is there is never added up."""
    allocation = star(6, FractionalRepetition(6, 1), separate=separate)
    schedule = tree_schedule(allocation, 40)
    inputs = {worker: np.ones(40) for worker in allocation.workers}
    simulated = SimulatedTree(allocation, schedule)
    team = allocation.workers[2:4]
    found = simulated.run(inputs, cut=[(worker, allocation.host) for worker in team])
    assert set(found.values()) == {None}
    assert all(simulated.run(inputs, cut=[(team[0], 0)]).values())


def test_what_waits_for_every_message_refuses_a_quorum() -> None:
    schedule = coded(4, FractionalRepetition(4, 1))
    with pytest.raises(ScheduleError, match=r"has a quorum; run it with a Node and a Relay"):
        run(schedule, {rank: np.ones(40) for rank in range(4)})


def test_a_code_that_decodes_too_early_is_refused() -> None:
    """Even if only one order of arrival brings it out."""

    @dataclass(frozen=True)
    class Hasty(FractionalRepetition):
        def decode(self, arrived: frozenset[int]) -> Mapping[int, float] | None:
            if arrived == {0, 5}:
                return dict.fromkeys(arrived, 1.0)
            return FractionalRepetition.decode(self, arrived)

    with pytest.raises(ScheduleError, match=r"decodes a wrong sum without \[1, 2, 3, 4\]"):
        check(coded(6, Hasty(6, 1)))


def test_a_code_that_uses_what_has_not_arrived_is_refused() -> None:
    @dataclass(frozen=True)
    class Clairvoyant(FractionalRepetition):
        def decode(self, arrived: frozenset[int]) -> Mapping[int, float] | None:
            return {0: 1.0, 2: 1.0} if len(arrived) >= 2 else None

    with pytest.raises(ScheduleError, match="decodes a wrong sum without"):
        check_code(Clairvoyant(4, 1))


def test_a_code_that_waits_for_all_is_refused() -> None:
    @dataclass(frozen=True)
    class Patient(FractionalRepetition):
        def decode(self, arrived: frozenset[int]) -> Mapping[int, float] | None:
            return None if len(arrived) < self.members else super().decode(arrived)

    with pytest.raises(ScheduleError, match=r"promises to do without 1, and waits for \[\d\]"):
        check(coded(4, Patient(4, 1)))


def test_weights_that_are_a_little_off_are_refused() -> None:
    @dataclass(frozen=True)
    class Sloppy(FractionalRepetition):
        def decode(self, arrived: frozenset[int]) -> Mapping[int, float] | None:
            weights = FractionalRepetition.decode(self, arrived)
            return weights and dict.fromkeys(weights, 1.000009)

    with pytest.raises(ScheduleError, match="decodes a wrong sum"):
        check_code(Sloppy(4, 1))


def test_a_code_cannot_do_without_everybody() -> None:
    @dataclass(frozen=True)
    class Reckless(SmallCyclic):
        stragglers: int = 3

    with pytest.raises(ScheduleError, match="a code for 3 can't do without 3; allow fewer"):
        check_code(Reckless())


@pytest.mark.parametrize("stragglers", [1, 3])
def test_large_codes_are_sampled(stragglers: int) -> None:
    check(coded(64, FractionalRepetition(64, stragglers)))


def tampered(schedule: Schedule, rank: int, index: int, moves: list[Move]) -> Schedule:
    def program(of: int) -> Iterator[Move]:
        listed = list(schedule.program(of))
        if of == rank:
            listed[index : index + 1] = moves
        return iter(listed)

    return replace(schedule, program=program)


def test_every_move_of_a_coded_star_matters() -> None:
    """Removed, doubled or redirected: refused, even where a replica would have stood in."""
    for workers, code in CODES:
        schedule = coded(workers, code, elements=1)
        for rank in range(workers):
            for index, move in enumerate(schedule.moves(rank)):
                others = [move._replace(peer=p) for p in range(-1, workers) if p != move.peer]
                for mutant in ([], [move, move], *([other] for other in others)):
                    with pytest.raises(ScheduleError):
                        check(tampered(schedule, rank, index, mutant))


def test_answers_must_be_what_the_code_says() -> None:
    schedule = coded(4, FractionalRepetition(4, 1))
    honest = schedule.before.content
    wrong = Condition("", lambda rank, chunk: honest(0 if rank == 3 else rank, chunk))
    with pytest.raises(ScheduleError, match="gets answers that aren't what its code says"):
        check(replace(schedule, before=wrong))


def test_a_second_quorum_could_be_given_a_late_answer() -> None:
    """What comes after its quorum is over lies where the next one of that span would look."""
    schedule = coded(4, FractionalRepetition(4, 1), elements=1)
    quorum = Quorum((0, 1, 2, 3), FractionalRepetition(4, 1))
    again = Move(MoveKind.QUORUM, 0, 0, 1, quorum)
    moves = {rank: list(schedule.moves(rank)) for rank in range(4)}
    for rank in (1, 2, 3):
        moves[rank].insert(1, Move(MoveKind.ANSWER, 0, 0, 1))
    moves[0].insert(1, again)
    with pytest.raises(ScheduleError, match="may be given a late answer to its earlier quorum"):
        check(replace(schedule, program=lambda rank: iter(moves[rank])))


@pytest.mark.parametrize(
    ("kind", "why"),
    [(MoveKind.SEND, "waits for what never comes"), (MoveKind.ANSWER, "sends what nobody takes")],
)
def test_answers_are_told_apart_from_what_else_is_sent(kind: MoveKind, why: str) -> None:
    """Another message isn't taken for an answer, nor an answer for another message."""
    schedule = coded(4, FractionalRepetition(4, 1), elements=1)
    moves = {rank: list(schedule.moves(rank)) for rank in range(4)}
    if kind is MoveKind.SEND:
        moves[1][0] = Move(MoveKind.SEND, 0, 0, 1)
    else:
        moves[1].append(Move(MoveKind.ANSWER, 0, 0, 1))
    with pytest.raises(ScheduleError, match=why):
        check(replace(schedule, program=lambda rank: iter(moves[rank])))


def test_the_roots_process_may_answer_another_worker() -> None:
    """Its own cells are then in that worker's answer, and not added once more."""
    group = Group.everybody(Cluster.flat(20))
    allocation = allocation_of(parse_plan("codedreduce(fanout=4, stragglers=1)"), group)
    host = allocation.host
    assert allocation.tree.parents[host] != TREE_ROOT
    schedule = coded_tree(group, 100, 4, allocation)
    check(schedule)
    [*_, gathers] = [move for move in schedule.moves(host) if move.quorum is not None]
    assert gathers.quorum is not None
    assert gathers.quorum.sent
    twice = [
        move._replace(quorum=replace(move.quorum, sent=False)) if move.quorum else move
        for move in schedule.moves(host)
    ]
    with pytest.raises(ScheduleError, match="holds"):
        check(
            replace(
                schedule,
                program=lambda rank: iter(twice if rank == host else schedule.moves(rank)),
            )
        )


def test_a_quorum_is_for_as_many_as_its_code() -> None:
    schedule = coded(4, FractionalRepetition(4, 1), elements=1)
    for peers in ((0, 1), (0, 1, 2, 2)):
        quorum = Quorum(peers, FractionalRepetition(4, 1))
        with pytest.raises(ScheduleError, match="names another quorum than its code is for"):
            check(tampered(schedule, 0, 0, [Move(MoveKind.QUORUM, 0, 0, 1, quorum)]))


def test_layers_of_quorums() -> None:
    """Root 0 over 1 and 2, which stand in for one another, each over two that do: seven ranks."""
    pair = FractionalRepetition(2, 1)
    children = {TREE_ROOT: (1, 2), 1: (3, 4), 2: (5, 6), 3: (), 4: (), 5: (), 6: ()}
    allocation = allocate(CodedTree(children, {TREE_ROOT: pair, 1: pair, 2: pair}), 0)
    schedule = tree_schedule(allocation, 2)
    check(schedule)
    simulated = SimulatedTree(allocation, schedule)
    layer = {1: 1, 2: 1, 3: 2, 4: 2, 5: 2, 6: 2}
    inputs = {rank: np.full(2, 10.0 ** layer[rank]) for rank in layer}
    for lost in ([], [(1, 0)], [(2, 0), (3, 1)], [(5, 2), (4, 1), (1, 0)]):
        for results in simulated.run(inputs, cut=lost).values():
            assert results is not None
            np.testing.assert_array_equal(np.concatenate(results.arrays), 110.0)


def test_teams_need_not_come_out_even() -> None:
    """Those that are left over join a team; too few for one are refused."""
    assert FractionalRepetition(7, 1).teams == (3, 2, 2)
    with pytest.raises(LayoutError, match=r"4 workers can't do without 4; use stragglers=3 or"):
        FractionalRepetition(4, 4)


@pytest.mark.parametrize(("members", "stragglers"), [(4, 1), (6, 2), (8, 1)])
def test_fractional_repetition_decodes_exactly_when_every_team_is_there(
    members: int, stragglers: int
) -> None:
    code = FractionalRepetition(members, stragglers)
    check_code(code)
    rows = np.array([code.row(member) for member in range(members)])
    team = stragglers + 1
    assert rows.sum(axis=0).tolist() == [team] * (members // team)
    for size in range(members + 1):
        for arrived in combinations(range(members), size):
            whole = {member // team for member in arrived} == set(range(members // team))
            assert (code.decode(frozenset(arrived)) is not None) == whole
