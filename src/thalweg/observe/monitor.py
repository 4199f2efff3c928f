"""Straggler detection during a run, and its records, in a thread of their own.

The training thread submits each finished step, and continues. A few times a second this thread
writes the steps to the rank's journal, and publishes the last ones in the store, with the current
activity of the rank. The first of the members reads the reports of all, detects stragglers and
publishes them, and logs a line when they have changed. A hung rank is logged before that, with its
activity. In the same way the digests of replicas that should be equal are compared.

Nothing here can hurt the training: if the store fails or is slow, or a disk is full, only the
monitoring ends.
"""

from __future__ import annotations

import json
import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from threading import Event, Thread
from time import monotonic, thread_time
from typing import Any

from thalweg.engine.arrivals import Arrivals
from thalweg.errors import ranks_text
from thalweg.facts import Cluster, grouped
from thalweg.members.activity import Activity, HangDetector, key_of
from thalweg.members.failure_detector import read_each
from thalweg.members.world import World
from thalweg.observe.clock_sync import SyncedClock
from thalweg.observe.journal import Journal
from thalweg.observe.peer_addresses import PeerAddresses, own_addresses
from thalweg.observe.records import (
    BucketRecord,
    EncodeRecord,
    EventRecord,
    FlowRecord,
    Record,
    RunHeader,
    StepRecord,
    StepReport,
    rounded,
)
from thalweg.observe.step_totals import StepTotals
from thalweg.observe.straggler import Straggler, log_line
from thalweg.observe.straggler_detector import StragglerDetector
from thalweg.transports.tcp_info import Connections, ConnectionTraffic

MONITOR_PERIOD_SECONDS = 0.5  # between two looks of this thread, with few ranks
MONITORED_RANKS_PER_SECOND = 50.0  # with many ranks the period grows, to this rate of reports
MAX_SUBMITTED_STEPS = 4096  # steps that may wait for this thread
MAX_PUBLISHED_STEPS = 32  # steps that are published at once
PUBLISHED_PERIODS_COUNT = 4  # periods for which a step stays published
REPLICA_CHECK_PERIOD_STEPS = 64  # between two comparisons of replicas that should be equal
DIGEST_HISTORY_COUNT = 64  # digests that are kept, as a straggler publishes its own later
STRAGGLERS_KEY = "late"  # the key of the store under which the first member publishes stragglers
log = logging.getLogger("thalweg")
Digests = Mapping[int, int]  # of parameters, by the number of steps taken


class Monitor:
    """The monitor of one rank. `arrivals` holds the rounds of each step; without a `journal`
    nothing is recorded. `notify` is called with the topic, step, text and data of each event that
    this thread finds."""

    def __init__(
        self,
        world: World,
        cluster: Cluster,
        sync: str,
        arrivals: Callable[[], Arrivals],
        journal: Journal | None,
        notify: Callable[[str, int, str, Any], None],
        version: str = "",
    ) -> None:
        self.rank = world.rank
        self.activity = Activity()
        self.clock = SyncedClock()
        self.stragglers: tuple[Straggler, ...] = ()
        # The first member has those of all ranks, the others have their own.
        self.step_totals: dict[int, StepTotals] = {world.rank: StepTotals()}
        self.cpu_seconds = 0.0
        self._cluster = cluster
        self._arrivals = arrivals
        self._version = version  # of this package
        self._journal = journal
        self._notify = notify
        self.difference = ""  # that the first member found between replicas that should be equal
        # This rank's parameters after a number of steps.
        self._digests: deque[tuple[int, int]] = deque(maxlen=DIGEST_HISTORY_COUNT)
        self._submitted: deque[Callable[[], None]] = deque(maxlen=MAX_SUBMITTED_STEPS)
        self._finished: list[tuple[StepRecord, Sequence[ConnectionTraffic]]] = []
        self.begin(world, sync)
        self._records: deque[Record] = deque(maxlen=MAX_SUBMITTED_STEPS)
        self._recent_reports: deque[tuple[int, StepReport]] = deque(maxlen=MAX_PUBLISHED_STEPS)
        self._rounds = 0
        self._straggler_detector = StragglerDetector(cluster, world.members)
        self._hang_detector = HangDetector(cluster)
        self._answered: dict[int, int] = {}  # time requests of each rank that were answered
        self._world = world
        self._store: Any = None
        self._peer_addresses = PeerAddresses(world)
        self.connections = Connections(own_addresses())
        self._to_store = 0.0  # seconds of a round trip, lately
        self._ended = Event()
        self._thread = Thread(target=self._work, name="thalweg-observation", daemon=True)
        self._thread.start()

    @property
    def is_first(self) -> bool:
        """True on the first member, which detects stragglers for all."""
        return self.rank == min(self._world.members)

    # What the training thread does

    def begin(self, world: World, sync: str) -> None:
        """Continue among these members and under this plan."""
        self._submitted.append(partial(self._form, world, sync))

    def submit_step(self, step: StepRecord, sent: Sequence[ConnectionTraffic]) -> None:
        self._submitted.append(partial(self._finished.append, (step, sent)))

    def submit_digest(self, steps: int, digest: int) -> None:
        self._submitted.append(partial(self._digests.append, (steps, digest)))

    def note(self, topic: str, step: int, text: str) -> None:
        self._records.append(EventRecord(at=monotonic(), step=step, topic=topic, text=text))

    def close(self) -> None:
        """Write and publish the remaining steps, and stop."""
        self._ended.set()
        self._thread.join(2 * MONITOR_PERIOD_SECONDS + 5.0)

    def receive_last_reports(self) -> None:
        """Read the last reports of the others, after they have ended too."""
        if self.is_first and not self._thread.is_alive() and self._store is not None:
            with suppress(RuntimeError, ValueError):
                self._receive(self._store)

    # What this thread does

    def _work(self) -> None:
        last = False
        while not last:
            last = self._ended.wait(
                max(MONITOR_PERIOD_SECONDS, self._world.size / MONITORED_RANKS_PER_SECOND)
            )
            try:
                self._round(last)
            except Exception as error:  # whatever it is, training goes on
                log.warning("monitoring stopped: %s: %s", type(error).__name__, error)
                break
            self.cpu_seconds = thread_time()
        if self._journal is not None:
            self._journal.close()

    def _round(self, last: bool) -> None:
        self._rounds += 1
        if len(self._world.members) > 1:
            self._to_store = self._peer_addresses.round_trip(self.connections.look_at_all())
        while self._submitted:
            self._submitted.popleft()()
        self._add_finished_steps()
        try:
            if self._store is not None:
                self._exchange(self._store, last)
        except RuntimeError:  # torch's DistError is one
            self._store = None  # until members meet at another
        records = [self._records.popleft() for _ in range(len(self._records))]
        if self._journal is not None:
            self._journal.add(records)

    def _form(self, world: World, sync: str) -> None:
        self._add_finished_steps()
        self._world = world
        self._straggler_detector.set_members(world.members)
        self._recent_reports.clear()
        self._digests.clear()
        self._records.append(
            RunHeader(
                rank=self.rank,
                size=world.size,
                host=self._cluster.host(self.rank).name,
                rack=self._cluster.rack(self.rank).name,
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
                self._peer_addresses = PeerAddresses(world)
                self._peer_addresses.publish(self._store)

    def _add_finished_steps(self) -> None:
        """Add their rounds and flows to the finished steps, and record and publish them."""
        if not self._finished:
            return
        first, arrivals = min(step.step for step, _ in self._finished), self._arrivals()
        rounds = grouped(
            (a.step, BucketRecord(a.bucket, a.ready, a.started, a.ended, a.peers))
            for a in reversed(arrivals.since(first))
        )
        encodings = grouped(
            (e.step, EncodeRecord(e.bucket, e.began, e.ended))
            for e in reversed(arrivals.encoded_since(first))
        )
        for finished, sent in self._finished:
            step = replace(
                finished,
                rounds=tuple(r for r in rounds.get(finished.step, ()) if r.ended > finished.begin),
                encodings=tuple(encodings.get(finished.step, ())),
                flows=self._flows(sent),
                store=self._to_store,
            )
            self.step_totals[self.rank].add(step)
            self._recent_reports.append((self._rounds, StepReport.of(step)))
            self._records.append(step)
        self._finished.clear()

    def _flows(self, sent: Sequence[ConnectionTraffic]) -> tuple[FlowRecord, ...]:
        """The traffic to each other host, by the first rank there."""
        flows = grouped(
            (peer, connection)
            for connection in sent
            if (peer := self._peer_addresses.rank_at(connection.address)) is not None
        )
        return tuple(
            FlowRecord(peer, sum(s.nbytes for s in some), max(s.busy for s in some))
            for peer, some in flows.items()
        )

    def _exchange(self, store: Any, last: bool) -> None:
        self._peer_addresses.find(store)
        asks = not self.is_first and not last and self.clock.is_due
        if asks:
            self.clock.requests += 1
        self._publish(store)
        if self.is_first:
            moment = self.clock.keep()
            if moment is not None:
                self._records.append(moment)
            self._receive(store)
        else:
            if asks and (moment := self.clock.synchronise(store, self.rank)) is not None:
                self._records.append(moment)
            if store.check([STRAGGLERS_KEY]):
                entries = json.loads(store.get(STRAGGLERS_KEY))
                self._learn(entries["step"], tuple(map(Straggler.of, entries["late"])))

    def _publish(self, store: Any) -> None:
        oldest = self._rounds - PUBLISHED_PERIODS_COUNT
        report = {
            "number": self._rounds,
            "activity": self.activity.entries(self._hang_detector.hang_seconds / 2),
            "asked": self.clock.requests,
            "tally": asdict(self.step_totals[self.rank]),
            "steps": [rounded(step) for at, step in self._recent_reports if at >= oldest],
            "digests": list(self._digests),
        }
        store.set(key_of(self.rank), json.dumps(report))

    def _receive(self, store: Any) -> None:
        """Read the reports of all members and detect stragglers, on the first member."""
        reports: dict[int, Mapping[str, Any]] = {}
        for rank, text in read_each(store, key_of, self._world.members).items():
            entries = reports[rank] = json.loads(text)
            self._straggler_detector.see(rank, map(StepReport.read, entries["steps"]))
            if rank != self.rank:
                self.step_totals[rank] = StepTotals(**entries["tally"])
        before, stragglers = self.stragglers, self._straggler_detector.current_stragglers()
        if self._learn(self._straggler_detector.newest, stragglers):
            log.warning("%s", log_line(stragglers, before))
        digests = {rank: dict(entries["digests"]) for rank, entries in reports.items()}
        self.difference = difference(digests, len(self._world.members))
        if stragglers or before:
            answer = {
                "step": self._straggler_detector.newest,
                "late": [asdict(straggler) for straggler in stragglers],
            }
            store.set(STRAGGLERS_KEY, json.dumps(answer))
        for hang in self._hang_detector.find_hung(reports):
            self._notify("hang", self._straggler_detector.newest, hang, None)
            log.warning("%s", hang)
        for rank, entries in reports.items():
            if entries["asked"] > self._answered.get(rank, 0):
                self._answered[rank] = entries["asked"]
                self.clock.serve(store, rank, entries["asked"])

    def _learn(self, step: int, stragglers: tuple[Straggler, ...]) -> bool:
        """Adopt the stragglers of a step; True if they have changed."""
        before, self.stragglers = self.stragglers, stragglers
        if {each.key for each in stragglers} == {each.key for each in before}:
            return False
        self._notify("late", step, log_line(stragglers, before), stragglers)
        return True


def difference(reported: Mapping[int, Digests], members: int) -> str:
    """The ranks whose parameters differ from the majority's at a step; empty if none do. A step is
    compared once all members have reported it, or a later one."""
    reached = min((max(digests, default=0) for digests in reported.values()), default=0)
    if len(reported) < members:
        return ""
    for step in sorted({s for digests in reported.values() for s in digests if s <= reached}):
        held = {rank: digests[step] for rank, digests in reported.items() if step in digests}
        [(majority, times), *others] = Counter(held.values()).most_common()
        if others:
            apart = [rank for rank in sorted(held) if held[rank] != majority]
            most = 2 * times > len(held)
            who, than = (apart, " from the others'") if most else (sorted(held), "")
            return f"the parameters of {ranks_text(who)} differ{than} after step {step}"
    return ""
