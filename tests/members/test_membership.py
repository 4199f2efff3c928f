"""Members that agree on who is left, as threads at one real store.

Who is gone is up to each test here: how that is noticed is the heartbeat's business.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from threading import Barrier, Event
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from thalweg.errors import Interrupted, RunError, RunIsOver
from thalweg.members import failure_detector, membership
from thalweg.members.failure_detector import FIRST_HANG_TIMEOUT_SECONDS, RENDEZVOUS_KEY, Heartbeat
from thalweg.members.membership import (
    COLLECTIVE_MISMATCH_REMEDY,
    MAX_FRUITLESS_EPOCHS,
    NOT_REACHED_REASON,
    Membership,
)
from thalweg.members.membership_epoch import (
    FINISHED_REASON,
    MemberPhase,
    MembershipEpoch,
    MemberStatus,
)

PATIENCE = 30.0  # seconds
SILENT = "silent for 9.0 s"
AT_WORK = MemberStatus(step=3, doing=MemberPhase.COLLECTIVE)
AT_SAFE_POINT = MemberStatus(step=3, doing=MemberPhase.SAFE_POINT)


class Company:
    """Of `size` ranks. Whoever is `gone` has given no sign for long, as all others see it."""

    def __init__(self, store: Any, size: int, gone: set[int], timeout: float) -> None:
        self.store = store
        self.size = size
        self.gone = gone
        self.timeout = timeout
        self.all = [self.member(rank) for rank in range(size)]
        self._threads = ThreadPoolExecutor(2 * size)

    def member(self, rank: int) -> Membership:
        return Membership(self.store, rank, self.size, self.timeout)

    def comes(self, rank: int, status: MemberStatus) -> Future[MembershipEpoch]:
        return self._threads.submit(self.all[rank].rendezvous, status)

    def meet(self, statuses: Mapping[int, MemberStatus]) -> MembershipEpoch:
        """What all of these come to, which must be the same."""
        coming = {rank: self.comes(rank, status) for rank, status in statuses.items()}
        found = [future.result(PATIENCE) for future in coming.values()]
        assert all(membership_epoch == found[0] for membership_epoch in found)
        assert all(self.all[rank].membership_epoch == found[0] for rank in statuses)
        assert MembershipEpoch.of_text(self.store.get(f"epoch/{found[0].number}")) == found[0]
        return found[0]

    def refused(self, statuses: Mapping[int, MemberStatus]) -> list[RunError]:
        coming = [self.comes(rank, status) for rank, status in statuses.items()]
        found = [future.exception(PATIENCE) for future in coming]
        errors = [error for error in found if isinstance(error, RunError)]
        assert len(errors) == len(found)
        return errors

    def restart(self, rank: int) -> Membership:
        self.all[rank].close()
        self.all[rank] = self.member(rank)
        self.all[rank].find()
        return self.all[rank]

    def close(self) -> None:
        for member in self.all:
            member.close()
        self._threads.shutdown(cancel_futures=True)


@contextmanager
def company_of(
    size: int, *, store: Any = None, gone: tuple[int, ...] = (), timeout: float = PATIENCE
) -> Iterator[Company]:
    away = set(gone)

    def why_gone(heartbeat: Heartbeat, rank: int) -> str | None:
        return SILENT if rank in away else None

    with patch.object(Heartbeat, "failure_reason", why_gone):
        company = Company(tcp_store() if store is None else store, size, away, timeout)
        try:
            yield company
        finally:
            company.close()


def tcp_store() -> dist.TCPStore:
    patience = timedelta(seconds=PATIENCE)
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=patience)


def wait_until(so: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_wanted(member: Membership) -> bool:
    """At a safe point."""
    try:
        member.raise_if_join_requested()
    except Interrupted:
        return True
    return False


# Who is left


def test_one_that_does_not_come_is_left_out() -> None:
    with company_of(4, gone=(1,)) as company:
        membership_epoch = company.meet(
            {0: MemberStatus(step=17), 2: MemberStatus(step=17), 3: MemberStatus(step=18)}
        )
    assert (membership_epoch.number, membership_epoch.members) == (2, (0, 2, 3))
    assert membership_epoch.left == {1: SILENT}
    assert (membership_epoch.donor, membership_epoch.recipients) == (3, (0, 2))


def test_a_broken_connection_that_one_member_reports_counts_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first member publishes the epoch, and no connection of its own broke."""
    monkeypatch.setattr(membership, "EPOCH_WRITER_GRACE_SECONDS", PATIENCE)
    monkeypatch.setattr(failure_detector, "MIN_SILENCE_TIMEOUT_SECONDS", PATIENCE)
    store = tcp_store()
    members = [Membership(store, rank, 3, PATIENCE) for rank in range(3)]
    try:
        wait_until(lambda: all(2 in m.heartbeat.detector._peers for m in members[:2]))
        members[2].close()
        members[1].note_lost_messages(2)
        with ThreadPoolExecutor(2) as threads:
            found = list(threads.map(lambda m: m.rendezvous(MemberStatus()), members[:2]))
    finally:
        for member in members:
            member.close()
    assert [epoch.members for epoch in found] == [(0, 1), (0, 1)]
    assert found[0].left[2].startswith("connections broke, silent for")


def test_one_that_lives_is_waited_for() -> None:
    with company_of(3) as company:
        coming = [company.comes(rank, MemberStatus()) for rank in (0, 1)]
        wait_until(lambda: company.all[2].rendezvous_pending)  # it hears of it
        assert not any(future.done() for future in coming)
        late = company.comes(2, MemberStatus())
        assert {f.result(PATIENCE).members for f in (*coming, late)} == {(0, 1, 2)}


def test_all_that_call_at_once_agree() -> None:
    with company_of(5) as company:
        for number in (2, 3, 4):
            membership_epoch = company.meet({rank: MemberStatus(step=number) for rank in range(5)})
            assert (membership_epoch.number, membership_epoch.members) == (number, tuple(range(5)))
            assert membership_epoch.tries == 1


def test_of_many_offers_the_store_takes_one() -> None:
    with company_of(4) as company:
        for number in range(2, 12):
            offers = [MembershipEpoch(number=number, members=(rank,)) for rank in range(4)]
            barrier = Barrier(4, timeout=PATIENCE)

            def offer(member: Membership, own: MembershipEpoch, barrier: Barrier = barrier) -> None:
                barrier.wait()
                member._publish(own)

            pairs = zip(company.all, offers, strict=True)
            for future in [company._threads.submit(offer, *pair) for pair in pairs]:
                future.result(PATIENCE)
            company.store.add(RENDEZVOUS_KEY, 1)
            found = [member.find() for member in company.all]
            assert found[0] in offers
            assert all(membership_epoch == found[0] for membership_epoch in found)


def test_half_can_go_on_and_fewer_cannot() -> None:
    with company_of(4, gone=(0, 1)) as company:
        membership_epoch = company.meet({2: MemberStatus(), 3: MemberStatus()})
        assert membership_epoch.members == (2, 3)
    with company_of(5, gone=(0, 1, 2), timeout=1.0) as company:
        for error in company.refused({3: MemberStatus(), 4: MemberStatus()}):
            assert "found no quorum within 1 s: of 5 members ranks 0, 1, 2 failed" in (str(error))


def test_the_first_writes_and_others_help_it() -> None:
    """Rank 0 has come, and writes nothing any more."""
    with company_of(3) as company:
        entry = json.dumps([0, asdict(MemberStatus())]) + "\n"
        membership._append(company.store, membership._ready(2), entry)
        membership_epoch = company.meet({1: MemberStatus(), 2: MemberStatus()})
    assert membership_epoch.members == (0, 1, 2)


def test_rendezvous_that_came_to_nothing_are_passed_over() -> None:
    with company_of(2) as company:
        company.store.add(RENDEZVOUS_KEY, 5)
        announced = company.store.add(RENDEZVOUS_KEY, 0)
        assert company.meet({0: MemberStatus(), 1: MemberStatus()}).number == announced


def test_one_whose_view_is_old_does_not_write_the_next_epoch() -> None:
    """Rank 0 has read which epoch is the newest and is stopped; others redo its step without
    it, and are at the next rendezvous when it goes on."""
    with company_of(3) as company:
        reached, goes_on = Event(), Event()
        call = company.all[0]._announce_rendezvous

        def stopped_before(status: MemberStatus) -> int:
            reached.set()
            assert goes_on.wait(PATIENCE)
            return call(status)

        with patch.object(company.all[0], "_announce_rendezvous", stopped_before):
            late = company.comes(0, MemberStatus(step=18))
            assert reached.wait(PATIENCE)
            company.gone.add(0)
            assert company.meet({1: MemberStatus(step=17), 2: MemberStatus(step=17)}).members == (
                1,
                2,
            )
            company.gone.clear()
            coming = [company.comes(1, MemberStatus(step=18))]
            wait_until(lambda: company.store.check([membership._ready(3)]))
            goes_on.set()
            wait_until(lambda: b"\n[0, " in b"\n" + company.store.get(membership._ready(3)))
            coming.append(company.comes(2, MemberStatus(step=18)))
            [epoch] = {str(future.result(PATIENCE)) for future in (late, *coming)}
        epoch = company.all[1].membership_epoch
    assert (epoch.number, epoch.members) == (3, (0, 1, 2))
    assert (epoch.joined, epoch.recipients) == ((0,), (0,))


def test_one_that_was_left_out_joins_until_it_has_come_to_an_epoch() -> None:
    """Its connection to the store breaks while it waits, and it comes again: as one that joins,
    though the epoch that it has missed has it."""
    with company_of(3) as company:
        late, own = company.all[0], MemberStatus(step=18)
        company.store.add(RENDEZVOUS_KEY, 9)
        assert not late._follow_newest(own).joins
        company.all[1]._publish(MembershipEpoch(number=2, members=(1, 2)))
        assert late._follow_newest(own).joins
        company.all[1].membership_epoch = MembershipEpoch(number=2, members=(1, 2))
        came = {0: MemberStatus(joins=True), 1: MemberStatus(), 2: MemberStatus()}
        third = MembershipEpoch(number=3, members=(0, 1, 2), statuses=came)
        assert third.joined == (0,)
        company.all[1]._publish(third)
        assert late._follow_newest(own).joins
        assert late._follow_newest(own).joins


def test_an_offer_is_refused_if_there_is_an_epoch_between() -> None:
    """And a number that was passed over can't be used any more."""
    with company_of(2) as company:
        first, second = company.all
        company.store.add(RENDEZVOUS_KEY, 9)
        assert first._publish(MembershipEpoch(number=3, members=(0,)))
        assert not second._publish(MembershipEpoch(number=5, members=(1,)))
        assert second.find().number == 3
        assert second._publish(MembershipEpoch(number=5, members=(1,)))
        first._publish(MembershipEpoch(number=4, members=(0,)))
        assert first.find() == second.find() == MembershipEpoch(number=5, members=(1,))
        company.store.delete_key(membership._key(5))
        assert first.find().number == 3


@st.composite
def situations(draw: st.DrawFn) -> tuple[int, dict[int, MemberStatus]]:
    """So many ranks, and where those stand who come: half of them at least."""
    size = draw(st.integers(2, 5))
    ranks = st.sets(st.integers(0, size - 1), min_size=(size + 1) // 2)
    status = st.builds(
        MemberStatus,
        step=st.integers(0, 2),
        works=st.integers(0, 2),
        doing=st.sampled_from(MemberPhase),
        keeps=st.booleans(),
    )
    return size, {rank: draw(status) for rank in draw(ranks)}


@examples(15)
@given(situations())
def test_whoever_comes_from_wherever_all_agree(
    situation: tuple[int, dict[int, MemberStatus]],
) -> None:
    size, statuses = situation
    absent = tuple(rank for rank in range(size) if rank not in statuses)
    with company_of(size, store=dist.HashStore(), gone=absent) as company:
        membership_epoch = company.meet(statuses)
    assert membership_epoch.members == tuple(sorted(statuses))
    assert membership_epoch.statuses == statuses
    assert tuple(sorted(membership_epoch.left)) == absent


@pytest.fixture(scope="module")
def one_of_five() -> Iterator[tuple[Membership, set[int]]]:
    with company_of(5, store=dist.HashStore()) as company:
        yield company.all[0], company.gone


@given(
    came=st.dictionaries(
        st.integers(0, 6),
        st.builds(MemberStatus, joins=st.booleans(), doing=st.sampled_from(MemberPhase)),
    ),
    gone=st.sets(st.integers(0, 4)),
)
def test_what_is_offered(
    one_of_five: tuple[Membership, set[int]], came: dict[int, MemberStatus], gone: set[int]
) -> None:
    """Never without one that lives, with fewer than half, or with nobody who holds a state; who
    was no member before holds none."""
    member, away = one_of_five
    away.clear()
    away.update(gone)
    offer = member._offer(2, came)
    before = set(range(5))
    holders = {rank for rank, status in came.items() if not status.joins} & before
    at_work = any(came[rank].doing is MemberPhase.COLLECTIVE for rank in holders)
    if before - set(came) - gone or not holders or 2 * len(before & set(came)) < len(before):
        assert offer is None
        return
    assert offer is not None
    assert set(offer.members) == (holders if at_work else set(came))
    assert offer.statuses.keys() == set(offer.members)
    assert {rank for rank in offer.left if rank not in came} == before - set(came)


def test_who_is_through_is_neither_waited_for_nor_lost() -> None:
    """Of five, two are, and two die: the last one has its state to end with."""
    with company_of(5, gone=(3, 4)) as company:
        wait_until(lambda: {1, 2} <= company.all[0].heartbeat.detector._peers.keys())
        for rank in (1, 2):
            company.all[rank].close(finished=True)
        membership_epoch = company.meet({0: MemberStatus(step=9)})
    assert membership_epoch.members == (0,)
    assert membership_epoch.left == {1: FINISHED_REASON, 2: FINISHED_REASON, 3: SILENT, 4: SILENT}


# Noticing


def test_an_absence_is_reported_once_and_calls_for_a_rendezvous() -> None:
    reported: list[tuple[int, str]] = []
    back: list[int] = []
    with company_of(3) as company:
        member = company.all[0]
        member.on_suspected = lambda rank, reason: reported.append((rank, reason))
        member.on_recovered = back.append
        member.triggers_rendezvous = lambda rank: rank == 2
        company.gone.add(1)
        wait_until(lambda: reported)
        company.gone.clear()
        wait_until(lambda: back)
        assert not member.rendezvous_pending
        member.raise_if_rendezvous()
        company.gone.add(2)
        wait_until(lambda: member.rendezvous_pending)
        with pytest.raises(Interrupted, match="membership epoch 1 ended; rendezvous in progress"):
            member.raise_if_rendezvous()
        assert (reported, back) == ([(1, SILENT), (2, SILENT)], [1])
        assert list(member.suspected) == [2]
        assert member.has_failed_member([1, 2])
        assert not member.has_failed_member([1])


def test_one_that_cannot_see_others_die_ends() -> None:
    def mistaken(rank: int) -> bool:
        raise KeyError(rank)

    with company_of(2) as company:
        member = company.all[0]
        member.triggers_rendezvous = mistaken
        company.gone.add(1)
        wait_until(lambda: member.rendezvous_pending)
        why = "the failure detector of rank 0 has failed: KeyError: 1"
        with pytest.raises(RunError, match=why):
            member.raise_if_rendezvous()
        [error] = company.refused({0: MemberStatus()})
        assert error.problem == why


def test_who_was_evicted_learns_so_from_the_store() -> None:
    """Also one that was stopped, and hasn't heard of it."""
    with company_of(3) as company:
        company.all[0].raise_if_outdated()
        company.gone.add(0)
        company.meet({1: MemberStatus(), 2: MemberStatus()})
        company.all[1].raise_if_outdated()
        with pytest.raises(Interrupted, match="membership epoch 1 ended; 2 has replaced it"):
            company.all[0].raise_if_outdated()


def test_whoever_lets_others_wait_for_long_is_blamed() -> None:
    with company_of(2) as company:
        waits = company.all[0]
        waits.wait(FIRST_HANG_TIMEOUT_SECONDS, (1,))
        with pytest.raises(Interrupted, match="rank 1 blocked other ranks for 121 s"):
            waits.wait(FIRST_HANG_TIMEOUT_SECONDS + 1, (1,))
        membership_epoch = company.meet({0: MemberStatus(step=3), 1: MemberStatus(step=3)})
        assert membership_epoch.cause == "rank 1 blocked other ranks for 121 s"
        assert membership_epoch.statuses[0].awaits == (1,)
        membership_epoch = company.meet({0: MemberStatus(step=4), 1: MemberStatus(step=4)})
        assert membership_epoch.cause == "the members met in a rendezvous"
        assert membership_epoch.statuses[0].awaits == ()


# Who comes back


def test_one_that_was_fenced_off_is_let_in_at_a_safe_point() -> None:
    with company_of(3, gone=(2,)) as company:
        assert company.meet({0: MemberStatus(step=3), 1: MemberStatus(step=3)}).members == (0, 1)
        company.gone.clear()
        returns = company.comes(2, MemberStatus(step=2))
        wait_until(lambda: is_wanted(company.all[0]) and is_wanted(company.all[1]))
        assert not any(member.rendezvous_pending for member in company.all[:2])  # it waits for them
        membership_epoch = company.meet({0: AT_SAFE_POINT, 1: AT_SAFE_POINT})
        assert returns.result(PATIENCE) == membership_epoch
    assert (membership_epoch.number, membership_epoch.members) == (3, (0, 1, 2))
    assert (membership_epoch.joined, membership_epoch.recipients, membership_epoch.left) == (
        (2,),
        (2,),
        {},
    )


def test_joiners_wait_while_others_are_at_a_work() -> None:
    with company_of(3, gone=(2,)) as company:
        company.meet({0: MemberStatus(step=3), 1: MemberStatus(step=3)})
        company.gone.clear()
        returns = company.comes(2, MemberStatus(step=2))
        wait_until(lambda: is_wanted(company.all[0]))
        assert company.meet({0: AT_WORK, 1: AT_WORK}).members == (0, 1)
        assert not returns.done()
        wait_until(lambda: is_wanted(company.all[0]))
        membership_epoch = company.meet({0: AT_SAFE_POINT, 1: AT_SAFE_POINT})
        assert returns.result(PATIENCE) == membership_epoch
    assert membership_epoch.members == (0, 1, 2)


def test_one_that_was_started_again_before_it_was_missed() -> None:
    """It is a member as far as others know, and calls them at once."""
    with company_of(3) as company:
        company.restart(1)
        returns = company.comes(1, MemberStatus(joins=True))
        wait_until(lambda: company.all[0].rendezvous_pending and company.all[2].rendezvous_pending)
        membership_epoch = company.meet({0: MemberStatus(step=3), 2: MemberStatus(step=3)})
        assert returns.result(PATIENCE) == membership_epoch
    assert membership_epoch.members == (0, 1, 2)
    assert membership_epoch.joined == membership_epoch.recipients == (1,)
    assert membership_epoch.left == {1: "restarted"}


def test_one_that_is_started_again_finds_the_newest_epoch() -> None:
    with company_of(3, gone=(2,)) as company:
        assert company.restart(2).membership_epoch == MembershipEpoch.first(3)
        membership_epoch = company.meet({0: MemberStatus(step=3), 1: MemberStatus(step=3)})
        assert company.restart(2).membership_epoch == membership_epoch


def test_nobody_goes_on_if_nobody_holds_a_state() -> None:
    with company_of(2, timeout=1.0) as company:
        for error in company.refused({rank: MemberStatus(joins=True) for rank in (0, 1)}):
            assert "found no quorum" in str(error)


def test_who_comes_after_the_end_is_refused() -> None:
    with company_of(2) as company:
        early, late = company.all
        early.end(9)
        text = "rank 1 joins too late: the others have finished after step 9"
        with pytest.raises(RunIsOver, match=text):
            late.rendezvous(MemberStatus())
        with pytest.raises(RunIsOver, match=text), late.joining():
            pass


def test_who_comes_in_while_the_others_end_is_refused() -> None:
    with company_of(2) as company:
        early, late = company.all

        def is_refused() -> bool:
            try:
                late.raise_if_rendezvous()
            except RunIsOver:
                return True
            return False

        with late.joining():
            early.end(9)
            wait_until(is_refused)


# Members that don't get on


def meet_in_vain(company: Company, statuses: Mapping[int, MemberStatus], *blamed: int) -> None:
    """As often as may be."""
    for tries in range(1, MAX_FRUITLESS_EPOCHS + 1):
        for rank in statuses:
            if rank not in blamed:
                company.all[rank].note_lost_messages(*blamed)
        membership_epoch = company.meet(statuses)
        assert (membership_epoch.tries, membership_epoch.members) == (tries, tuple(statuses))
    for rank in statuses:
        if rank not in blamed:
            company.all[rank].note_lost_messages(*blamed)


def test_members_at_odds_are_reported() -> None:
    with company_of(3) as company:
        statuses = {0: AT_WORK, 1: MemberStatus(step=3), 2: AT_WORK}
        meet_in_vain(company, statuses)
        for error in company.refused(statuses):
            assert error.problem == (
                "ranks 0, 2 wait in a collective before step 3, but rank 1 in the step itself"
            )
            assert error.remedy == COLLECTIVE_MISMATCH_REMEDY


def test_one_that_is_not_reached_is_left_out_and_asks_again_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        time.sleep(min(seconds, 0.1))

    monkeypatch.setattr(membership, "sleep", sleep)
    with company_of(3) as company:
        statuses = dict.fromkeys(range(3), MemberStatus(step=3))
        meet_in_vain(company, statuses, 1)
        assert membership.EVICTED_BACK_OFF_SECONDS not in slept
        returns = company.comes(1, statuses[1])
        membership_epoch = company.meet({0: statuses[0], 2: statuses[2]})
        assert (membership_epoch.members, membership_epoch.left) == (
            (0, 2),
            {1: NOT_REACHED_REASON},
        )
        wait_until(lambda: is_wanted(company.all[0]))
        assert membership.EVICTED_BACK_OFF_SECONDS in slept
        membership_epoch = company.meet({0: AT_SAFE_POINT, 2: AT_SAFE_POINT})
        assert returns.result(PATIENCE) == membership_epoch
        assert (membership_epoch.members, membership_epoch.joined) == ((0, 1, 2), (1,))


def test_a_connection_to_one_that_was_gone_is_nobodys_fault() -> None:
    with company_of(4, gone=(3,)) as company:
        company.all[2].note_lost_messages(3)
        statuses = dict.fromkeys(range(3), MemberStatus(step=3))
        assert company.meet(statuses).broken_connections == ()
        company.all[0].note_lost_messages(1)
        assert company.meet(statuses).broken_connections == ((0, 1),)
        assert company.meet(statuses).broken_connections == ((0, 1),)
        assert company.meet(dict.fromkeys(range(3), MemberStatus(step=4))).broken_connections == ()


def test_those_who_get_on_begin_anew_to_count() -> None:
    with company_of(2) as company:
        meet_in_vain(company, dict.fromkeys(range(2), MemberStatus(step=3)))
        assert company.meet(dict.fromkeys(range(2), MemberStatus(step=4))).tries == 1


# Another store


def test_who_finds_another_epoch_with_its_number_at_another_store_joins_it() -> None:
    """Each went on without the other: 0 at the first store, then 1 at the second."""
    with company_of(2, gone=(1,)) as company:
        assert company.meet({0: MemberStatus(step=30)}).members == (0,)
        company.store = tcp_store()
        company.gone.symmetric_difference_update({0, 1})
        company.all[1].use_store(company.store)
        assert company.meet({1: MemberStatus(step=20)}).members == (1,)
        company.gone.clear()
        company.all[0].use_store(company.store)
        late = company.comes(0, MemberStatus(step=31))
        wait_until(lambda: is_wanted(company.all[1]))
        membership_epoch = company.meet({1: replace(AT_SAFE_POINT, step=21)})
        assert late.result(PATIENCE) == membership_epoch
    assert (membership_epoch.number, membership_epoch.members) == (3, (0, 1))
    assert (membership_epoch.joined, membership_epoch.recipients, membership_epoch.donor) == (
        (0,),
        (0,),
        1,
    )


def test_members_meet_at_another_store_when_theirs_is_gone() -> None:
    first, second = tcp_store(), tcp_store()
    patience = timedelta(seconds=PATIENCE)
    client = dist.TCPStore("127.0.0.1", first.port, timeout=patience)
    with company_of(3, store=client, gone=(1,)) as company:
        membership_epoch = company.meet({0: MemberStatus(step=3), 2: MemberStatus(step=3)})
        del first
        staying = [company.all[0], company.all[2]]
        wait_until(
            lambda: all(
                member.heartbeat.store_is_lost and member.rendezvous_pending for member in staying
            )
        )
        company.store = second
        for member in staying:
            member.use_store(second)
        assert not any(member.heartbeat.store_is_lost for member in staying)
        assert company.restart(1).membership_epoch == membership_epoch
        found = company.meet({0: MemberStatus(step=4), 2: MemberStatus(step=4)})
        assert (found.number, found.members) == (3, (0, 2))
