"""The communication thread of a process: it begins rounds in the order of their submission.

The training thread submits a single round or a chain: rounds that follow one another, each built
from the last one's result, as compressors need them. Two chains may be in flight at once, on
different vectors: while one waits for a peer, the other's messages fill the link. The second begins
with the first's next message, or at once if nothing runs. A chain keeps its place until it ends, so
the first unfinished chain of any rank is in flight on all ranks, and ranks never wait for one
another in a circle.

The training thread submits a round when its bucket is ready and continues to compute; it waits for
the results where it needs them. The first error ends the engine: it raises the abort flag and
closes the transport, so that other ranks stop waiting too, and every unfinished round fails with
that error. If members may change, the loss of a peer only interrupts the rounds in flight
(Interrupted); the engine continues with the members of the next epoch (`enter_epoch`).
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

from thalweg.engine.arrivals import Arrival, Arrivals, Encoded
from thalweg.engine.execute import Execution, Task
from thalweg.errors import (
    Interrupted,
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
from thalweg.transports import Address, Landing, Transport
from thalweg.transports.store_client import Store

ENGINE_ABORT_POLL_SECONDS = 0.5  # between two reads of the abort flag
RENDEZVOUS_CHECK_SECONDS = 0.1  # between two checks for a pending rendezvous
ENGINE_REPLY_GRACE_SECONDS = 5.0  # for the thread to report an error after a round's deadline


ChainTasks = Iterator[Sequence[Task]]
"""Each item holds rounds that may run concurrently; when all of them have ended, the communication
thread advances the iterator, which runs there."""


@dataclass(slots=True, eq=False)
class _Submission:
    """A submitted chain and its progress."""

    tasks: ChainTasks
    future: Future[None]
    ready: float  # time of submission
    alone: Task | None  # the task, if a single round was submitted
    left: int = 0  # running rounds
    newest: Task | None = None  # of several


class Engine:
    """The engine of one rank. `timeout` limits a round, in seconds; with `membership` the members
    may change."""

    def __init__(
        self,
        transport: Transport,
        abort_flag: AbortFlag,
        timeout: float,
        membership: Membership | None = None,
    ) -> None:
        self.rank = transport.rank
        self.arrivals = Arrivals()
        self.timeout = timeout
        self._membership = membership
        self._poll_seconds = RENDEZVOUS_CHECK_SECONDS if membership else ENGINE_ABORT_POLL_SECONDS
        self._transport = transport
        self._abort_flag = abort_flag
        self._broken: BaseException | None = None
        self._closed = False
        self._advanced = 0.0  # time at which the last rounds began
        self._polled = 0.0  # time at which the abort flag was last read
        self._submitted: SimpleQueue[_Submission | None] = SimpleQueue()  # None ends the thread
        self._idles = False  # the thread waits for submissions
        self._waiting: deque[_Submission] = deque()
        self._chains: list[_Submission] = []
        self._running: dict[Execution, _Submission] = {}  # in the order in which they began
        self._done: dict[Execution, _Submission] = {}  # some of their messages may not have left
        self._cores = torch.get_num_threads()
        self._thread = Thread(target=self._work, name="thalweg-communication", daemon=True)
        self._thread.start()

    @property
    def failed(self) -> bool:
        """True if the engine has failed permanently."""
        return self._broken is not None and not isinstance(self._broken, Interrupted)

    def submit(self, work: Task | ChainTasks) -> Future[None]:
        """Queue a round or a chain; the caller leaves its arrays alone until the future is done."""
        if self._closed:
            raise TransportClosed(f"rank {self.rank} communicates after close()", "do so before it")
        alone = work if isinstance(work, Task) else None
        tasks = iter([[work]]) if isinstance(work, Task) else work
        submission = _Submission(tasks, Future(), monotonic(), alone)
        self._submitted.put(submission)
        if self._idles:
            self._transport.wake()
        return submission.future

    def wait(self, futures: list[Future[None]]) -> None:
        """Wait until all futures are done, and raise the first error."""
        deadline = monotonic() + self.timeout * max(1, len(futures)) + ENGINE_REPLY_GRACE_SECONDS
        for future in futures:
            while True:
                with suppress(TimeoutError):
                    future.result(max(0.0, deadline - monotonic()))
                    break
                later = self._advanced + self.timeout + ENGINE_REPLY_GRACE_SECONDS
                if later <= deadline:
                    raise TransportError(
                        f"the communication thread of rank {self.rank} doesn't answer",
                        "please report this with the output of the other ranks",
                    )
                deadline = later  # a chain's next round began

    def run(self, work: Sequence[Task | ChainTasks]) -> None:
        self.wait([self.submit(task) for task in work])

    def enter_epoch(self, membership_epoch: MembershipEpoch, abort_flag: AbortFlag) -> None:
        """Continue with these members after an interruption. No chain may be in flight."""
        if self._broken is None:
            self._broken = Interrupted(f"membership epoch {membership_epoch.number} begins")
        with suppress(ThalwegError, TimeoutError):
            self.submit(iter(())).result(ENGINE_REPLY_GRACE_SECONDS)  # fails when its turn comes
        self._transport.enter_epoch(membership_epoch.number, membership_epoch.members)
        self._abort_flag = abort_flag
        self._broken = None

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._submitted.put(None)
        self._transport.wake()
        self._thread.join(self.timeout if self._broken is None else ENGINE_REPLY_GRACE_SECONDS)
        self._transport.close()  # ends the thread if it still waits
        self._thread.join(ENGINE_REPLY_GRACE_SECONDS)

    def _work(self) -> None:
        torch.set_num_threads(self._cores)  # OpenMP's default is one thread per core
        last = False
        while not last or self._waiting or self._chains or self._done:
            try:
                last = self._fetch() or last
                self._begin_chains()
                self._progress()
            except BaseException as error:
                self._fail(error)

    def _fetch(self) -> bool:
        """Take submissions from the queue, waiting if there is nothing else to do; True after the
        last one."""
        while True:
            busy = bool(self._waiting or self._chains or self._done)
            receives = self._broken is None  # otherwise `enter_epoch` uses the transport
            try:
                item = self._submitted.get(not busy and not receives, self._poll_seconds)
            except Empty:
                if busy:
                    return False
                if receives:
                    self._idle()
                continue
            if item is None:
                return True
            self._waiting.append(item)

    def _idle(self) -> None:
        """Receive the messages of early peers until something is submitted."""
        self._idles = True
        if self._submitted.empty():
            self._transport.idle(self._poll_seconds)
        self._idles = False
        if self._broken is not None or self._closed or not self._submitted.empty():
            return
        if self._membership is not None and self._membership.heeds_losses():
            self._transport.check_sends()  # others may wait for messages of this rank that are lost

    def _begin_chains(self) -> None:
        """Begin as many chains as may be in flight."""
        if self._broken is not None:
            self._abort(self._broken)
        while self._waiting and len(self._chains) < MAX_CHAINS_IN_FLIGHT:
            chain = self._waiting[0]
            others = (*self._running, *self._done)
            if chain.alone is not None and any(
                np.may_share_memory(chain.alone.vector, other.task.vector) for other in others
            ):
                return  # it would change a vector that the other chain still sends
            self._chains.append(chain)
            self._waiting.popleft()
            self._advance(chain)

    def _advance(self, chain: _Submission) -> None:
        """Begin the chain's next rounds, or end it if there are none. Interrupted if a rendezvous
        is pending: a rank that never waits for long has no other occasion to notice it."""
        if self._membership is not None:
            self._membership.raise_if_rendezvous()
        began = monotonic()
        tasks = next(chain.tasks, None)
        newest = chain.newest = tasks[0] if tasks else chain.newest
        if chain.alone is None and newest is not None:  # the compressor's time between two rounds
            self.arrivals.add_encoded(
                Encoded(step=newest.step, bucket=newest.bucket, began=began, ended=monotonic())
            )
        if tasks is None:
            self._chains.remove(chain)
            chain.future.set_result(None)
            return
        chain.left = len(tasks)
        self._advanced = monotonic()
        for task in tasks:
            execution = Execution(task, self._transport, monotonic() + self.timeout)
            self._running[execution] = chain

    def _progress(self) -> None:
        """Start every move that is ready, then receive one message."""
        over = [execution for execution in self._running if execution.start_ready()]
        for execution in over:
            self._end(execution)
        if over:
            return  # a chain's next rounds begin before the thread waits for a message
        if self._running:
            self._receive()
        while self._done and not (self._running and len(self._done) <= MAX_CHAINS_IN_FLIGHT):
            first = next(iter(self._done))
            first.wait_for_sendings()
            self._done.pop(first).future.set_result(None)

    def _end(self, execution: Execution) -> None:
        was_first = execution is self._first
        chain = self._running.pop(execution)
        if was_first and self._running:
            self._first.deadline = monotonic() + self.timeout
        self.arrivals.add(
            Arrival(
                step=execution.task.step,
                bucket=execution.task.bucket,
                ready=chain.ready,
                started=execution.started,
                ended=monotonic(),
                peers=execution.came,
                leading=execution.leading,
            )
        )
        if chain.alone is not None:
            self._chains.remove(chain)
            self._done[execution] = chain
            return
        execution.wait_for_sendings()  # the chain may change these arrays next
        chain.left -= 1
        if not chain.left:
            self._advance(chain)

    @property
    def _first(self) -> Execution:
        """The running execution that began first."""
        return next(iter(self._running))

    def _receive(self) -> None:
        first = self._first
        awaited = ChainMap(*(execution.awaited for execution in self._running))
        try:
            address, array = self._transport.receive_any(
                awaited, monotonic() + self._poll_seconds, self._landing
            )
        except PeerLate:
            self._check_others()
            if monotonic() < first.deadline:
                return
            # Only the first round times out: later ones may be waiting for it to end.
            address, array = self._transport.receive_any(
                first.awaited.keys(), monotonic(), self._landing
            )
        for execution in self._running:
            if address in execution.awaited:
                execution.arrive(address, array)
                return

    def _landing(self, address: Address, nbytes: int) -> Landing | None:
        """The buffer into which the awaiting round wants this message."""
        for execution in self._running:
            if address in execution.awaited:
                return execution.landing(address, nbytes)
        return None

    def _fail(self, error: BaseException) -> None:
        """Fail all submissions with this error, so that no thread or rank waits in vain."""
        interrupted = self._interrupted(error)
        self._broken = interrupted or self._abort_flag.publish_error(error)
        self._abort(self._broken)
        if interrupted is None:
            self._transport.close()

    def _interrupted(self, error: BaseException) -> Interrupted | None:
        """The interruption, if this error leads to a rendezvous and not to the end of the run."""
        if self._membership is None or isinstance(error, Interrupted):
            return error if isinstance(error, Interrupted) else None
        if isinstance(error, TransportError):
            abort = self._abort_flag.poll()
            if abort is not None and not isinstance(abort, StoreLost):
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

    def use_store(self, store: Store) -> None:
        """Look up peer addresses in another store from now on."""
        self._transport.use_store(store)

    def _abort(self, error: BaseException) -> None:
        chains = [*self._done.values(), *self._chains, *self._waiting]
        for left in (self._done, self._chains, self._running, self._waiting):
            left.clear()
        for chain in chains:
            chain.future.set_exception(error)

    def _check_others(self) -> None:
        """Check for an abort, a pending rendezvous, and for peers that have been late too long."""
        if self._membership is not None:
            peers = tuple(sorted({address.peer for address in self._first.awaited}))
            self._membership.wait(monotonic() - self._first.started, peers)
        if monotonic() - self._polled >= ENGINE_ABORT_POLL_SECONDS:
            self._polled = monotonic()
            abort = self._abort_flag.poll()
            if abort is not None:
                raise abort
