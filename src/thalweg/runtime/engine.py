"""One communication thread a process: it runs round after round, in the order they were handed in.

The training thread hands a round in when its bucket is ready and goes on computing; it waits for
the results where it needs them. The first error ends the engine: the alarm is sounded and the
transport closed, so that other ranks stop waiting too, and every round that is left fails with that
error.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread
from time import monotonic

from thalweg.errors import PeerFailed, PeerLate, ThalwegError, TransportClosed, TransportError
from thalweg.runtime.alarm import Alarm
from thalweg.runtime.arithmetic import NUMPY, Arithmetic
from thalweg.runtime.arrivals import Arrival, Arrivals
from thalweg.runtime.execute import Part, execute, flat
from thalweg.transports import Array, Transport

IDLE = 0.05  # seconds without a round after which the transport may tidy up
GRACE = 5.0  # seconds beyond the rounds' own deadlines, for the thread to say what happened


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One round on one vector, which is reduced in place."""

    part: Part
    vector: Array
    step: int
    round_number: int
    bucket: int = 0
    arithmetic: Arithmetic = NUMPY
    between_steps: bool = False  # beside the rounds of a step, with numbers of its own


class Engine:
    """`timeout` is how many seconds a round may take."""

    def __init__(self, transport: Transport, alarm: Alarm, timeout: float) -> None:
        self.arrivals = Arrivals()
        self.timeout = timeout
        self._transport = transport
        self._alarm = alarm
        self._broken: BaseException | None = None
        self._closed = False
        self._tasks: SimpleQueue[tuple[Task, Future[None], float] | None] = SimpleQueue()
        self._thread = Thread(target=self._work, name="thalweg-communication", daemon=True)
        self._thread.start()

    @property
    def rank(self) -> int:
        return self._transport.rank

    def submit(self, task: Task) -> Future[None]:
        if self._closed:
            raise TransportClosed(f"rank {self.rank} communicates after close()", "do so before it")
        future: Future[None] = Future()
        self._tasks.put((task, future, monotonic()))
        return future

    def wait(self, futures: list[Future[None]]) -> None:
        """Until all are done; the first error if there is one."""
        deadline = monotonic() + self.timeout * max(1, len(futures)) + GRACE
        for future in futures:
            try:
                future.result(max(0.0, deadline - monotonic()))
            except TimeoutError:
                raise TransportError(
                    f"the communication thread of rank {self.rank} doesn't answer",
                    "please report this with what the other ranks printed",
                ) from None

    def run(self, tasks: list[Task]) -> None:
        self.wait([self.submit(task) for task in tasks])

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._tasks.put(None)
        self._thread.join(self.timeout if self._broken is None else GRACE)
        self._transport.close()  # ends the thread if it still waits
        self._thread.join(GRACE)

    def _work(self) -> None:
        while (item := self._next_task()) is not None:
            task, future, ready = item
            was_fine = self._broken is None
            if was_fine:
                self._broken = self._attempt(task, ready)
            if self._broken is None:
                future.set_result(None)
            else:
                future.set_exception(self._broken)
                if was_fine:
                    self._transport.close()  # nobody shall wait for what won't come
            del item, task, future

    def _next_task(self) -> tuple[Task, Future[None], float] | None:
        while True:
            try:
                return self._tasks.get(timeout=IDLE)
            except Empty:
                self._transport.idle()

    def _attempt(self, task: Task, ready: float) -> BaseException | None:
        """Run it; what went wrong."""
        try:
            self._run(task, ready)
        except ThalwegError as error:
            if isinstance(error, PeerLate):
                self._alarm.sound_lateness(error)
            elif not isinstance(error, PeerFailed):
                self._alarm.sound(error.problem)
            heard = self._alarm.heard() if isinstance(error, TransportError) else None
            return heard or error  # the first cause, if another rank has told it
        except BaseException as error:  # the training thread gets it
            self._alarm.sound(f"{type(error).__name__}: {error}")
            return error
        return None

    def _run(self, task: Task, ready: float) -> None:
        started = monotonic()
        peers = execute(
            task.part,
            self._transport,
            flat(task.part.schedule, task.vector),
            step=task.step,
            round_number=task.round_number,
            timeout=self.timeout,
            arithmetic=task.arithmetic,
            while_waiting=self._listen,
        )
        if not task.between_steps:
            self._transport.forget(task.step, task.round_number + 1)
        self.arrivals.add(
            Arrival(
                step=task.step,
                bucket=task.bucket,
                ready=ready,
                started=started,
                ended=monotonic(),
                peers=peers,
            )
        )

    def _listen(self) -> None:
        heard = self._alarm.heard()
        if heard is not None:
            raise heard
