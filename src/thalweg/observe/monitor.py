"""Who is late and why, found out while a run goes on, and its records, in a thread of their own.

The training thread hands in each step when it is over, and goes on. A few times a second this
thread writes what came to the rank's journal, and puts the last steps into the store, with what the
rank is doing now. The first of the members reads what all have put there, judges it
(`records.judging`), tells the others, and logs a line when the answer has changed. Whoever holds up
the others for long is named before that, with what it is doing. In the same way it compares the
digests of replicas that are to be equal.

Nothing here can hurt the training: a store that is gone or slow, and a disk that is full, end the
observing alone.
"""

from __future__ import annotations

import json
import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from threading import Event, Thread
from time import monotonic, thread_time
from typing import Any, NamedTuple

from thalweg.engine.arrivals import Arrivals
from thalweg.errors import ranks_text
from thalweg.facts import Cluster
from thalweg.members.activity import Activity, Hangs, key_of
from thalweg.members.world import World
from thalweg.observe import Encoding, Flow, Judge, Late, Note, Opening, Report, Round, Step, Tally
from thalweg.observe.clock_sync import CommonClock
from thalweg.observe.journal import Journal
from thalweg.observe.peer_addresses import Neighbours, own_addresses
from thalweg.observe.records import Record
from thalweg.observe.straggler import told
from thalweg.transports.tcp_info import Connections, Sent

BEAT, RANKS_A_SECOND = 0.5, 50.0  # seconds between two looks; of many ranks more
HANDED_IN = 4096  # steps that may wait for this thread
TOLD, TOLD_FOR = 32, 4  # steps at most, and beats for which each is told
KEPT = 1000  # changes
COMPARED_EVERY = 64  # steps, of replicas that are to be equal
DIGESTS = 64  # told: those of a rank that is late are still compared with the others'
LATE = "late"  # in the store: the answer
log = logging.getLogger("thalweg")
Digests = Mapping[int, int]  # of parameters, by the number of steps taken


class _Begun(NamedTuple):
    """Among these members, and under this plan."""

    world: World
    sync: str


class _Over(NamedTuple):
    """A step, and what went over connections meanwhile."""

    step: Step
    sent: Sequence[Sent]


class _Held(NamedTuple):
    """The digest of this rank's parameters after so many steps."""

    steps: int
    digest: int


class Observation:
    """One rank's. `arrivals` are asked for the rounds of each step; without a `journal` nothing is
    written."""

    def __init__(
        self,
        world: World,
        cluster: Cluster,
        sync: str,
        arrivals: Callable[[], Arrivals],
        journal: Journal | None,
        version: str = "",
    ) -> None:
        self.rank = world.rank
        self.activity = Activity()
        self.clock = CommonClock()
        self.late: tuple[Late, ...] = ()
        self.changes: deque[tuple[int, tuple[Late, ...]]] = deque(maxlen=KEPT)
        self.tallies: dict[int, Tally] = {world.rank: Tally()}  # of the others on the first alone
        self.cpu_seconds = 0.0
        self._cluster = cluster
        self._arrivals = arrivals
        self._version = version  # of this package
        self._journal = journal
        self.difference = ""  # as the first sees it, between replicas that are to be equal
        self._digests: deque[_Held] = deque(maxlen=DIGESTS)
        self._handed_in: deque[_Begun | _Over | _Held] = deque(maxlen=HANDED_IN)
        self._handed_in.append(_Begun(world, sync))
        self._records: deque[Record] = deque(maxlen=HANDED_IN)
        self._told: deque[tuple[int, Report]] = deque(maxlen=TOLD)
        self._beats = 0
        self._judge = Judge(cluster, world.members)
        self._hangs = Hangs(cluster)
        self._answered: dict[int, int] = {}  # how often each rank was told the time
        self._world = world
        self._store: Any = None
        self._neighbours = Neighbours(world)
        self.connections = Connections(own_addresses())
        self._to_store = 0.0  # seconds of a round trip, lately
        self._ended = Event()
        self._thread = Thread(target=self._work, name="thalweg-observation", daemon=True)
        self._thread.start()

    @property
    def is_first(self) -> bool:
        """Of the members: it judges."""
        return self.rank == min(self._world.members)

    # What the training thread does

    def begin(self, world: World, sync: str) -> None:
        """Among these members and under this plan from now on."""
        self._handed_in.append(_Begun(world, sync))

    def hand_in(self, step: Step, sent: Sequence[Sent]) -> None:
        self._handed_in.append(_Over(step, sent))

    def hand_in_digest(self, steps: int, digest: int) -> None:
        self._handed_in.append(_Held(steps, digest))

    def note(self, topic: str, step: int, text: str) -> None:
        self._records.append(Note(at=monotonic(), step=step, topic=topic, text=text))

    def close(self) -> None:
        """What is left is written and told first."""
        self._ended.set()
        self._thread.join(2 * BEAT + 5.0)

    def listen_once_more(self) -> None:
        """When the others have ended too, to what they have told last."""
        if self.is_first and not self._thread.is_alive() and self._store is not None:
            with suppress(RuntimeError, ValueError):
                self._listen(self._store)

    # What this thread does

    def _work(self) -> None:
        last = False
        while not last:
            last = self._ended.wait(max(BEAT, self._world.size / RANKS_A_SECOND))
            try:
                self._round(last)
            except Exception as error:  # whatever it is, training goes on
                log.warning("nothing more is observed: %s: %s", type(error).__name__, error)
                break
            self.cpu_seconds = thread_time()
        if self._journal is not None:
            self._journal.close()

    def _round(self, last: bool) -> None:
        self._beats += 1
        if len(self._world.members) > 1:
            self._to_store = self._neighbours.round_trip(self.connections.look_at_all())
        self._take_in()
        try:
            if self._store is not None:
                self._exchange(self._store, last)
        except RuntimeError:  # torch's DistError is one
            self._store = None  # until members meet at another
        self._write()

    def _form(self, world: World, sync: str) -> None:
        self._world = world
        self._judge.form(world.members)
        self._told.clear()
        self._digests.clear()
        host, rack = self._cluster.host(self.rank), self._cluster.rack(self.rank)
        self._records.append(
            Opening(
                rank=self.rank,
                size=world.size,
                host=host.name,
                rack=rack.name,
                members=world.members,
                sync=sync,
                at=monotonic(),
                thalweg=self._version,
            )
        )
        self._store = None
        if len(world.members) > 1:
            with suppress(RuntimeError):
                self._store = world.store.clone() if hasattr(world.store, "clone") else world.store
                self._neighbours = Neighbours(world)
                self._neighbours.publish(self._store)

    def _take_in(self) -> None:
        """Steps that were handed in, with their rounds."""
        taken: list[_Over] = []
        while self._handed_in:
            one = self._handed_in.popleft()
            if isinstance(one, _Over):
                taken.append(one)
                continue
            if isinstance(one, _Held):
                self._digests.append(one)
                continue
            self._add(taken)
            taken = []
            self._form(one.world, one.sync)
        self._add(taken)

    def _add(self, taken: Sequence[_Over]) -> None:
        if not taken:
            return
        first = min(over.step.step for over in taken)
        arrivals = self._arrivals()
        rounds: dict[int, list[Round]] = {}
        for a in arrivals.since(first):
            came = Round(a.bucket, a.ready, a.started, a.ended, a.peers)
            rounds.setdefault(a.step, []).append(came)
        encodings: dict[int, list[Encoding]] = {}
        for e in arrivals.encoded_since(first):
            encodings.setdefault(e.step, []).append(Encoding(e.bucket, e.began, e.ended))
        for over in taken:
            step = self._complete(over, rounds, encodings)
            self.tallies[self.rank].add(step)
            self._told.append((self._beats, Report.of(step)))
            self._records.append(step)

    def _complete(
        self,
        over: _Over,
        rounds: Mapping[int, list[Round]],
        encodings: Mapping[int, list[Encoding]],
    ) -> Step:
        step = over.step
        flows: dict[int, list[Sent]] = {}
        for one in over.sent:
            peer = self._neighbours.rank_at(one.address)
            if peer is not None:
                flows.setdefault(peer, []).append(one)
        return replace(
            step,
            rounds=tuple(r for r in reversed(rounds.get(step.step, ())) if r.ended > step.begin),
            encodings=tuple(reversed(encodings.get(step.step, ()))),
            flows=tuple(
                Flow(peer, sum(s.nbytes for s in some), max(s.busy for s in some))
                for peer, some in flows.items()
            ),
            store=self._to_store,
        )

    def _exchange(self, store: Any, last: bool) -> None:
        self._neighbours.find(store)
        asks = not self.is_first and not last and self.clock.is_due
        if asks:
            self.clock.asked += 1
        self._tell(store)
        if self.is_first:
            moment = self.clock.keep()
            if moment is not None:
                self._records.append(moment)
            self._listen(store)
        else:
            if asks and (moment := self.clock.ask(store, self.rank)) is not None:
                self._records.append(moment)
            if store.check([LATE]):
                entries = json.loads(store.get(LATE))
                self._learn(entries["step"], tuple(map(Late.of, entries["late"])))

    def _tell(self, store: Any) -> None:
        while self._told and self._told[0][0] < self._beats - TOLD_FOR:
            self._told.popleft()
        told_now = {
            "number": self._beats,
            "activity": self.activity.entries(self._hangs.long / 2),
            "asked": self.clock.asked,
            "tally": self.tallies[self.rank].entries(),
            "steps": [report.entries() for _, report in self._told],
            "digests": list(self._digests),
        }
        store.set(key_of(self.rank), json.dumps(told_now))

    def _listen(self, store: Any) -> None:
        """As the first: to all members, and judge."""
        heard: dict[int, Mapping[str, Any]] = {}
        for rank, text in self._said(store).items():
            entries = heard[rank] = json.loads(text)
            new = (one for one in entries["steps"] if self._judge.is_new(rank, one[0]))
            self._judge.see(rank, map(Report.read, new))
            if rank != self.rank:
                self.tallies[rank] = Tally.of(entries["tally"])
        before, late = self.late, self._judge.judge()
        if self._learn(self._judge.newest, late):
            log.warning("%s", told(late, before))
        told_by = {rank: dict(entries["digests"]) for rank, entries in heard.items()}
        self.difference = difference(told_by, len(self._world.members))
        if late or before:
            answer = {"step": self._judge.newest, "late": [each.entries() for each in late]}
            store.set(LATE, json.dumps(answer))
        for hang in self._hangs.look(heard):
            self.note("hang", self._judge.newest, hang)
            log.warning("%s", hang)
        for rank, said in heard.items():
            if said["asked"] > self._answered.get(rank, 0):
                self._answered[rank] = said["asked"]
                self.clock.answer(store, rank, said["asked"])

    def _said(self, store: Any) -> dict[int, bytes]:
        ranks = list(self._world.members)
        keys = [key_of(rank) for rank in ranks]
        if store.check(keys):
            return dict(zip(ranks, store.multi_get(keys), strict=True))
        return {r: store.get(k) for r, k in zip(ranks, keys, strict=True) if store.check([k])}

    def _learn(self, step: int, late: tuple[Late, ...]) -> bool:
        """Whether it has changed."""
        before, self.late = self.late, late
        if {each.key for each in late} == {each.key for each in before}:
            return False
        self.changes.append((step, late))
        self.note("late", step, told(late, before))
        return True

    def _write(self) -> None:
        records = []
        while self._records:
            records.append(self._records.popleft())
        if self._journal is not None and records:
            self._journal.add(records)


def difference(told: Mapping[int, Digests], members: int) -> str:
    """Who holds something else than most, after as many steps; empty if nobody does. A step is
    judged when all members have told of it, or of a later one."""
    reached = min((max(digests, default=0) for digests in told.values()), default=0)
    if len(told) < members:
        return ""
    for step in sorted({s for digests in told.values() for s in digests if s <= reached}):
        held = {rank: digests[step] for rank, digests in told.items() if step in digests}
        [(usual, times), *others] = Counter(held.values()).most_common()
        if others:
            apart = [rank for rank in sorted(held) if held[rank] != usual]
            most = 2 * times > len(held)
            who, than = (apart, " from the others'") if most else (sorted(held), "")
            return f"the parameters of {ranks_text(who)} differ{than} after step {step}"
    return ""
