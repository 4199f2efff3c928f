from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from tests.members.test_membership_epoch import RANKS, STATUSES
from thalweg.members.membership_epoch import (
    MemberPhase,
    MemberStatus,
    collective_mismatch,
    member_to_evict,
    most_awaited,
    most_involved,
)

EIGHT = range(8)
PAIRS = st.lists(st.tuples(RANKS, RANKS).filter(lambda pair: pair[0] != pair[1]), max_size=6)


def test_of_the_two_ends_of_one_connection_it_is_who_sends() -> None:
    assert most_involved([], EIGHT) is None
    assert most_involved([(5, 6)], EIGHT) == 5
    assert most_involved([(6, 5)], EIGHT) == 6
    assert most_involved([(6, 5)], [5]) == 5  # the other has left


def test_one_whose_messages_arrive_damaged_is_found_after_its_first_peer_was_left_out() -> None:
    assert most_involved([(5, 6), (5, 7)], [0, 1, 2, 3, 4, 5, 7]) == 5


def test_one_that_nothing_gets_through_to_is_found_after_who_sent_to_it() -> None:
    assert most_involved([(5, 6)], EIGHT) == 5  # an innocent
    assert most_involved([(5, 6), (4, 6)], [0, 1, 2, 3, 4, 6, 7]) == 6


@given(PAIRS, st.sets(RANKS))
def test_nobody_has_more_partners(broken: list[tuple[int, int]], members: set[int]) -> None:
    def partners(rank: int) -> int:
        return len({p for pair in broken if rank in pair for p in pair if p != rank})

    found = most_involved(broken, members)
    assert (found is None) == all(partners(rank) == 0 for rank in members)
    if found is not None:
        assert found in members
        assert partners(found) == max(partners(rank) for rank in members)


def awaiting(awaits: Mapping[int, tuple[int, ...]]) -> dict[int, MemberStatus]:
    return {rank: MemberStatus(awaits=awaited) for rank, awaited in awaits.items()}


def test_most_awaited() -> None:
    assert most_awaited(awaiting({0: (), 1: ()})) is None
    assert most_awaited(awaiting({0: (2,), 1: (0,), 2: (0,)})) == 0
    assert most_awaited(awaiting({0: (1,), 1: (0,)})) == 1  # the highest of equals
    assert most_awaited(awaiting({0: (3,), 1: (3, 0)})) == 0  # 3 isn't here


@given(st.dictionaries(RANKS, STATUSES, max_size=6))
def test_nobody_is_awaited_by_more(statuses: dict[int, MemberStatus]) -> None:
    found = most_awaited(statuses)
    votes = {
        rank: sum(s.awaits.count(rank) for s in statuses.values())
        for rank in statuses
        if any(rank in s.awaits for s in statuses.values())
    }
    assert (found is None) == (not votes)
    if found is not None:
        assert votes[found] == max(votes.values())


def test_at_odds_are_those_who_share_with_those_who_do_not() -> None:
    working, stepping = MemberStatus(step=3, doing=MemberPhase.COLLECTIVE), MemberStatus(step=3)
    assert collective_mismatch({0: working, 1: working}) == ""
    assert collective_mismatch({0: stepping, 1: MemberStatus(doing=MemberPhase.SAFE_POINT)}) == ""
    assert collective_mismatch({0: working, 1: stepping, 2: working}) == (
        "ranks 0, 2 wait in a collective before step 3, but rank 1 in the step itself"
    )


@given(st.dictionaries(RANKS, STATUSES, max_size=6))
def test_at_odds_only_if_some_work_and_some_do_not(statuses: dict[int, MemberStatus]) -> None:
    kinds = {status.doing is MemberPhase.COLLECTIVE for status in statuses.values()}
    assert bool(collective_mismatch(statuses)) == (kinds == {True, False})


def test_connections_tell_first_then_what_is_done_differently_then_who_was_awaited() -> None:
    working, awaited = MemberStatus(doing=MemberPhase.COLLECTIVE, awaits=(1,)), MemberStatus()
    statuses = {0: working, 1: awaited}
    assert member_to_evict([(0, 1)], statuses) == (0, "")
    assert member_to_evict([], statuses) == (None, collective_mismatch(statuses))
    assert member_to_evict([], {0: MemberStatus(awaits=(1,)), 1: awaited}) == (1, "")
    assert member_to_evict([], {0: awaited, 1: awaited}) == (None, "")
