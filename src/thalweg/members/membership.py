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
from thalweg.members.eviction import who_or_what
from thalweg.members.failure_detector import CALLED, ENDED, SILENT, WISHED, Heartbeat
from thalweg.members.membership_epoch import Doing, Formation, Standing, is_enough, standing_of
from thalweg.transports.store_client import Line, Store

PAUSE = 0.02  # seconds between two looks at who has come
HELP = 0.5  # seconds after which another than the first writes the formation down
BACK_OFF = 0.2  # seconds before one that wasn't let in asks again
NOT_REACHED = "not reached by others"
HANGS = "alive, but doesn't get on"
THROUGH = "through"  # with its training: nobody has lost it
UNREACHED, LONGEST_UNREACHED = 5.0, 30.0  # the same for one with which they got nowhere
FRUITLESS = 3  # formations in a row that got nowhere, until one is left out
VOID = b"void"  # in the place of a formation that was never agreed on
ON_EVERY_RANK = "call run.consensus, run.average and run.save on every rank"

Calls = Callable[[int], bool]
"""Whether the absence of this rank is a reason to form anew."""


class Membership:
    """One rank's. `store` is the run's own, which all formations share."""

    def __init__(self, store: Store, rank: int, size: int, timeout: float) -> None:
        self.rank = rank
        self.formation = Formation.first(size)
        self.calls_for: Calls = lambda rank: True
        self.heeds_losses: Callable[[], bool] = lambda: True  # of what an idle rank has sent
        self.absent: dict[int, float] = {}  # members that count as gone, and since when
        self.on_absence: Callable[[int, str], None] = lambda rank, reason: None
        self.on_return: Callable[[int], None] = lambda rank: None
        self._timeout = timeout
        self._line = Line(store, rank)
        self._called = self._wished = self.formation.number
        self._lost: set[int] = set()
        self._awaits: set[int] = set()
        self._why = ""
        self._is_outdated = False  # others went on without this rank, which has no state since
        self._back_off = 0.0  # seconds that it stayed away before it came in
        self._came_in = -LONGEST_UNREACHED  # when that was
        self._lock = Lock()
        self._line.ask(lambda s: _raise_to(s, self.formation.number))
        self._heartbeat = Heartbeat(rank, size, lambda: self.formation.members, self._look)
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
        return self._heartbeat.records.furthest

    @property
    def is_called(self) -> bool:
        """Whether there is a muster to go to."""
        failed = self._heartbeat.failure is not None  # whoever comes is told
        return self._called > self.formation.number or self._heartbeat.lost or failed

    @property
    def is_stranded(self) -> bool:
        """Whether the store is gone."""
        return self._heartbeat.lost

    @contextmanager
    def coming_in(self) -> Iterator[None]:
        """Inside, whoever waits is told if the run ends meanwhile."""
        self._line.ask(self._refuse_if_ended)
        self._heartbeat.asks_for_the_end = True
        try:
            yield
        finally:
            self._heartbeat.asks_for_the_end = False

    def refuse_if_called(self) -> None:
        self._refuse_if_blind()
        if self._heartbeat.has_ended:
            self._line.ask(self._refuse_if_ended)
        if self.is_called:
            raise Interrupted(f"the members of formation {self.formation.number} meet anew")

    def refuse_if_outdated(self) -> None:
        """Interrupted if the store has a later formation: others went on without this rank, which
        may not have noticed it, since its process was stopped."""
        newest = self._line.ask(_newest)
        if newest is not None and newest.number > self.formation.number:
            raise Interrupted(f"formation {newest.number} has followed {self.formation.number}")

    def refuse_if_wanted(self) -> None:
        """The same at a safe point, where those are let in who ask for it."""
        self.refuse_if_called()
        if self._wished > self.formation.number:
            raise Interrupted(f"somebody wants to join formation {self.formation.number}")

    def wait(self, seconds: float, peers: tuple[int, ...] = ()) -> None:
        """This rank has waited so long for these: Interrupted if that is to end."""
        self.refuse_if_called()
        if seconds > self._heartbeat.records.patience:
            with self._lock:
                self._awaits.update(peers)
            self.broke(*peers)
            problem = f"{ranks_text(peers)} let others wait for {seconds:.0f} s"
            self.explain(problem)
            raise Interrupted(problem)

    def explain(self, problem: str) -> None:
        """What makes this rank come to the next muster."""
        with self._lock:
            self._why = self._why or problem

    def misses(self, ranks: Collection[int]) -> bool:
        """Whether one of these is gone, or hangs."""
        return any(self._why_missing(rank) is not None for rank in ranks)

    def call(self) -> None:
        """Whatever this rank waits for, it is to meet the others instead."""
        self._called = max(self._called, self.formation.number + 1)

    def lose(self, *ranks: int) -> None:
        """What was sent to these is lost, or they are."""
        with self._lock:
            self._lost.update(ranks)
        self.broke(*ranks)

    def broke(self, *ranks: int) -> None:
        """The connections to these did."""
        for rank in ranks:
            self._heartbeat.records.broke(rank)

    # The muster

    def find(self) -> Formation:
        """The formation that trains now, for one that was started again."""
        found = self._line.ask(_newest)
        if found is not None:
            self.formation = found
        return self.formation

    def muster(self, standing: Standing) -> Formation:
        """Agree with the others on the next formation, and be in it. RunError if that can't be."""
        deadline = monotonic() + self._timeout
        standing = self._with_reasons(standing)
        while monotonic() <= deadline:
            standing = self._after_the_newest(standing)
            formation = self._formed(self._call(standing), standing, deadline)
            if formation is not None:
                if formation.problem:
                    raise RunError(formation.problem, ON_EVERY_RANK)
                self.formation = formation
                self._called = max(self._called, formation.number)
                self._wished = max(self._wished, formation.number)
                if self.rank in formation.members:
                    if standing.joins:
                        self._came_in = monotonic()
                    for rank in (*formation.left, *formation.joined):
                        self._heartbeat.records.forget(rank, monotonic())
                    self.absent = {}
                    self._is_outdated = False
                    return formation
                self._is_outdated = True
                standing = _joining(standing)
                if formation.left.get(self.rank) == NOT_REACHED:
                    self._stay_away()
                    deadline = monotonic() + self._timeout
                sleep(BACK_OFF)
        raise self._nobody_came()

    def _after_the_newest(self, standing: Standing) -> Standing:
        """The standing of this rank after the newest formation in the store. A rank joins that was
        left out of it, or is to be given a state there, or that holds another formation with the
        same number, from another store. It joins until it is in a formation that it has come to."""
        newest, own = self._line.ask(_newest) or self.formation, self.formation
        is_same = (newest.number, newest.members) == (own.number, own.members)
        if newest.number >= own.number and not is_same:
            self.formation = newest
            holds = self.rank in newest.members and self.rank not in newest.joined
            self._is_outdated |= newest.number == own.number or not holds
        return _joining(standing) if self._is_outdated else standing

    def _with_reasons(self, standing: Standing) -> Standing:
        """What made this rank come, to be told once."""
        with self._lock:
            lost, self._lost = tuple(sorted(self._lost)), set()
            awaits, self._awaits = tuple(sorted(self._awaits)), set()
            why, self._why = self._why, ""
        return replace(standing, lost=lost, awaits=awaits, why=why)

    def _stay_away(self) -> None:
        """Twice as long as the last time, if it was in for a shorter time than that."""
        again = monotonic() - self._came_in < self._back_off
        self._back_off = min(2 * self._back_off, LONGEST_UNREACHED) if again else UNREACHED
        sleep(self._back_off)

    def meet_at(self, store: Store) -> None:
        """At another store, which knows nothing yet."""
        self._line = Line(store, self.rank)
        self._line.ask(lambda s: _raise_to(s, self.formation.number))
        self._write_down(self.formation)
        self._heartbeat.begin(store)

    def end(self, step: int) -> None:
        """All members have come to the end of their training."""
        with suppress(RunError):  # the store is gone
            self._line.ask(lambda store: store.set(ENDED, str(step)))

    def close(self, *, through: bool = False) -> None:
        """`through`, this rank has come to the end of its training."""
        self._heartbeat.close(self._line if through else None)

    def _look(self, called: int, wished: int) -> None:
        """In the heartbeat's thread, after each round of signs."""
        self._called = max(self._called, called)
        self._wished = max(self._wished, wished)
        for rank in self.formation.members:
            reason = None if rank == self.rank else self._heartbeat.why_gone(rank)
            if reason is None:
                if self.absent.pop(rank, None) is not None:
                    self.on_return(rank)
            elif rank not in self.absent:
                self.absent[rank] = monotonic()
                self.on_absence(rank, reason)
            if rank in self.absent and self.calls_for(rank):
                self.call()

    def _call(self, standing: Standing) -> int:
        """The number of the muster to go to: one beyond the formation, if no later was called. One
        that nobody waits for only asks for it: others come when it suits them."""
        number = self.formation.number + 1
        if standing.joins and self.rank not in self.formation.members:
            self._line.ask(lambda store: _raise_to(store, number, WISHED))
            return max(number, self._line.ask(lambda store: store.add(CALLED, 0)))
        return self._line.ask(lambda store: _raise_to(store, number))

    def _formed(self, number: int, standing: Standing, deadline: float) -> Formation | None:
        """Come to this muster; None if a later one was called, or nothing came of it."""
        entry = json.dumps([self.rank, asdict(standing)]) + "\n"
        self._line.ask(lambda store: _append(store, _ready(number), entry))
        complete: float | None = None
        while monotonic() <= deadline:
            self._refuse_if_blind()
            self._line.ask(self._refuse_if_ended)
            called, text, ready = self._line.ask(lambda store: _state(store, number))
            if text is not None:
                return None if text == VOID else Formation.of_text(text)
            if called > number:
                return None
            offer = None if standing.joins else self._offer(number, ready)
            if offer is None:
                complete = None
            else:
                complete = complete or monotonic()
                first = min(rank for rank in ready if not ready[rank].joins) == self.rank
                if first or monotonic() - complete > HELP:
                    if not self._write_down(offer):
                        return None
                    continue
            sleep(PAUSE)
        return None

    def _write_down(self, offer: Formation) -> bool:
        """Offer this formation to the store, which takes the first with its number. False if there
        is one between this rank's own and the offered one: then what this rank knows is old. Until
        then each number between is made void, so that nobody can use it any more."""
        left = {rank: self._with_last_words(rank, why) for rank, why in offer.left.items()}
        key, text = _key(offer.number), replace(offer, left=left).text()
        skipped = [_key(number) for number in range(self.formation.number + 1, offer.number)]

        def write(store: Store) -> bool:
            if any(store.compare_set(between, "", VOID.decode()) != VOID for between in skipped):
                return False
            store.compare_set(key, "", text)
            return True

        return self._line.ask(write)

    def _offer(self, number: int, ready: Mapping[int, Standing]) -> Formation | None:
        """The formation of those who have come; None while others may come, or too few have."""
        before = self.formation
        left = {}
        ready = {r: s if r in before.members else replace(s, joins=True) for r, s in ready.items()}
        for rank in before.members:
            if rank not in ready:
                reason = self._why_missing(rank)
                if reason is None:
                    return None
                left[rank] = reason
        if all(standing.joins for standing in ready.values()):
            return None
        place = max(s.place for s in ready.values() if not s.joins)
        fruitless = place <= before.start
        tries = before.tries + 1 if fruitless and not left else 1
        gone = {*left, *(rank for rank, standing in ready.items() if standing.joins)}
        broken = {*(before.broken if fruitless else ()), *_broken(ready, but=gone)}
        present = _let_in(ready)
        culprit, problem = who_or_what(broken, present) if tries > FRUITLESS else (None, "")
        if culprit is not None:
            left[culprit] = NOT_REACHED
            del present[culprit]
            tries = 1
        came = [rank for rank in ready if rank in before.members]
        through = [rank for rank, reason in left.items() if reason == THROUGH]
        if all(standing.joins for standing in present.values()):
            return None
        if not is_enough(len(came) + len(through), len(before.members)):
            return None
        came_back = {r: "started again" for r, s in ready.items() if s.joins}
        left |= {rank: why for rank, why in came_back.items() if rank in before.members}
        return Formation(
            number=number,
            members=tuple(sorted(present)),
            standings=present,
            left=left,
            tries=tries,
            broken=tuple(sorted(broken)),
            problem=problem,
        )

    def _why_missing(self, rank: int) -> str | None:
        """Why it isn't waited for; None if it is."""
        if self._heartbeat.records.is_through(rank):
            return THROUGH
        reason = self._heartbeat.why_gone(rank)
        if reason is None and self._heartbeat.hangs(rank):
            return HANGS
        return reason

    def _with_last_words(self, rank: int, why: str) -> str:
        """What one that is silent or hangs has last told of itself."""
        if not why.startswith((SILENT, HANGS)):
            return why
        key = key_of(rank, self.formation.number)
        seen = self._line.ask(lambda store: last_seen(store, key))
        return f"{why}, last seen {seen}" if seen else why

    def _refuse_if_blind(self) -> None:
        """A rank that can't see others die is of no use to them."""
        if self._heartbeat.failure is not None:
            raise self._heartbeat.failure

    def _refuse_if_ended(self, store: Store) -> None:
        if store.check([ENDED]):
            step = store.get(ENDED).decode()
            raise RunIsOver(
                f"rank {self.rank} comes too late: the others have ended after step {step}",
                "take their checkpoint or result, or start the run again",
            )

    def _nobody_came(self) -> RunError:
        before = self.formation.members
        gone = [rank for rank in before if rank != self.rank and self._why_missing(rank)]
        return RunError(
            f"rank {self.rank} found too few others to go on with after {self._timeout:g} s: of "
            f"{len(before)} members {ranks_text(gone) if gone else 'none'} are gone",
            "at least half are needed: start the run again, it goes on from its last checkpoint",
        )


def _joining(standing: Standing) -> Standing:
    """Of one that was left out: what it lost is nobody's reason any more."""
    return replace(standing, joins=True, lost=(), awaits=(), why="")


def _broken(ready: Mapping[int, Standing], *, but: Collection[int]) -> Iterator[tuple[int, int]]:
    """Connections: from whom, to whom; but those to one that is or was gone, which explains it."""
    for rank, standing in ready.items():
        yield from ((rank, peer) for peer in standing.lost if peer not in but)


def _let_in(ready: Mapping[int, Standing]) -> dict[int, Standing]:
    """Not those who join while others are at a work: they would have to take part in it."""
    at_work = any(s.doing is Doing.WORK for s in ready.values() if not s.joins)
    return {rank: s for rank, s in ready.items() if not (s.joins and at_work)}


def _raise_to(store: Store, number: int, key: str = CALLED) -> int:
    """The number of the last muster, which is this one at least."""
    while (called := store.add(key, 0)) < number:
        store.compare_set(key, str(called), str(number))
    return called


def _state(store: Store, number: int) -> tuple[int, bytes | None, dict[int, Standing]]:
    """The last muster that was called, the formation if it is written down, and who has come."""
    called = store.add(CALLED, 0)
    key = _key(number)
    if store.check([key]):
        return called, store.get(key), {}
    lines = store.get(_ready(number)).decode().splitlines()
    entries = (json.loads(line) for line in lines)
    return called, None, {rank: standing_of(data) for rank, data in entries}


def _append(store: Any, key: str, text: str) -> None:
    """Torch's stores can, though its types don't say so."""
    store.append(key, text)


def _newest(store: Store) -> Formation | None:
    """The last formation that was written down."""
    for number in range(store.add(CALLED, 0), 0, -1):
        if store.check([_key(number)]) and (text := store.get(_key(number))) != VOID:
            return Formation.of_text(text)
    return None


def _key(number: int) -> str:
    return f"formation/{number}"


def _ready(number: int) -> str:
    return f"ready/{number}"
