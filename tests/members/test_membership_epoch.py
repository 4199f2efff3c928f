"""What follows from where members stand: whose state is taken, by whom, and what they missed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thalweg.members.membership_epoch import MemberPhase, MembershipEpoch, MemberStatus, has_quorum

RANKS = st.integers(0, 40)
STATUSES = st.builds(
    MemberStatus,
    step=st.integers(0, 3),
    works=st.integers(0, 2),
    doing=st.sampled_from(MemberPhase),
    joins=st.booleans(),
    keeps=st.booleans(),
    plan=st.sampled_from(["ring", "dssync+int8", "codedreduce(fanout=2, stragglers=1) @ x=\u00fc"]),
    lost=st.lists(RANKS, max_size=3, unique=True).map(tuple),
    awaits=st.lists(RANKS, max_size=3, unique=True).map(tuple),
    why=st.text(max_size=10),
)


@st.composite
def formations(draw: st.DrawFn) -> MembershipEpoch:
    """One of the members at least holds a state."""
    statuses = draw(st.dictionaries(RANKS, STATUSES, min_size=1, max_size=6))
    holder = draw(st.sampled_from(sorted(statuses)))
    statuses[holder] = MemberStatus(step=draw(st.integers(0, 3)), keeps=statuses[holder].keeps)
    return epoch_of(
        statuses,
        left=draw(st.dictionaries(RANKS, st.text(max_size=10), max_size=2)),
        tries=draw(st.integers(1, 4)),
        broken_connections=tuple(draw(st.lists(st.tuples(RANKS, RANKS), max_size=3))),
        problem=draw(st.sampled_from(["", "they don't agree"])),
    )


def epoch_of(statuses: Mapping[int, MemberStatus], **others: Any) -> MembershipEpoch:
    members = tuple(sorted(statuses))
    return MembershipEpoch(number=7, members=members, statuses=statuses, **others)


@given(formations())
def test_what_is_written_down_is_read_again(membership_epoch: MembershipEpoch) -> None:
    assert MembershipEpoch.of_text(membership_epoch.text()) == membership_epoch
    assert MembershipEpoch.of_text(membership_epoch.text().encode()) == membership_epoch


@given(formations())
def test_all_go_on_where_one_of_the_furthest_is(membership_epoch: MembershipEpoch) -> None:
    source = membership_epoch.statuses[membership_epoch.donor]
    assert source.place == membership_epoch.place
    assert not source.joins
    assert membership_epoch.plan == source.plan
    holders = [s for s in membership_epoch.statuses.values() if not s.joins]
    assert source.place == max(status.place for status in holders)
    furthest = [status for status in holders if status.place == source.place]
    assert source.is_alone == any(status.is_alone for status in furthest)
    first = min(r for r, s in membership_epoch.statuses.items() if s in furthest)
    assert source.is_alone or membership_epoch.donor == first
    assert membership_epoch.first_step - source.step == (1 if source.is_alone else 0)


@given(formations())
def test_who_needs_a_state_takes_one_and_nobody_else(membership_epoch: MembershipEpoch) -> None:
    takers = membership_epoch.recipients
    assert membership_epoch.donor not in takers
    assert set(membership_epoch.joined) <= set(takers)
    for rank in membership_epoch.members:
        status = membership_epoch.statuses[rank]
        there = not status.joins and status.place == membership_epoch.place
        alone = status.keeps and not status.joins
        assert (rank in takers) == (not there and not alone)


def test_at_first_all_stand_at_the_beginning() -> None:
    first = MembershipEpoch.first(3)
    assert (first.number, first.members, first.donor) == (1, (0, 1, 2), 0)
    assert (first.place, first.recipients, first.joined) == ((0, 0), (), ())


def test_works_after_a_step_count() -> None:
    """Rank 2 has a work behind it that the others were interrupted in."""
    membership_epoch = epoch_of(
        {0: MemberStatus(step=5), 1: MemberStatus(step=4), 2: MemberStatus(step=5, works=1)}
    )
    assert membership_epoch.donor == 2
    assert membership_epoch.recipients == (0, 1)


def test_where_replicas_differ_those_behind_keep_theirs() -> None:
    membership_epoch = epoch_of(
        {
            0: MemberStatus(step=5, keeps=True),
            1: MemberStatus(step=6, keeps=True),
            2: MemberStatus(step=9, keeps=True, joins=True),
        }
    )
    assert (membership_epoch.donor, membership_epoch.recipients) == (1, (2,))


def test_who_has_the_newest_parameters_is_the_source_however_far_others_are() -> None:
    """Under asp. Where they begin is still where the furthest are."""
    membership_epoch = epoch_of(
        {
            0: MemberStatus(step=5, keeps=True, version=31),
            1: MemberStatus(step=6, keeps=True, version=34),
            2: MemberStatus(step=8, keeps=True, version=33, doing=MemberPhase.STEP),
            3: MemberStatus(step=9, keeps=True, version=40, joins=True),
        }
    )
    assert (membership_epoch.donor, membership_epoch.root, membership_epoch.recipients) == (
        1,
        1,
        (3,),
    )
    assert membership_epoch.first_step == 9
    assert MembershipEpoch.of_text(membership_epoch.text()) == membership_epoch
    assert epoch_of({0: MemberStatus(step=5), 1: MemberStatus(step=6)}).root is None


def test_a_step_that_one_has_taken_alone_is_not_taken_by_those_who_join() -> None:
    """They take over what came of it; from a safe point they take the step as all do."""
    at_safe_point = MemberStatus(step=5, keeps=True, doing=MemberPhase.SAFE_POINT)
    joins = MemberStatus(joins=True)
    membership_epoch = epoch_of({0: at_safe_point, 1: MemberStatus(step=5, keeps=True), 2: joins})
    assert (membership_epoch.donor, membership_epoch.first_step) == (1, 6)
    assert membership_epoch.collective_members(6) == (0, 1)
    assert membership_epoch.collective_members(7) == (0, 1, 2)
    membership_epoch = epoch_of({0: at_safe_point, 1: MemberStatus(step=4, keeps=True), 2: joins})
    assert (membership_epoch.donor, membership_epoch.first_step) == (0, 5)
    assert membership_epoch.collective_members(5) == (0, 1)
    assert membership_epoch.collective_members(6) == (0, 1, 2)
    assert epoch_of({0: MemberStatus(step=5), 1: joins}).first_step == 5


# Works that were missed


def skipped(own: MemberStatus, furthest: MemberStatus) -> float:
    return epoch_of({0: own, 1: furthest}).collectives_to_skip(0)


@given(step=st.integers(1, 5), done=st.integers(0, 5), behind=st.integers(0, 5))
def test_where_replicas_differ_works_are_missed_that_others_have_done(
    step: int, done: int, behind: int
) -> None:
    """One that was interrupted in a work which is over for others does not come to that again."""
    furthest = MemberStatus(step=step, works=done, doing=MemberPhase.COLLECTIVE, keeps=True)
    own = MemberStatus(
        step=step, works=max(0, done - behind), doing=MemberPhase.COLLECTIVE, keeps=True
    )
    was_in = 1 if own.works < done else 0
    assert own.works + was_in + skipped(own, furthest) == done
    assert skipped(MemberStatus(step=step - 1, keeps=True), furthest) == 0  # it comes to them yet


@pytest.mark.parametrize("doing", list(MemberPhase))
def test_who_takes_over_a_state_has_no_works_until_its_next_safe_point(doing: MemberPhase) -> None:
    furthest = MemberStatus(step=3, works=2, doing=doing)
    assert skipped(MemberStatus(step=3, works=1, doing=MemberPhase.COLLECTIVE), furthest) == inf
    assert skipped(MemberStatus(step=2, doing=MemberPhase.STEP), furthest) == inf
    assert skipped(MemberStatus(step=3, joins=True), furthest) == inf
    assert skipped(MemberStatus(step=0, joins=True, doing=MemberPhase.SAFE_POINT), furthest) == 0
    assert skipped(MemberStatus(step=3, works=2, doing=doing), furthest) == 0


def test_only_those_who_are_at_a_work_do_it() -> None:
    membership_epoch = epoch_of(
        {
            0: MemberStatus(step=3, works=1, doing=MemberPhase.COLLECTIVE),
            1: MemberStatus(
                step=3, works=1, doing=MemberPhase.STEP
            ),  # it had taken over a state before
            2: MemberStatus(step=2, doing=MemberPhase.STEP),
            3: MemberStatus(step=3, works=1, doing=MemberPhase.COLLECTIVE),
            4: MemberStatus(joins=True, doing=MemberPhase.SAFE_POINT),
        }
    )
    assert membership_epoch.collective_members(3) == (0, 3)
    assert membership_epoch.collective_members(4) == membership_epoch.members


def test_where_replicas_differ_all_who_stayed_come_to_a_work() -> None:
    membership_epoch = epoch_of(
        {
            0: MemberStatus(step=3, doing=MemberPhase.COLLECTIVE, keeps=True),
            1: MemberStatus(step=1, keeps=True),
            2: MemberStatus(joins=True, keeps=True),
        }
    )
    assert membership_epoch.collective_members(3) == (0, 1)
    assert membership_epoch.collective_members(4) == membership_epoch.members


def test_where_they_begin_together() -> None:
    """Not before the step that one has taken alone, where replicas differ."""
    assert epoch_of({0: MemberStatus(step=3, works=2), 1: MemberStatus(step=3)}).start == (3, 2)
    alone = MemberStatus(step=3, keeps=True)
    assert epoch_of({0: alone, 1: MemberStatus(step=2, keeps=True)}).start == (4, 0)
    assert epoch_of({0: replace(alone, works=1, doing=MemberPhase.COLLECTIVE)}).start == (3, 1)


# Enough, and why


@given(before=st.integers(1, 64), members=st.integers(0, 64))
def test_enough_is_half_and_two_parts_can_both_be_only_if_they_are_halves(
    before: int, members: int
) -> None:
    assert has_quorum(before, before)
    assert has_quorum(members, before) == (members >= before / 2)
    rest = before - members
    if rest >= 0 and has_quorum(members, before) and has_quorum(rest, before):
        assert members == rest


def test_what_made_members_meet() -> None:
    assert (
        epoch_of({0: MemberStatus(), 1: MemberStatus()}).cause == "the members met in a rendezvous"
    )
    caused = epoch_of({0: MemberStatus(), 1: MemberStatus(why="rank 0 let others wait")})
    assert caused.cause == "rank 0 let others wait"
