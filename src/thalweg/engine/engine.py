"""One communication thread a process: it begins rounds in the order in which they were handed in.

What is handed in is a chain: rounds that follow one another, each made from what came of the last,
as a compressor needs them; or a single round. Two chains may be under way at once, on different
vectors: while one waits for a peer, the other's messages fill the link. The second begins with the
first's next message, or at once if nothing runs. A chain keeps its place until it is over, so the
first that isn't over anywhere is under way everywhere, and ranks never wait for one another in a
circle.

The training thread hands a round in when its bucket is ready and goes on computing; it waits for
the results where it needs them. The first error ends the engine: the alarm is sounded and the
transport closed, so that other ranks stop waiting too, and every round that is left fails with that
error. A peer that is lost is another matter where members may change: what is under way is broken
off, Interrupted, and the engine goes on when the members that are left have formed anew (`enter`).
"""

from __future__ import annotations

from collections import ChainMap, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread
from time import monotonic

import numpy as np
import torch

from thalweg.engine.arithmetic import NUMPY, Arithmetic
from thalweg.engine.arrivals import Arrival, Arrivals, Encoded
from thalweg.engine.execute import Execution, RankProgram, View, flat
from thalweg.errors import (
    Interrupted,
    PeerFailed,
    PeerLate,
    PeerLost,
    StoreLost,
    ThalwegError,
    TransportClosed,
    TransportError,
)
from thalweg.members.abort import AbortFlag
from thalweg.members.membership import Membership
from thalweg.members.membership_epoch import MembershipEpoch
from thalweg.steps import MAX_CHAINS_IN_FLIGHT
from thalweg.transports import Address, Array, Landing, Transport
from thalweg.transports.store_client import Store

ENGINE_ABORT_POLL_SECONDS = 0.5  # seconds of waiting after which the alarm is listened to
# Seconds of waiting after which it looks whether the members are to meet.
RENDEZVOUS_CHECK_SECONDS = 0.1
# Seconds beyond the rounds' own deadlines, for the thread to say what happened.
ENGINE_REPLY_GRACE_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One round on one vector, which is reduced in place. `view` says where chunks are, if not one
    after the other in the vector."""

    program: RankProgram
    vector: Array
    step: int
    round_number: int
    bucket: int = 0
    arithmetic: Arithmetic = NUMPY
    view: View | None = None


Chain = Iterator[Sequence[Task]]
"""Rounds that may run at the same time; when all of them are over, the next ones are asked for.
What the iterator does in between it does in the communication thread."""


@dataclass(slots=True, eq=False)
class _Underway:
    """A chain that was handed in."""

    chain: Chain
    future: Future[None]
    ready: float  # when it was handed in
    alone: Task | None  # the only round of it
    left: int = 0  # rounds that run
    newest: Task | None = None  # of a chain


@dataclass(slots=True, eq=False)
class _Running:
    task: Task
    of: _Underway
    started: float
    execution: Execution


class Engine:
    """`timeout` is how many seconds a round may take; with `membership` members may change."""

    def __init__(
        self,
        transport: Transport,
        abort_flag: AbortFlag,
        timeout: float,
        membership: Membership | None = None,
    ) -> None:
        self.arrivals = Arrivals()
        self.timeout = timeout
        self._membership = membership
        self._check_seconds = (
            ENGINE_ABORT_POLL_SECONDS if membership is None else RENDEZVOUS_CHECK_SECONDS
        )
        self._transport = transport
        self._abort_flag = abort_flag
        self._broken: BaseException | None = None
        self._closed = False
        self._advanced = 0.0  # when the last rounds began
        self._polled = 0.0  # when it was last heard whether others gave up
        self._handed_in: SimpleQueue[_Underway | None] = SimpleQueue()  # None is the last
        self._idles = False  # the thread waits for what is handed in
        self._waiting: deque[_Underway] = deque()
        self._chains: list[_Underway] = []
        self._running: deque[_Running] = deque()
        self._done: deque[_Running] = deque()  # but their last messages may not have left
        self._cores = torch.get_num_threads()
        self._thread = Thread(target=self._work, name="thalweg-communication", daemon=True)
        self._thread.start()

    @property
    def rank(self) -> int:
        return self._transport.rank

    @property
    def failed(self) -> bool:
        """For good."""
        return self._broken is not None and not isinstance(self._broken, Interrupted)

    def submit(self, work: Task | Chain) -> Future[None]:
        """A round, or a chain of them; what a chain reads and writes is left alone until then."""
        if self._closed:
            raise TransportClosed(f"rank {self.rank} communicates after close()", "do so before it")
        alone = work if isinstance(work, Task) else None
        chain = iter([[work]]) if isinstance(work, Task) else work
        handed_in = _Underway(chain, Future(), monotonic(), alone)
        self._hand_in(handed_in)
        return handed_in.future

    def _hand_in(self, item: _Underway | None) -> None:
        self._handed_in.put(item)
        if self._idles:
            self._transport.wake()

    def wait(self, futures: list[Future[None]]) -> None:
        """Until all are done; the first error if there is one."""
        deadline = monotonic() + self.timeout * max(1, len(futures)) + ENGINE_REPLY_GRACE_SECONDS
        for future in futures:
            while not self._came(future, deadline):
                if self._advanced + self.timeout + ENGINE_REPLY_GRACE_SECONDS <= deadline:
                    raise TransportError(
                        f"the communication thread of rank {self.rank} doesn't answer",
                        "please report this with what the other ranks printed",
                    )
                deadline = (
                    self._advanced + self.timeout + ENGINE_REPLY_GRACE_SECONDS
                )  # a chain's next round began

    def _came(self, future: Future[None], deadline: float) -> bool:
        try:
            future.result(max(0.0, deadline - monotonic()))
        except TimeoutError:
            return False
        return True

    def run(self, work: Sequence[Task | Chain]) -> None:
        self.wait([self.submit(each) for each in work])

    def enter_epoch(self, membership_epoch: MembershipEpoch, abort_flag: AbortFlag) -> None:
        """Go on with these members, whatever was broken off before. Nothing may be under way."""
        if self._broken is None:
            self._broken = Interrupted(f"formation {membership_epoch.number} begins")
        marker: Future[None] = Future()
        self._hand_in(_Underway(iter(()), marker, monotonic(), None))  # it fails, in its turn
        with suppress(ThalwegError, TimeoutError):
            marker.result(ENGINE_REPLY_GRACE_SECONDS)
        self._transport.enter_epoch(membership_epoch.number, membership_epoch.members)
        self._abort_flag = abort_flag
        self._broken = None

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._hand_in(None)
        self._thread.join(self.timeout if self._broken is None else ENGINE_REPLY_GRACE_SECONDS)
        self._transport.close()  # ends the thread if it still waits
        self._thread.join(ENGINE_REPLY_GRACE_SECONDS)

    def _work(self) -> None:
        torch.set_num_threads(self._cores)  # OpenMP gives each thread as many as there are cores
        last = False
        while not last or self._waiting or self._chains or self._done:
            try:
                last = self._fetch() or last
                self._begin()
                self._go_on()
            except BaseException as error:
                self._fail(error)

    def _fetch(self) -> bool:
        """Take what was handed in, and wait for it if there is nothing else to do; whether that
        was the last."""
        while True:
            busy = bool(self._waiting or self._chains or self._done)
            takes_in = self._broken is None  # else whoever enters the next formation has the wire
            try:
                item = self._handed_in.get(not busy and not takes_in, self._check_seconds)
            except Empty:
                if busy:
                    return False
                if takes_in:
                    self._idle()
                continue
            if item is None:
                return True
            self._waiting.append(item)

    def _idle(self) -> None:
        """Take in what early peers send until something is handed in."""
        self._idles = True
        if self._handed_in.empty():
            self._transport.idle(self._check_seconds)
        self._idles = False
        self._look_for_losses()

    def _look_for_losses(self) -> None:
        """Others may wait for what this rank has sent, though it waits for nothing itself."""
        if self._membership is None or self._broken is not None or self._closed:
            return
        if self._membership.heeds_losses():
            self._transport.check_sends()

    def _begin(self) -> None:
        """As many chains as may be under way."""
        if self._broken is not None:
            self._abort(self._broken)
        while self._waiting and len(self._chains) < MAX_CHAINS_IN_FLIGHT:
            chain = self._waiting[0]
            if chain.alone is not None and self._is_busy(chain.alone):
                return  # it begins with the other's result, and changes what that still sends
            self._chains.append(chain)
            self._waiting.popleft()
            self._advance(chain)

    def _is_busy(self, task: Task) -> bool:
        others = (*self._running, *self._done)
        return any(np.may_share_memory(task.vector, other.task.vector) for other in others)

    def _advance(self, chain: _Underway) -> None:
        """Begin its next rounds; it is over if there are none. Interrupted if the members are to
        meet: a rank that never waits long would not hear of it."""
        if self._membership is not None:
            self._membership.raise_if_rendezvous()
        began = monotonic()
        tasks = next(chain.chain, None)
        if chain.alone is None:
            self._note_encoding(chain, tasks, began)
        if tasks is None:
            self._chains.remove(chain)
            chain.future.set_result(None)
            return
        chain.left = len(tasks)
        self._advanced = monotonic()
        for task in tasks:
            execution = Execution(
                task.program,
                self._transport,
                task.view or flat(task.program.schedule, task.vector),
                task.step,
                task.round_number,
                monotonic() + self.timeout,
                task.arithmetic,
            )
            self._running.append(_Running(task, chain, monotonic(), execution))

    def _note_encoding(self, chain: _Underway, tasks: Sequence[Task] | None, began: float) -> None:
        """What a compressor did between two rounds, or after the last."""
        task = chain.newest = tasks[0] if tasks else chain.newest
        if task is not None:
            self.arrivals.add_encoded(
                Encoded(step=task.step, bucket=task.bucket, began=began, ended=monotonic())
            )

    def _go_on(self) -> None:
        """Take every round as far as it goes, then one message in."""
        over = [running for running in self._running if running.execution.start_ready()]
        for running in over:
            self._end(running)
        if over:
            return  # the next rounds of a chain are to begin before anything is waited for
        if self._running:
            self._take_message()
        while self._done and not (self._running and len(self._done) <= MAX_CHAINS_IN_FLIGHT):
            first = self._done[0]
            first.execution.wait_for_sendings()
            self._done.popleft()
            first.of.future.set_result(None)

    def _end(self, over: _Running) -> None:
        was_first = over is self._running[0]
        self._running.remove(over)
        if was_first and self._running:
            self._running[0].execution.deadline = monotonic() + self.timeout
        self._note(over)
        if over.of.alone is not None:
            self._chains.remove(over.of)
            self._done.append(over)
            return
        over.execution.wait_for_sendings()  # before what was sent is changed
        over.of.left -= 1
        if not over.of.left:
            self._advance(over.of)

    def _take_message(self) -> None:
        first = self._running[0].execution
        awaited = ChainMap(*(running.execution.awaited for running in self._running))
        try:
            address, array = self._transport.receive_any(
                awaited, monotonic() + self._check_seconds, self._landing
            )
        except PeerLate:
            self._check_others()
            if monotonic() < first.deadline:
                return
            # Of the first alone: later rounds may be waiting for it to end.
            address, array = self._transport.receive_any(
                first.awaited.keys(), monotonic(), self._landing
            )
        for running in self._running:
            if address in running.execution.awaited:
                running.execution.arrive(address, array)
                return

    def _landing(self, address: Address, nbytes: int) -> Landing | None:
        """Where the round that awaits this message wants it."""
        for running in self._running:
            if address in running.execution.awaited:
                return running.execution.landing(address, nbytes)
        return None

    def _note(self, over: _Running) -> None:
        """Its moves are done."""
        self.arrivals.add(
            Arrival(
                step=over.task.step,
                bucket=over.task.bucket,
                ready=over.of.ready,
                started=over.started,
                ended=monotonic(),
                peers=over.execution.came,
                leading=over.execution.leading,
            )
        )

    def _fail(self, error: BaseException) -> None:
        """The first error ends it all: nobody shall wait for what won't come."""
        interrupted = self._interrupted(error)
        self._broken = interrupted or self._abort_flag.first_cause(error)
        self._abort(self._broken)
        if interrupted is None:
            self._transport.close()

    def _interrupted(self, error: BaseException) -> Interrupted | None:
        """If that is reason to meet with those who are left, and not to end."""
        if self._membership is None or isinstance(error, Interrupted):
            return error if isinstance(error, Interrupted) else None
        if isinstance(error, TransportError) and self._abort_cause() is not None:
            return None
        if isinstance(error, PeerLate) and self._membership.has_failed_member(error.peers):
            self._membership.note_lost_messages(*error.peers)
        elif isinstance(error, PeerLost) and error.peer is not None:
            self._membership.note_lost_messages(error.peer)
        elif not isinstance(error, StoreLost):
            return None
        self._membership.explain(error.problem)
        self._membership.request_rendezvous()
        return Interrupted(error.problem)

    def _abort_cause(self) -> PeerFailed | None:
        """What a rank has told that ends the run for all."""
        abort = self._abort_flag.poll()
        return None if isinstance(abort, StoreLost) else abort

    def use_store(self, store: Store) -> None:
        """The store that ranks find one another by is another."""
        self._transport.use_store(store)

    def _abort(self, error: BaseException) -> None:
        chains = [*(over.of for over in self._done), *self._chains, *self._waiting]
        for left in (self._done, self._chains, self._running, self._waiting):
            left.clear()
        for chain in chains:
            chain.future.set_exception(error)

    def _check_others(self) -> None:
        """Whether others gave up, or wait to meet this rank; or whether it has waited enough."""
        if self._membership is not None:
            first = self._running[0]
            peers = tuple(sorted({address.peer for address in first.execution.awaited}))
            self._membership.wait(monotonic() - first.started, peers)
        if monotonic() - self._polled >= ENGINE_ABORT_POLL_SECONDS:
            self._polled = monotonic()
            self._poll_abort_flag()

    def _poll_abort_flag(self) -> None:
        abort = self._abort_flag.poll()
        if abort is not None:
            raise abort
