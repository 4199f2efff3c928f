"""Quorum gathers: exact for every promised straggler set, by check and by a real run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.running import run
from thalweg.catalog import default_catalog
from thalweg.codes.fractional import FractionalRepetition
from thalweg.declarations import Code
from thalweg.errors import LayoutError, PeerLate, ScheduleError
from thalweg.facts import Cluster
from thalweg.schedules import Group, Kind, Schedule, check
from thalweg.schedules.check import straggler_sets

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
    return STAR.coded(group, elements, 4, 0, root=None, code=code)


CODES = [
    (3, SmallCyclic()),
    *((n, FractionalRepetition(n, s)) for n, s in [(4, 1), (6, 1), (6, 2), (8, 3)]),
]


@pytest.mark.parametrize(("workers", "code"), CODES)
def test_every_promised_straggler_set(workers: int, code: Code) -> None:
    schedule = coded(workers, code)
    check(schedule)
    blocks = np.random.default_rng(0).integers(-50, 50, (workers, schedule.elements))
    messages = {rank: code.row(rank) @ blocks for rank in range(workers)}
    late_sets = [set(late) for late in combinations(range(1, workers), code.stragglers)]
    assert sorted(map(sorted, straggler_sets(schedule))) == sorted(map(sorted, late_sets))
    for late in late_sets:
        results = run(schedule, messages, silent=late)
        for result in results.values():
            np.testing.assert_allclose(result, blocks.sum(axis=0), atol=1e-9)


def test_one_too_many_gives_no_result() -> None:
    """Both members of a team gone: the master raises; it never adds up what is there."""
    schedule = coded(6, FractionalRepetition(6, 1))
    messages = {rank: np.ones(schedule.elements) for rank in range(6)}
    from tests import running

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "TIMEOUT", 0.3)
        with pytest.raises(PeerLate, match=r"waited in round \[0\] for"):
            run(schedule, messages, silent={2, 3})


def test_a_code_that_decodes_too_early_is_refused() -> None:
    @dataclass(frozen=True)
    class Hasty(FractionalRepetition):
        def decode(self, arrived: frozenset[int]) -> Mapping[int, float] | None:
            return dict.fromkeys(arrived, 1.0) if len(arrived) >= self.members - 1 else None

    with pytest.raises(ScheduleError, match=r"with \[\d\] late"):
        check(coded(4, Hasty(4, 1)))


def test_a_code_that_waits_for_all_is_refused() -> None:
    @dataclass(frozen=True)
    class Patient(FractionalRepetition):
        def decode(self, arrived: frozenset[int]) -> Mapping[int, float] | None:
            return (
                None if len(arrived) < self.members else FractionalRepetition.decode(self, arrived)
            )

    with pytest.raises(ScheduleError, match="waits for what never comes"):
        check(coded(4, Patient(4, 1)))


def test_a_quorum_that_is_not_gathered_is_refused() -> None:
    schedule = coded(4, FractionalRepetition(4, 1))
    without = replace(
        schedule,
        program=lambda rank: (m for m in schedule.program(rank) if m.kind is not Kind.QUORUM),
    )
    with pytest.raises(ScheduleError, match="sends what nobody takes"):
        check(without)


def test_teams_must_come_out_even() -> None:
    with pytest.raises(
        LayoutError, match=r"7 workers don't form teams of 2 .*; use stragglers=6, or"
    ):
        FractionalRepetition(7, 1)


@pytest.mark.parametrize(("members", "stragglers"), [(4, 1), (6, 2), (8, 1)])
def test_fractional_repetition_decodes_exactly_when_every_team_is_there(
    members: int, stragglers: int
) -> None:
    code = FractionalRepetition(members, stragglers)
    rows = np.array([code.row(member) for member in range(members)])
    team = stragglers + 1
    assert rows.sum(axis=0).tolist() == [team] * members
    for size in range(members + 1):
        for arrived in combinations(range(members), size):
            weights = code.decode(frozenset(arrived))
            whole = {member // team for member in arrived} == set(range(members // team))
            assert (weights is not None) == whole
            if weights is not None:
                total = sum(weight * rows[member] for member, weight in weights.items())
                np.testing.assert_array_equal(total, np.ones(members))
