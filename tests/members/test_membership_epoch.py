"""What follows from where members stand: whose state is taken, by whom, and what they missed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thalweg.members.membership_epoch import Doing, Formation, Standing, is_enough

RANKS = st.integers(0, 40)
STANDINGS = st.builds(
    Standing,
    step=st.integers(0, 3),
    works=st.integers(0, 2),
    doing=st.sampled_from(Doing),
    joins=st.booleans(),
    keeps=st.booleans(),
    plan=st.sampled_from(["ring", "dssync+int8", "codedreduce(fanout=2, stragglers=1) @ x=\u00fc"]),
    lost=st.lists(RANKS, max_size=3, unique=True).map(tuple),
    awaits=st.lists(RANKS, max_size=3, unique=True).map(tuple),
    why=st.text(max_size=10),
)


@st.composite
def formations(draw: st.DrawFn) -> Formation:
    """One of the members at least holds a state."""
    standings = draw(st.dictionaries(RANKS, STANDINGS, min_size=1, max_size=6))
    holder = draw(st.sampled_from(sorted(standings)))
    standings[holder] = Standing(step=draw(st.integers(0, 3)), keeps=standings[holder].keeps)
    return formed(
        standings,
        left=draw(st.dictionaries(RANKS, st.text(max_size=10), max_size=2)),
        tries=draw(st.integers(1, 4)),
        broken=tuple(draw(st.lists(st.tuples(RANKS, RANKS), max_size=3))),
        problem=draw(st.sampled_from(["", "they don't agree"])),
    )


def formed(standings: Mapping[int, Standing], **others: Any) -> Formation:
    members = tuple(sorted(standings))
    return Formation(number=7, members=members, standings=standings, **others)


@given(formations())
def test_what_is_written_down_is_read_again(formation: Formation) -> None:
    assert Formation.of_text(formation.text()) == formation
    assert Formation.of_text(formation.text().encode()) == formation


@given(formations())
def test_all_go_on_where_one_of_the_furthest_is(formation: Formation) -> None:
    source = formation.standings[formation.source]
    assert source.place == formation.place
    assert not source.joins
    assert formation.plan == source.plan
    holders = [s for s in formation.standings.values() if not s.joins]
    assert source.place == max(standing.place for standing in holders)
    furthest = [standing for standing in holders if standing.place == source.place]
    assert source.is_alone == any(standing.is_alone for standing in furthest)
    first = min(r for r, s in formation.standings.items() if s in furthest)
    assert source.is_alone or formation.source == first
    assert formation.begins - source.step == (1 if source.is_alone else 0)


@given(formations())
def test_who_needs_a_state_takes_one_and_nobody_else(formation: Formation) -> None:
    takers = formation.takers
    assert formation.source not in takers
    assert set(formation.joined) <= set(takers)
    for rank in formation.members:
        standing = formation.standings[rank]
        there = not standing.joins and standing.place == formation.place
        alone = standing.keeps and not standing.joins
        assert (rank in takers) == (not there and not alone)


def test_at_first_all_stand_at_the_beginning() -> None:
    first = Formation.first(3)
    assert (first.number, first.members, first.source) == (1, (0, 1, 2), 0)
    assert (first.place, first.takers, first.joined) == ((0, 0), (), ())


def test_works_after_a_step_count() -> None:
    """Rank 2 has a work behind it that the others were interrupted in."""
    formation = formed({0: Standing(step=5), 1: Standing(step=4), 2: Standing(step=5, works=1)})
    assert formation.source == 2
    assert formation.takers == (0, 1)


def test_where_replicas_differ_those_behind_keep_theirs() -> None:
    formation = formed(
        {
            0: Standing(step=5, keeps=True),
            1: Standing(step=6, keeps=True),
            2: Standing(step=9, keeps=True, joins=True),
        }
    )
    assert (formation.source, formation.takers) == (1, (2,))


def test_who_has_the_newest_parameters_is_the_source_however_far_others_are() -> None:
    """Under asp. Where they begin is still where the furthest are."""
    formation = formed(
        {
            0: Standing(step=5, keeps=True, version=31),
            1: Standing(step=6, keeps=True, version=34),
            2: Standing(step=8, keeps=True, version=33, doing=Doing.STEP),
            3: Standing(step=9, keeps=True, version=40, joins=True),
        }
    )
    assert (formation.source, formation.root, formation.takers) == (1, 1, (3,))
    assert formation.begins == 9
    assert Formation.of_text(formation.text()) == formation
    assert formed({0: Standing(step=5), 1: Standing(step=6)}).root is None


def test_a_step_that_one_has_taken_alone_is_not_taken_by_those_who_join() -> None:
    """They take over what came of it; from a safe point they take the step as all do."""
    at_safe_point = Standing(step=5, keeps=True, doing=Doing.SAFE_POINT)
    joins = Standing(joins=True)
    formation = formed({0: at_safe_point, 1: Standing(step=5, keeps=True), 2: joins})
    assert (formation.source, formation.begins) == (1, 6)
    assert formation.at_work(6) == (0, 1)
    assert formation.at_work(7) == (0, 1, 2)
    formation = formed({0: at_safe_point, 1: Standing(step=4, keeps=True), 2: joins})
    assert (formation.source, formation.begins) == (0, 5)
    assert formation.at_work(5) == (0, 1)
    assert formation.at_work(6) == (0, 1, 2)
    assert formed({0: Standing(step=5), 1: joins}).begins == 5


# Works that were missed


def missed(own: Standing, furthest: Standing) -> float:
    return formed({0: own, 1: furthest}).missed(0)


@given(step=st.integers(1, 5), done=st.integers(0, 5), behind=st.integers(0, 5))
def test_where_replicas_differ_works_are_missed_that_others_have_done(
    step: int, done: int, behind: int
) -> None:
    """One that was interrupted in a work which is over for others does not come to that again."""
    furthest = Standing(step=step, works=done, doing=Doing.WORK, keeps=True)
    own = Standing(step=step, works=max(0, done - behind), doing=Doing.WORK, keeps=True)
    was_in = 1 if own.works < done else 0
    assert own.works + was_in + missed(own, furthest) == done
    assert missed(Standing(step=step - 1, keeps=True), furthest) == 0  # it comes to them yet


@pytest.mark.parametrize("doing", list(Doing))
def test_who_takes_over_a_state_has_no_works_until_its_next_safe_point(doing: Doing) -> None:
    furthest = Standing(step=3, works=2, doing=doing)
    assert missed(Standing(step=3, works=1, doing=Doing.WORK), furthest) == inf
    assert missed(Standing(step=2, doing=Doing.STEP), furthest) == inf
    assert missed(Standing(step=3, joins=True), furthest) == inf
    assert missed(Standing(step=0, joins=True, doing=Doing.SAFE_POINT), furthest) == 0
    assert missed(Standing(step=3, works=2, doing=doing), furthest) == 0


def test_only_those_who_are_at_a_work_do_it() -> None:
    formation = formed(
        {
            0: Standing(step=3, works=1, doing=Doing.WORK),
            1: Standing(step=3, works=1, doing=Doing.STEP),  # it had taken over a state before
            2: Standing(step=2, doing=Doing.STEP),
            3: Standing(step=3, works=1, doing=Doing.WORK),
            4: Standing(joins=True, doing=Doing.SAFE_POINT),
        }
    )
    assert formation.at_work(3) == (0, 3)
    assert formation.at_work(4) == formation.members


def test_where_replicas_differ_all_who_stayed_come_to_a_work() -> None:
    formation = formed(
        {
            0: Standing(step=3, doing=Doing.WORK, keeps=True),
            1: Standing(step=1, keeps=True),
            2: Standing(joins=True, keeps=True),
        }
    )
    assert formation.at_work(3) == (0, 1)
    assert formation.at_work(4) == formation.members


def test_where_they_begin_together() -> None:
    """Not before the step that one has taken alone, where replicas differ."""
    assert formed({0: Standing(step=3, works=2), 1: Standing(step=3)}).start == (3, 2)
    alone = Standing(step=3, keeps=True)
    assert formed({0: alone, 1: Standing(step=2, keeps=True)}).start == (4, 0)
    assert formed({0: replace(alone, works=1, doing=Doing.WORK)}).start == (3, 1)


# Enough, and why


@given(before=st.integers(1, 64), members=st.integers(0, 64))
def test_enough_is_half_and_two_parts_can_both_be_only_if_they_are_halves(
    before: int, members: int
) -> None:
    assert is_enough(before, before)
    assert is_enough(members, before) == (members >= before / 2)
    rest = before - members
    if rest >= 0 and is_enough(members, before) and is_enough(rest, before):
        assert members == rest


def test_what_made_members_meet() -> None:
    assert formed({0: Standing(), 1: Standing()}).cause == "members met anew"
    told = formed({0: Standing(), 1: Standing(why="rank 0 let others wait")})
    assert told.cause == "rank 0 let others wait"
