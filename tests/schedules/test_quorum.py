"""Quorum gathers: exact for every promised straggler set, by check and by a real run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
import pytest
from numpy.typing import NDArray

from tests import running
from tests.running import run
from thalweg.catalog import default_catalog
from thalweg.codes.fractional import FractionalRepetition
from thalweg.declarations import Code
from thalweg.errors import LayoutError, PeerLate, ScheduleError
from thalweg.facts import Cluster
from thalweg.schedules import Condition, Group, Kind, Move, Quorum, Schedule, check, check_code

STAR = default_catalog().topologies["star"]


@dataclass(frozen=True)
class SmallCyclic:
    """The three-worker code of Tandon et al., figure 2: real weights, one straggler."""

    members: int = 3
    stragglers: int = 1

    def row(self, member: int) -> NDArray[np.float64]:
        return np.array([[0.5, 1, 0], [0, 1, -1], [0.5, 0, 1]])[member]

    def decode(self, arrived: frozenset[int]) -> Mapping[int, float] | None:
        for pair, weights in (((1, 2), (1, 2)), ((0, 2), (1, 1)), ((0, 1), (2, -1))):
            if set(pair) <= arrived:
                return dict(zip(pair, map(float, weights), strict=True))
        return None


def coded(workers: int, code: Code, elements: int = 40) -> Schedule:
    assert STAR.coded is not None
    group = Group.everybody(Cluster.flat(workers))
    return STAR.coded(group, elements, 4, 0, root=None, make_code=lambda members: code)


FITTING = [(4, 1), (6, 1), (6, 2), (8, 3)]
CODES = [(3, SmallCyclic()), *((n, FractionalRepetition(n, s)) for n, s in FITTING)]


@pytest.mark.parametrize(("workers", "code"), CODES)
def test_every_promised_straggler_set(workers: int, code: Code) -> None:
    schedule = coded(workers, code)
    check(schedule)
    blocks = np.random.default_rng(0).integers(-50, 50, (workers, schedule.elements))
    messages = {rank: code.row(rank) @ blocks for rank in range(workers)}
    for late in combinations(range(1, workers), code.stragglers):
        results = run(schedule, messages, cut=[(rank, 0) for rank in late])
        for result in results.values():
            np.testing.assert_allclose(result, blocks.sum(axis=0), atol=1e-9)


def test_one_too_many_gives_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both members of a team gone: the master raises; it never adds up what is there."""
    schedule = coded(6, FractionalRepetition(6, 1))
    messages = {rank: np.ones(schedule.elements) for rank in range(6)}
    monkeypatch.setattr(running, "TIMEOUT", 0.3)
    with pytest.raises(PeerLate, match=r"waited at step 0, round 0, for"):
        run(schedule, messages, cut=[(2, 0), (3, 0)])


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
    honest = schedule.before.holds
    wrong = Condition("", lambda rank, chunk: honest(0 if rank == 3 else rank, chunk))
    with pytest.raises(ScheduleError, match="gets answers that aren't what its code says"):
        check(replace(schedule, before=wrong))


def test_a_second_receive_could_be_given_a_late_answer() -> None:
    """What comes after its quorum is over lies where the next receive of that span would look."""
    schedule = coded(4, FractionalRepetition(4, 1), elements=1)
    quorum = Quorum((0, 1, 2, 3), FractionalRepetition(4, 1))
    again = Move(Kind.QUORUM, 0, 0, 1, quorum)
    send = Move(Kind.SEND, 0, 0, 1)
    lists = {rank: list(schedule.moves(rank)) for rank in range(4)}
    for rank in (1, 2, 3):
        lists[rank].insert(1, send)
    for second in (again, Move(Kind.ADD, 1, 0, 1)):
        moves = {**lists, 0: [lists[0][0], second, *lists[0][1:]]}
        with pytest.raises(ScheduleError, match="may be given a late answer"):
            check(replace(schedule, program=lambda rank, moves=moves: iter(moves[rank])))


def test_a_quorum_is_for_as_many_as_its_code() -> None:
    schedule = coded(4, FractionalRepetition(4, 1), elements=1)
    for peers in ((0, 1), (0, 1, 2, 2)):
        quorum = Quorum(peers, FractionalRepetition(4, 1))
        with pytest.raises(ScheduleError, match="names another quorum than its code is for"):
            check(tampered(schedule, 0, 0, [Move(Kind.QUORUM, 0, 0, 1, quorum)]))


def test_layers_of_quorums() -> None:
    """Root 0 over 1 and 2, which stand in for one another, each over two that do: seven ranks."""
    pair = FractionalRepetition(2, 1)
    children = {0: (1, 2), 1: (3, 4), 2: (5, 6)}
    parent = {child: above for above, below in children.items() for child in below}

    def program(rank: int) -> Iterator[Move]:
        if rank in children:
            yield Move(Kind.QUORUM, rank, 0, 1, Quorum(children[rank], pair))
        if rank in parent:
            yield Move(Kind.SEND, parent[rank], 0, 1)
            yield Move(Kind.COPY, parent[rank], 0, 1)
        for child in children.get(rank, ()):
            yield Move(Kind.SEND, child, 0, 1)

    unit = np.eye(3)  # blocks: the root's own, the middle's, the leaves' (each held by four)
    layer = [0, 1, 1, 2, 2, 2, 2]
    schedule = Schedule(
        name="layers",
        ranks=tuple(range(7)),
        sizes=(2,),
        itemsize=8,
        program=program,
        before=Condition("", lambda rank, _: unit[layer[rank]]),
        after=Condition("", lambda rank, _: np.ones(3)),
    )
    check(schedule)
    inputs = {rank: np.full(2, 10.0 ** layer[rank]) for rank in range(7)}
    for late in ([], [(1, 0)], [(2, 0), (3, 1)], [(5, 2), (4, 1), (1, 0)]):
        for result in run(schedule, inputs, cut=late).values():
            np.testing.assert_array_equal(result, 111.0)


def test_teams_must_come_out_even() -> None:
    with pytest.raises(LayoutError, match=r"7 workers don't form teams of 2 .*; use stragglers=6"):
        FractionalRepetition(7, 1)


@pytest.mark.parametrize(("members", "stragglers"), [(4, 1), (6, 2), (8, 1)])
def test_fractional_repetition_decodes_exactly_when_every_team_is_there(
    members: int, stragglers: int
) -> None:
    code = FractionalRepetition(members, stragglers)
    check_code(code)
    rows = np.array([code.row(member) for member in range(members)])
    team = stragglers + 1
    assert rows.sum(axis=0).tolist() == [team] * members
    for size in range(members + 1):
        for arrived in combinations(range(members), size):
            whole = {member // team for member in arrived} == set(range(members // team))
            assert (code.decode(frozenset(arrived)) is not None) == whole
