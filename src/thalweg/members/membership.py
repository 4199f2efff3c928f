"""How the members of a run agree on who is left, and on who is back.

Anybody who notices something calls a muster: the number of the next formation, in the store.
Everybody hears of it with the others' signs of life (`heartbeat.py`), breaks off what it exchanges,
comes, and says where it stands. When all have come but those who are gone, the first of them writes
the formation down; the store takes the first offer, so that there is one.

    muster 4 is called          4: [0: step 17] [2: step 17] [3: step 18] ... and 1 is silent
    formation 4 := members 0 2 3, 0 and 2 take the state of 3

Who isn't in it and hears of it is fenced off: its messages belong to an older formation. It asks to
be let in, as one does that was started again; the members come to a muster for it at their next
safe point.

A formation has at least half of the members of the one before. A part of a cluster that is cut off
from the store can't agree on anything, and waits until it can reach it again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from threading import Lock
from time import monotonic, sleep
from typing import Any

from thalweg.errors import Interrupted, RunError, RunIsOver, ranks_text
from thalweg.members.activity import key_of, last_seen
from thalweg.members.eviction import member_to_evict
from thalweg.members.failure_detector import (
    JOIN_REQUEST_KEY,
    RENDEZVOUS_KEY,
    RUN_ENDED_KEY,
    SILENT_REASON,
    Heartbeat,
)
from thalweg.members.membership_epoch import (
    MemberPhase,
    MembershipEpoch,
    MemberStatus,
    has_quorum,
    member_status_of,
)
from thalweg.transports.store_client import Store, StoreClient

RENDEZVOUS_POLL_SECONDS = 0.02  # seconds between two looks at who has come
# Seconds after which another than the first writes the formation down.
EPOCH_WRITER_GRACE_SECONDS = 0.5
JOIN_RETRY_SECONDS = 0.2  # seconds before one that wasn't let in asks again
NOT_REACHED_REASON = "not reached by others"
HUNG_REASON = "alive, but doesn't get on"
FINISHED_REASON = "through"  # with its training: nobody has lost it
EVICTED_BACK_OFF_SECONDS, MAX_EVICTED_BACK_OFF_SECONDS = (
    5.0,
    30.0,
)  # the same for one with which they got nowhere
MAX_FRUITLESS_EPOCHS = 3  # formations in a row that got nowhere, until one is left out
VOID_EPOCH = b"void"  # in the place of a formation that was never agreed on
COLLECTIVE_MISMATCH_REMEDY = "call run.consensus, run.average and run.save on every rank"

TriggersRendezvous = Callable[[int], bool]
"""Whether the absence of this rank is a reason to form anew."""


class Membership:
    """One rank's. `store` is the run's own, which all formations share."""

    def __init__(self, store: Store, rank: int, size: int, timeout: float) -> None:
        self.rank = rank
        self.membership_epoch = MembershipEpoch.first(size)
        self.triggers_rendezvous: TriggersRendezvous = lambda rank: True
        self.heeds_losses: Callable[[], bool] = lambda: True  # of what an idle rank has sent
        self.suspected: dict[int, float] = {}  # members that count as gone, and since when
        self.on_suspected: Callable[[int, str], None] = lambda rank, reason: None
        self.on_recovered: Callable[[int], None] = lambda rank: None
        self._timeout = timeout
        self._store_client = StoreClient(store, rank)
        self._rendezvous_number = self._requested_number = self.membership_epoch.number
        self._lost: set[int] = set()
        self._awaits: set[int] = set()
        self._why = ""
        self._is_outdated = False  # others went on without this rank, which has no state since
        self._back_off = 0.0  # seconds that it stayed away before it came in
        self._came_in = -MAX_EVICTED_BACK_OFF_SECONDS  # when that was
        self._lock = Lock()
        self._store_client.call(lambda s: _raise_to(s, self.membership_epoch.number))
        self._heartbeat = Heartbeat(
            rank, size, lambda: self.membership_epoch.members, self._on_heartbeat
        )
        self._heartbeat.begin(store)

    # For whoever waits

    @property
    def step(self) -> int:
        return self._heartbeat.step

    @step.setter
    def step(self, step: int) -> None:
        """Where the training thread is: a sign of life says so."""
        self._heartbeat.step = step

    @property
    def furthest(self) -> int:
        """The highest step that a member was seen at."""
        return self._heartbeat.detector.furthest

    @property
    def rendezvous_pending(self) -> bool:
        """Whether there is a muster to go to."""
        failed = self._heartbeat.failure is not None  # whoever comes is told
        return (
            self._rendezvous_number > self.membership_epoch.number
            or self._heartbeat.store_is_lost
            or failed
        )

    @property
    def store_is_lost(self) -> bool:
        """Whether the store is gone."""
        return self._heartbeat.store_is_lost

    @contextmanager
    def joining(self) -> Iterator[None]:
        """Inside, whoever waits is told if the run ends meanwhile."""
        self._store_client.call(self._refuse_if_ended)
        self._heartbeat.checks_for_end = True
        try:
            yield
        finally:
            self._heartbeat.checks_for_end = False

    def raise_if_rendezvous(self) -> None:
        self._refuse_if_blind()
        if self._heartbeat.has_ended:
            self._store_client.call(self._refuse_if_ended)
        if self.rendezvous_pending:
            raise Interrupted(f"the members of formation {self.membership_epoch.number} meet anew")

    def raise_if_outdated(self) -> None:
        """Interrupted if the store has a later formation: others went on without this rank, which
        may not have noticed it, since its process was stopped."""
        newest = self._store_client.call(_newest)
        if newest is not None and newest.number > self.membership_epoch.number:
            raise Interrupted(
                f"formation {newest.number} has followed {self.membership_epoch.number}"
            )

    def raise_if_join_requested(self) -> None:
        """The same at a safe point, where those are let in who ask for it."""
        self.raise_if_rendezvous()
        if self._requested_number > self.membership_epoch.number:
            raise Interrupted(f"somebody wants to join formation {self.membership_epoch.number}")

    def wait(self, seconds: float, peers: tuple[int, ...] = ()) -> None:
        """This rank has waited so long for these: Interrupted if that is to end."""
        self.raise_if_rendezvous()
        if seconds > self._heartbeat.detector.patience:
            with self._lock:
                self._awaits.update(peers)
            self.note_broken_connections(*peers)
            problem = f"{ranks_text(peers)} let others wait for {seconds:.0f} s"
            self.explain(problem)
            raise Interrupted(problem)

    def explain(self, problem: str) -> None:
        """What makes this rank come to the next muster."""
        with self._lock:
            self._why = self._why or problem

    def has_failed_member(self, ranks: Collection[int]) -> bool:
        """Whether one of these is gone, or hangs."""
        return any(self._why_missing(rank) is not None for rank in ranks)

    def request_rendezvous(self) -> None:
        """Whatever this rank waits for, it is to meet the others instead."""
        self._rendezvous_number = max(self._rendezvous_number, self.membership_epoch.number + 1)

    def note_lost_messages(self, *ranks: int) -> None:
        """What was sent to these is lost, or they are."""
        with self._lock:
            self._lost.update(ranks)
        self.note_broken_connections(*ranks)

    def note_broken_connections(self, *ranks: int) -> None:
        """The connections to these did."""
        for rank in ranks:
            self._heartbeat.detector.note_broken_connection(rank)

    # The muster

    def find(self) -> MembershipEpoch:
        """The formation that trains now, for one that was started again."""
        found = self._store_client.call(_newest)
        if found is not None:
            self.membership_epoch = found
        return self.membership_epoch

    def rendezvous(self, status: MemberStatus) -> MembershipEpoch:
        """Agree with the others on the next formation, and be in it. RunError if that can't be."""
        deadline = monotonic() + self._timeout
        status = self._with_reasons(status)
        while monotonic() <= deadline:
            status = self._after_the_newest(status)
            membership_epoch = self._agree_on_epoch(
                self._announce_rendezvous(status), status, deadline
            )
            if membership_epoch is not None:
                if membership_epoch.problem:
                    raise RunError(membership_epoch.problem, COLLECTIVE_MISMATCH_REMEDY)
                self.membership_epoch = membership_epoch
                self._rendezvous_number = max(self._rendezvous_number, membership_epoch.number)
                self._requested_number = max(self._requested_number, membership_epoch.number)
                if self.rank in membership_epoch.members:
                    if status.joins:
                        self._came_in = monotonic()
                    for rank in (*membership_epoch.left, *membership_epoch.joined):
                        self._heartbeat.detector.forget(rank, monotonic())
                    self.suspected = {}
                    self._is_outdated = False
                    return membership_epoch
                self._is_outdated = True
                status = _joining(status)
                if membership_epoch.left.get(self.rank) == NOT_REACHED_REASON:
                    self._stay_away()
                    deadline = monotonic() + self._timeout
                sleep(JOIN_RETRY_SECONDS)
        raise self._nobody_came()

    def _after_the_newest(self, status: MemberStatus) -> MemberStatus:
        """The standing of this rank after the newest formation in the store. A rank joins that was
        left out of it, or is to be given a state there, or that holds another formation with the
        same number, from another store. It joins until it is in a formation that it has come to."""
        newest, own = (
            self._store_client.call(_newest) or self.membership_epoch,
            self.membership_epoch,
        )
        is_same = (newest.number, newest.members) == (own.number, own.members)
        if newest.number >= own.number and not is_same:
            self.membership_epoch = newest
            holds = self.rank in newest.members and self.rank not in newest.joined
            self._is_outdated |= newest.number == own.number or not holds
        return _joining(status) if self._is_outdated else status

    def _with_reasons(self, status: MemberStatus) -> MemberStatus:
        """What made this rank come, to be told once."""
        with self._lock:
            lost, self._lost = tuple(sorted(self._lost)), set()
            awaits, self._awaits = tuple(sorted(self._awaits)), set()
            why, self._why = self._why, ""
        return replace(status, lost=lost, awaits=awaits, why=why)

    def _stay_away(self) -> None:
        """Twice as long as the last time, if it was in for a shorter time than that."""
        again = monotonic() - self._came_in < self._back_off
        self._back_off = (
            min(2 * self._back_off, MAX_EVICTED_BACK_OFF_SECONDS)
            if again
            else EVICTED_BACK_OFF_SECONDS
        )
        sleep(self._back_off)

    def use_store(self, store: Store) -> None:
        """At another store, which knows nothing yet."""
        self._store_client = StoreClient(store, self.rank)
        self._store_client.call(lambda s: _raise_to(s, self.membership_epoch.number))
        self._write_down(self.membership_epoch)
        self._heartbeat.begin(store)

    def end(self, step: int) -> None:
        """All members have come to the end of their training."""
        with suppress(RunError):  # the store is gone
            self._store_client.call(lambda store: store.set(RUN_ENDED_KEY, str(step)))

    def close(self, *, through: bool = False) -> None:
        """`through`, this rank has come to the end of its training."""
        self._heartbeat.close(self._store_client if through else None)

    def _on_heartbeat(self, called: int, wished: int) -> None:
        """In the heartbeat's thread, after each round of signs."""
        self._rendezvous_number = max(self._rendezvous_number, called)
        self._requested_number = max(self._requested_number, wished)
        for rank in self.membership_epoch.members:
            reason = None if rank == self.rank else self._heartbeat.failure_reason(rank)
            if reason is None:
                if self.suspected.pop(rank, None) is not None:
                    self.on_recovered(rank)
            elif rank not in self.suspected:
                self.suspected[rank] = monotonic()
                self.on_suspected(rank, reason)
            if rank in self.suspected and self.triggers_rendezvous(rank):
                self.request_rendezvous()

    def _announce_rendezvous(self, status: MemberStatus) -> int:
        """The number of the muster to go to: one beyond the formation, if no later was called. One
        that nobody waits for only asks for it: others come when it suits them."""
        number = self.membership_epoch.number + 1
        if status.joins and self.rank not in self.membership_epoch.members:
            self._store_client.call(lambda store: _raise_to(store, number, JOIN_REQUEST_KEY))
            return max(number, self._store_client.call(lambda store: store.add(RENDEZVOUS_KEY, 0)))
        return self._store_client.call(lambda store: _raise_to(store, number))

    def _agree_on_epoch(
        self, number: int, status: MemberStatus, deadline: float
    ) -> MembershipEpoch | None:
        """Come to this muster; None if a later one was called, or nothing came of it."""
        entry = json.dumps([self.rank, asdict(status)]) + "\n"
        self._store_client.call(lambda store: _append(store, _ready(number), entry))
        complete: float | None = None
        while monotonic() <= deadline:
            self._refuse_if_blind()
            self._store_client.call(self._refuse_if_ended)
            called, text, ready = self._store_client.call(lambda store: _state(store, number))
            if text is not None:
                return None if text == VOID_EPOCH else MembershipEpoch.of_text(text)
            if called > number:
                return None
            offer = None if status.joins else self._offer(number, ready)
            if offer is None:
                complete = None
            else:
                complete = complete or monotonic()
                first = min(rank for rank in ready if not ready[rank].joins) == self.rank
                if first or monotonic() - complete > EPOCH_WRITER_GRACE_SECONDS:
                    if not self._write_down(offer):
                        return None
                    continue
            sleep(RENDEZVOUS_POLL_SECONDS)
        return None

    def _write_down(self, offer: MembershipEpoch) -> bool:
        """Offer this formation to the store, which takes the first with its number. False if there
        is one between this rank's own and the offered one: then what this rank knows is old. Until
        then each number between is made void, so that nobody can use it any more."""
        left = {rank: self._with_last_activity(rank, why) for rank, why in offer.left.items()}
        key, text = _key(offer.number), replace(offer, left=left).text()
        skipped = [_key(number) for number in range(self.membership_epoch.number + 1, offer.number)]

        def write(store: Store) -> bool:
            if any(
                store.compare_set(between, "", VOID_EPOCH.decode()) != VOID_EPOCH
                for between in skipped
            ):
                return False
            store.compare_set(key, "", text)
            return True

        return self._store_client.call(write)

    def _offer(self, number: int, ready: Mapping[int, MemberStatus]) -> MembershipEpoch | None:
        """The formation of those who have come; None while others may come, or too few have."""
        before = self.membership_epoch
        left = {}
        ready = {r: s if r in before.members else replace(s, joins=True) for r, s in ready.items()}
        for rank in before.members:
            if rank not in ready:
                reason = self._why_missing(rank)
                if reason is None:
                    return None
                left[rank] = reason
        if all(status.joins for status in ready.values()):
            return None
        place = max(s.place for s in ready.values() if not s.joins)
        fruitless = place <= before.start
        tries = before.tries + 1 if fruitless and not left else 1
        gone = {*left, *(rank for rank, status in ready.items() if status.joins)}
        broken = {*(before.broken_connections if fruitless else ()), *_broken(ready, but=gone)}
        present = _let_in(ready)
        culprit, problem = (
            member_to_evict(broken, present) if tries > MAX_FRUITLESS_EPOCHS else (None, "")
        )
        if culprit is not None:
            left[culprit] = NOT_REACHED_REASON
            del present[culprit]
            tries = 1
        came = [rank for rank in ready if rank in before.members]
        through = [rank for rank, reason in left.items() if reason == FINISHED_REASON]
        if all(status.joins for status in present.values()):
            return None
        if not has_quorum(len(came) + len(through), len(before.members)):
            return None
        came_back = {r: "started again" for r, s in ready.items() if s.joins}
        left |= {rank: why for rank, why in came_back.items() if rank in before.members}
        return MembershipEpoch(
            number=number,
            members=tuple(sorted(present)),
            statuses=present,
            left=left,
            tries=tries,
            broken_connections=tuple(sorted(broken)),
            problem=problem,
        )

    def _why_missing(self, rank: int) -> str | None:
        """Why it isn't waited for; None if it is."""
        if self._heartbeat.detector.has_finished(rank):
            return FINISHED_REASON
        reason = self._heartbeat.failure_reason(rank)
        if reason is None and self._heartbeat.is_hung(rank):
            return HUNG_REASON
        return reason

    def _with_last_activity(self, rank: int, why: str) -> str:
        """What one that is silent or hangs has last told of itself."""
        if not why.startswith((SILENT_REASON, HUNG_REASON)):
            return why
        key = key_of(rank, self.membership_epoch.number)
        seen = self._store_client.call(lambda store: last_seen(store, key))
        return f"{why}, last seen {seen}" if seen else why

    def _refuse_if_blind(self) -> None:
        """A rank that can't see others die is of no use to them."""
        if self._heartbeat.failure is not None:
            raise self._heartbeat.failure

    def _refuse_if_ended(self, store: Store) -> None:
        if store.check([RUN_ENDED_KEY]):
            step = store.get(RUN_ENDED_KEY).decode()
            raise RunIsOver(
                f"rank {self.rank} comes too late: the others have ended after step {step}",
                "take their checkpoint or result, or start the run again",
            )

    def _nobody_came(self) -> RunError:
        before = self.membership_epoch.members
        gone = [rank for rank in before if rank != self.rank and self._why_missing(rank)]
        return RunError(
            f"rank {self.rank} found too few others to go on with after {self._timeout:g} s: of "
            f"{len(before)} members {ranks_text(gone) if gone else 'none'} are gone",
            "at least half are needed: start the run again, it goes on from its last checkpoint",
        )


def _joining(status: MemberStatus) -> MemberStatus:
    """Of one that was left out: what it lost is nobody's reason any more."""
    return replace(status, joins=True, lost=(), awaits=(), why="")


def _broken(
    ready: Mapping[int, MemberStatus], *, but: Collection[int]
) -> Iterator[tuple[int, int]]:
    """Connections: from whom, to whom; but those to one that is or was gone, which explains it."""
    for rank, status in ready.items():
        yield from ((rank, peer) for peer in status.lost if peer not in but)


def _let_in(ready: Mapping[int, MemberStatus]) -> dict[int, MemberStatus]:
    """Not those who join while others are at a work: they would have to take part in it."""
    at_work = any(s.doing is MemberPhase.COLLECTIVE for s in ready.values() if not s.joins)
    return {rank: s for rank, s in ready.items() if not (s.joins and at_work)}


def _raise_to(store: Store, number: int, key: str = RENDEZVOUS_KEY) -> int:
    """The number of the last muster, which is this one at least."""
    while (called := store.add(key, 0)) < number:
        store.compare_set(key, str(called), str(number))
    return called


def _state(store: Store, number: int) -> tuple[int, bytes | None, dict[int, MemberStatus]]:
    """The last muster that was called, the formation if it is written down, and who has come."""
    called = store.add(RENDEZVOUS_KEY, 0)
    key = _key(number)
    if store.check([key]):
        return called, store.get(key), {}
    lines = store.get(_ready(number)).decode().splitlines()
    entries = (json.loads(line) for line in lines)
    return called, None, {rank: member_status_of(data) for rank, data in entries}


def _append(store: Any, key: str, text: str) -> None:
    """Torch's stores can, though its types don't say so."""
    store.append(key, text)


def _newest(store: Store) -> MembershipEpoch | None:
    """The last formation that was written down."""
    for number in range(store.add(RENDEZVOUS_KEY, 0), 0, -1):
        if store.check([_key(number)]) and (text := store.get(_key(number))) != VOID_EPOCH:
            return MembershipEpoch.of_text(text)
    return None


def _key(number: int) -> str:
    return f"formation/{number}"


def _ready(number: int) -> str:
    return f"ready/{number}"
