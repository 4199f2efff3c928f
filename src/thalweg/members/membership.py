"""The members of a run agree on the next membership epoch when a rank fails or joins.

A rank that detects a failure announces a rendezvous: the number of the next epoch, in the store.
The others read it with the heartbeats (`failure_detector.py`), interrupt their collectives, come to
the rendezvous and publish their status. When all have come except those that failed, the first of
them publishes the epoch; the store accepts the first offer, so that there is only one.

    rendezvous 4 is announced   4: [0: step 17] [2: step 17] [3: step 18] ... and 1 is silent
    epoch 4 := members 0 2 3, 0 and 2 load the state of 3

A rank that isn't in the epoch is fenced off: its messages belong to an older epoch. It requests to
join, as a restarted rank does; the members come to a rendezvous for it at their next safe point.

An epoch has at least half of the previous epoch's members. The part of a cluster that can't reach
the store can't agree on anything, and waits until it can.
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
from thalweg.members.failure_detector import (
    JOIN_REQUEST_KEY,
    RENDEZVOUS_KEY,
    RUN_ENDED_KEY,
    SILENT_REASON,
    Heartbeat,
)
from thalweg.members.membership_epoch import (
    FINISHED_REASON,
    RESTARTED_REASON,
    MemberPhase,
    MembershipEpoch,
    MemberStatus,
    has_quorum,
    member_status_of,
    member_to_evict,
)
from thalweg.transports.store_client import Store, StoreClient

RENDEZVOUS_POLL_SECONDS = 0.02
EPOCH_WRITER_GRACE_SECONDS = 0.5  # then another than the first member publishes the epoch
JOIN_RETRY_SECONDS = 0.2
NOT_REACHED_REASON = "not reached by others"
HUNG_REASON = "hung"
# Before a member may join again that was evicted because no epoch with it made progress.
EVICTED_BACK_OFF_SECONDS, MAX_EVICTED_BACK_OFF_SECONDS = 5.0, 30.0
MAX_FRUITLESS_EPOCHS = 3  # in a row without progress, until a member is evicted
VOID_EPOCH = b"void"  # stored for an epoch that was never agreed on
COLLECTIVE_MISMATCH_REMEDY = "call run.consensus, run.all_reduce_mean and run.save on every rank"


class Membership:
    """The membership of one rank. `store` is the run's, shared by all epochs."""

    def __init__(self, store: Store, rank: int, size: int, timeout: float) -> None:
        self.rank = rank
        self.membership_epoch = MembershipEpoch.first(size)
        self.triggers_rendezvous: Callable[[int], bool] = lambda rank: True  # if this rank fails
        self.heeds_losses: Callable[[], bool] = lambda: True  # of an idle rank's messages
        self.suspected: dict[int, float] = {}  # members suspected to have failed, since when
        self.on_suspected: Callable[[int, str], None] = lambda rank, reason: None
        self.on_recovered: Callable[[int], None] = lambda rank: None
        self._timeout = timeout
        self._store_client = StoreClient(store, rank)
        self._rendezvous_number = self._requested_number = self.membership_epoch.number
        self._lost: set[int] = set()
        self._awaits: set[int] = set()
        self._why = ""
        self._is_outdated = False  # others continued without this rank: its state is invalid
        self._back_off = 0.0  # seconds that it waited before it joined
        self._joined_at = -MAX_EVICTED_BACK_OFF_SECONDS
        self._lock = Lock()
        self._store_client.call(lambda s: _raise_to(s, self.membership_epoch.number))
        self.heartbeat = Heartbeat(
            rank, size, lambda: self.membership_epoch.members, self._on_heartbeat
        )
        self.heartbeat.begin(store)

    # For threads that wait

    @property
    def rendezvous_pending(self) -> bool:
        """True if this rank should come to a rendezvous; also after a failure of the heartbeat,
        which the rendezvous raises."""
        announced = self._rendezvous_number > self.membership_epoch.number
        return announced or self.heartbeat.store_is_lost or self.heartbeat.failure is not None

    @contextmanager
    def joining(self) -> Iterator[None]:
        """A context in which waiting threads are interrupted if the run ends."""
        self._store_client.call(self._raise_if_ended)
        self.heartbeat.checks_for_end = True
        try:
            yield
        finally:
            self.heartbeat.checks_for_end = False

    def raise_if_rendezvous(self) -> None:
        if self.heartbeat.has_ended:
            self._store_client.call(self._raise_if_ended)
        if self.rendezvous_pending:
            self._raise_if_undetecting()
            number = self.membership_epoch.number
            raise Interrupted(f"membership epoch {number} ended; rendezvous in progress")

    def raise_if_outdated(self) -> None:
        """Interrupted if the store has a later epoch: the others continued without this rank, which
        may not have noticed, as its process was stopped."""
        newest, own = self._store_client.call(_newest), self.membership_epoch.number
        if newest is not None and newest.number > own:
            raise Interrupted(f"membership epoch {own} ended; {newest.number} has replaced it")

    def raise_if_join_requested(self) -> None:
        """Interrupted if a rendezvous is pending or, at a safe point, if a rank wants to join."""
        self.raise_if_rendezvous()
        if self._requested_number > self.membership_epoch.number:
            raise Interrupted(
                f"a rank wants to join membership epoch {self.membership_epoch.number}"
            )

    def wait(self, seconds: float, peers: tuple[int, ...] = ()) -> None:
        """Interrupted if this rank has waited too long for these peers, or if a rendezvous is
        pending."""
        self.raise_if_rendezvous()
        if seconds > self.heartbeat.detector.hang_timeout:
            with self._lock:
                self._awaits.update(peers)
            self.note_broken_connections(*peers)
            problem = f"{ranks_text(peers)} blocked other ranks for {seconds:.0f} s"
            self.explain(problem)
            raise Interrupted(problem)

    def explain(self, problem: str) -> None:
        """Set the reason for the next rendezvous, unless this rank has one already."""
        with self._lock:
            self._why = self._why or problem

    def has_failed_member(self, ranks: Collection[int]) -> bool:
        """True if one of these ranks has failed or hangs."""
        return any(self._why_missing(rank) is not None for rank in ranks)

    def request_rendezvous(self) -> None:
        """Make the threads of this rank stop waiting and come to a rendezvous."""
        self._rendezvous_number = max(self._rendezvous_number, self.membership_epoch.number + 1)

    def note_lost_messages(self, *ranks: int) -> None:
        """Record that messages to these ranks were lost, or the ranks themselves."""
        with self._lock:
            self._lost.update(ranks)
        self.note_broken_connections(*ranks)

    def note_broken_connections(self, *ranks: int) -> None:
        """Record that connections to these ranks broke."""
        self.heartbeat.detector.note_broken_connections(*ranks)

    # The rendezvous

    def find(self) -> MembershipEpoch:
        """The current epoch, for a restarted rank."""
        self.membership_epoch = self._store_client.call(_newest) or self.membership_epoch
        return self.membership_epoch

    def rendezvous(self, status: MemberStatus) -> MembershipEpoch:
        """Agree with the others on the next epoch with this rank. RunError if that fails."""
        deadline = monotonic() + self._timeout
        status = self._with_reasons(status)
        while monotonic() <= deadline:
            status = self._follow_newest(status)
            epoch = self._agree_on_epoch(self._announce_rendezvous(status), status, deadline)
            if epoch is not None:
                if epoch.problem:
                    raise RunError(epoch.problem, COLLECTIVE_MISMATCH_REMEDY)
                self.membership_epoch = epoch
                self._rendezvous_number = max(self._rendezvous_number, epoch.number)
                self._requested_number = max(self._requested_number, epoch.number)
                if self.rank in epoch.members:
                    if status.joins:
                        self._joined_at = monotonic()
                    for rank in (*epoch.left, *epoch.joined):
                        self.heartbeat.detector.forget(rank)
                    self.suspected = {}
                    self._is_outdated = False
                    return epoch
                self._is_outdated = True
                status = _joining(status)
                if epoch.left.get(self.rank) == NOT_REACHED_REASON:
                    self._wait_after_eviction()
                    deadline = monotonic() + self._timeout
                sleep(JOIN_RETRY_SECONDS)
        before = self.membership_epoch.members
        failed = [rank for rank in before if rank != self.rank and self._why_missing(rank)]
        raise RunError(
            f"rank {self.rank} found no quorum within {self._timeout:g} s: of {len(before)} "
            f"members {ranks_text(failed) if failed else 'none'} failed",
            "at least half are needed: start the run again, it resumes from its last checkpoint",
        )

    def _follow_newest(self, status: MemberStatus) -> MemberStatus:
        """Adopt the newest epoch in the store; the status of this rank after it. The rank joins if
        it is not a member or a recipient there, or if it has another epoch with the same number,
        from another store. It stays joining until an epoch that it has come to includes it."""
        own = self.membership_epoch
        newest = self._store_client.call(_newest) or own
        is_same = (newest.number, newest.members) == (own.number, own.members)
        if newest.number >= own.number and not is_same:
            self.membership_epoch = newest
            holds = self.rank in newest.members and self.rank not in newest.joined
            self._is_outdated |= newest.number == own.number or not holds
        return _joining(status) if self._is_outdated else status

    def _with_reasons(self, status: MemberStatus) -> MemberStatus:
        """The status with this rank's reasons for the rendezvous, which are reported once."""
        with self._lock:
            lost, self._lost = tuple(sorted(self._lost)), set()
            awaits, self._awaits = tuple(sorted(self._awaits)), set()
            why, self._why = self._why, ""
        return replace(status, lost=lost, awaits=awaits, why=why)

    def _wait_after_eviction(self) -> None:
        """Wait; twice as long as the last time if it was a member for less than that time."""
        again = monotonic() - self._joined_at < self._back_off
        longer = min(2 * self._back_off, MAX_EVICTED_BACK_OFF_SECONDS)
        self._back_off = longer if again else EVICTED_BACK_OFF_SECONDS
        sleep(self._back_off)

    def use_store(self, store: Store) -> None:
        """Use another store, which is empty."""
        self._store_client = StoreClient(store, self.rank)
        self._store_client.call(lambda s: _raise_to(s, self.membership_epoch.number))
        self._publish(self.membership_epoch)
        self.heartbeat.begin(store)

    def end(self, step: int) -> None:
        """Publish that all members have finished their training."""
        with suppress(RunError):  # the store is lost
            self._store_client.call(lambda store: store.set(RUN_ENDED_KEY, str(step)))

    def close(self, *, finished: bool = False) -> None:
        """Stop the heartbeat; after a `finished` training no rank suspects this one."""
        self.heartbeat.close(self._store_client if finished else None)

    def _on_heartbeat(self, announced: int, requested: int) -> None:
        """Suspect silent members after each round of heartbeats, in their thread."""
        self._rendezvous_number = max(self._rendezvous_number, announced)
        self._requested_number = max(self._requested_number, requested)
        for rank in self.membership_epoch.members:
            reason = None if rank == self.rank else self.heartbeat.failure_reason(rank)
            if reason is None:
                if self.suspected.pop(rank, None) is not None:
                    self.on_recovered(rank)
            elif rank not in self.suspected:
                self.suspected[rank] = monotonic()
                self.on_suspected(rank, reason)
            if rank in self.suspected and self.triggers_rendezvous(rank):
                self.request_rendezvous()

    def _announce_rendezvous(self, status: MemberStatus) -> int:
        """Announce the next rendezvous unless a later one was announced; its number. A rank that
        isn't a member only requests it: members come at their next safe point."""
        number = self.membership_epoch.number + 1
        if status.joins and self.rank not in self.membership_epoch.members:
            self._store_client.call(lambda store: _raise_to(store, number, JOIN_REQUEST_KEY))
            return max(number, self._store_client.call(lambda store: store.add(RENDEZVOUS_KEY, 0)))
        return self._store_client.call(lambda store: _raise_to(store, number))

    def _agree_on_epoch(
        self, number: int, status: MemberStatus, deadline: float
    ) -> MembershipEpoch | None:
        """Come to this rendezvous; None if a later one was announced, or it had no result."""
        entry = json.dumps([self.rank, asdict(status)]) + "\n"
        self._store_client.call(lambda store: _append(store, _ready(number), entry))
        complete: float | None = None
        while monotonic() <= deadline:
            self._raise_if_undetecting()
            self._store_client.call(self._raise_if_ended)
            announced, text, ready = self._store_client.call(lambda store: _state(store, number))
            if text is not None:
                return None if text == VOID_EPOCH else MembershipEpoch.of_text(text)
            if announced > number:
                return None
            self.note_broken_connections(*(peer for s in ready.values() for peer in s.lost))
            offer = None if status.joins else self._offer(number, ready)
            if offer is None:
                complete = None
            else:
                complete = complete or monotonic()
                first = min(rank for rank in ready if not ready[rank].joins) == self.rank
                if first or monotonic() - complete > EPOCH_WRITER_GRACE_SECONDS:
                    if not self._publish(offer):
                        return None
                    continue
            sleep(RENDEZVOUS_POLL_SECONDS)
        return None

    def _publish(self, offer: MembershipEpoch) -> bool:
        """Offer this epoch to the store, which accepts the first with its number. False if there is
        one between this rank's epoch and the offer: then the offer is outdated. Numbers between the
        two are made void first, so that no rank can use them any more."""
        left = {rank: self._with_last_activity(rank, why) for rank, why in offer.left.items()}
        key, text = _key(offer.number), replace(offer, left=left).text()
        skipped = [_key(number) for number in range(self.membership_epoch.number + 1, offer.number)]

        def write(store: Store) -> bool:
            void = VOID_EPOCH.decode()
            if any(store.compare_set(between, "", void) != VOID_EPOCH for between in skipped):
                return False
            store.compare_set(key, "", text)
            return True

        return self._store_client.call(write)

    def _offer(self, number: int, ready: Mapping[int, MemberStatus]) -> MembershipEpoch | None:
        """The epoch of the ranks that have come; None while others may come, or without quorum."""
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
        failed = {*left, *(rank for rank, status in ready.items() if status.joins)}
        broken = set(before.broken_connections if fruitless else ())  # sender, receiver
        for rank, status in ready.items():  # the failure of a rank explains its connections
            broken.update((rank, peer) for peer in status.lost if peer not in failed)
        # No rank joins during a collective, as it can't take part.
        busy = any(s.doing is MemberPhase.COLLECTIVE for s in ready.values() if not s.joins)
        present = {rank: s for rank, s in ready.items() if not (s.joins and busy)}
        evicted, problem = (
            member_to_evict(broken, present) if tries > MAX_FRUITLESS_EPOCHS else (None, "")
        )
        if evicted is not None:
            left[evicted] = NOT_REACHED_REASON
            del present[evicted]
            tries = 1
        came = [rank for rank in ready if rank in before.members]
        finished = [rank for rank, reason in left.items() if reason == FINISHED_REASON]
        if all(status.joins for status in present.values()):
            return None
        if not has_quorum(len(came) + len(finished), len(before.members)):
            return None
        left |= {rank: RESTARTED_REASON for rank in came if ready[rank].joins}
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
        """Why the rendezvous doesn't wait for this rank; None if it does."""
        if self.heartbeat.detector.has_finished(rank):
            return FINISHED_REASON
        reason = self.heartbeat.failure_reason(rank)
        if reason is None and self.heartbeat.detector.is_hung(rank, self.heartbeat.answered):
            return HUNG_REASON
        return reason

    def _with_last_activity(self, rank: int, why: str) -> str:
        """The reason, with the last activity of a rank that is silent or hangs."""
        if not why.startswith((SILENT_REASON, HUNG_REASON)):
            return why
        key = key_of(rank, self.membership_epoch.number)
        seen = self._store_client.call(lambda store: last_seen(store, key))
        return f"{why}, last seen {seen}" if seen else why

    def _raise_if_undetecting(self) -> None:
        """Raise the error of a failed heartbeat thread: without it no failure is detected."""
        if self.heartbeat.failure is not None:
            raise self.heartbeat.failure

    def _raise_if_ended(self, store: Store) -> None:
        if store.check([RUN_ENDED_KEY]):
            step = store.get(RUN_ENDED_KEY).decode()
            raise RunIsOver(
                f"rank {self.rank} joins too late: the others have finished after step {step}",
                "use their checkpoint or result, or start the run again",
            )


def _joining(status: MemberStatus) -> MemberStatus:
    """The status of a rank that joins: its losses are no reason for a rendezvous any more."""
    return replace(status, joins=True, lost=(), awaits=(), why="")


def _raise_to(store: Store, number: int, key: str = RENDEZVOUS_KEY) -> int:
    """Raise the number at `key` to at least this one; the resulting number."""
    while (announced := store.add(key, 0)) < number:
        store.compare_set(key, str(announced), str(number))
    return announced


def _state(store: Store, number: int) -> tuple[int, bytes | None, dict[int, MemberStatus]]:
    """The last rendezvous announced, the epoch if it is published, and the ranks that have come."""
    announced = store.add(RENDEZVOUS_KEY, 0)
    key = _key(number)
    if store.check([key]):
        return announced, store.get(key), {}
    lines = store.get(_ready(number)).decode().splitlines()
    entries = (json.loads(line) for line in lines)
    return announced, None, {rank: member_status_of(data) for rank, data in entries}


def _append(store: Any, key: str, text: str) -> None:
    """Append to a key, which torch's stores support but don't declare."""
    store.append(key, text)


def _newest(store: Store) -> MembershipEpoch | None:
    """The last epoch that was published."""
    for number in range(store.add(RENDEZVOUS_KEY, 0), 0, -1):
        if store.check([_key(number)]) and (text := store.get(_key(number))) != VOID_EPOCH:
            return MembershipEpoch.of_text(text)
    return None


def _key(number: int) -> str:
    return f"epoch/{number}"


def _ready(number: int) -> str:
    return f"ready/{number}"
