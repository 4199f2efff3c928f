"""The workers of a run: started, listened to, and ended together."""

from __future__ import annotations

import json
import os
import resource
import selectors
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import psutil

from thalweg.errors import RunError, ThalwegError, UsageError, WorkerFailed
from thalweg.launch.place import Place, SupervisorHook
from thalweg.launch.root_cause import StderrFailure, WorkerExit
from thalweg.launch.store_process import fork_store
from thalweg.launch.worker_process import (
    PIPE_CHUNK_BYTES,
    Failure,
    LinePipe,
    WorkerPipes,
    WorkerSpec,
    be_worker,
    fork,
    fork_guard,
)

OnMessage = Callable[[int, dict[str, Any]], None]
"""Called with the rank and what it reported."""
OnLine = Callable[[int, str, str], None]
"""Called with the rank, "stdout" or "stderr", and a line of it."""
WORKER_EXIT_POLL_SECONDS = 0.05  # seconds between two looks at who has ended
TERM_GRACE_SECONDS = 2.0  # seconds from SIGTERM to SIGKILL, at most
MAX_OUTPUT_LINE_BYTES = 1 << 20  # bytes; what is longer is told in pieces
MAX_PIPE_BYTES = 1 << 20  # bytes that a pipe can hold
MIN_STORE_LIFE_SECONDS = 0.5  # seconds of a store that is worth starting another
STOPPED_WORKER_GRACE_SECONDS = 10.0  # seconds that one may be stopped when all others have ended
BASE_DESCRIPTOR_COUNT = 64  # that a process has open anyway, at most


class _Worker:
    """What the supervisor holds of a living one."""

    def __init__(self, rank: int, pid: int) -> None:
        self.rank = rank
        self.pid = pid
        self.pipes: list[LinePipe] = []
        self.result: dict[str, Any] | None = None
        self.reported_failure: Failure | None = None
        self.stderr_failure = StderrFailure()
        self.expected = False  # its end is nobody's failure
        self.restarts = False  # when it has ended

    def end(self, code: int) -> WorkerExit:
        words = self.stderr_failure
        ours = code == UsageError.exit_code and words.line
        uncaught = words.failure if code == 1 or ours else None  # others were only shown
        return WorkerExit(
            rank=self.rank, code=code, failure=self.reported_failure or uncaught, result=self.result
        )

    @property
    def is_stopped(self) -> bool:
        with suppress(psutil.NoSuchProcess):
            return bool(psutil.Process(self.pid).status() == psutil.STATUS_STOPPED)
        return False

    def send(self, number: int) -> None:
        """To its whole group, which is there once it leads a session."""
        try:
            os.killpg(self.pid, number)
        except OSError:
            with suppress(OSError):
                os.kill(self.pid, number)


@dataclass(slots=True, eq=False, kw_only=True)
class WorkerGroup:
    """Forks the store and the workers, and listens to them until all have ended."""

    size: int
    place: Place
    returns: bool  # whether each must send a result
    keep_going: bool = False  # though one fails
    spare: Collection[int] = ()  # ranks that the others can do without
    survives: bool = False  # that one is killed; the others know whether they can go on
    restarts: int = 0  # for each worker that is killed
    on_message: OnMessage
    on_line: OnLine
    director: SupervisorHook | None = None
    running: dict[int, _Worker] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
    ends: list[WorkerExit] = field(default_factory=list)
    failures: list[WorkerExit] = field(default_factory=list)
    killed: list[int] = field(default_factory=list)  # by the director
    signals: list[int] = field(default_factory=list)
    callback_error: BaseException | None = None
    _reported: list[WorkerExit] = field(
        default_factory=list
    )  # failures that `on_line` has heard of
    _lines: set[str] = field(default_factory=set)  # last ones of workers, that it has heard
    _ending: bool = False
    _job: WorkerSpec | None = None
    _guard: tuple[int, int] | None = None
    _store: int | None = None
    _port: int = 0
    _store_began: float = 0.0
    _stopped_since: float | None = None
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def is_cancelled(self) -> bool:
        return bool(self.signals) or self.callback_error is not None

    def done(self) -> bool:
        """Nobody has to be waited for any longer."""
        return self.is_cancelled() or (self.has_failed() and not self.keep_going)

    def has_failed(self) -> bool:
        return any(not self._is_spare(exit_) for exit_ in self.failures)

    def is_lost(self) -> bool:
        """Whether all have ended, and none of them well."""
        return bool(self.failures) and all(exit_.code != 0 for exit_ in self.ends)

    def _is_spare(self, exit_: WorkerExit) -> bool:
        return exit_.rank in self.spare or (self.survives and exit_.code < 0)

    @contextmanager
    def keeping_signals(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM are noted and acted upon when it suits, not raised anywhere."""
        previous: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for ours in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(ours) not in (signal.SIG_IGN, None):
                    previous[ours] = signal.signal(ours, self._note_signal)
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _note_signal(self, number: int, frame: Any) -> None:
        self.signals.append(number)

    def host_store(self) -> int:
        """Before any worker starts; the port."""
        allow_descriptors(3 * self.size)
        self._guard = fork_guard()
        self._store, self._port = fork_store(self.place, self._guard[1])
        self._store_began = monotonic()
        return self._port

    def start(self, job: WorkerSpec) -> None:
        self._job = job
        if self.director is not None:
            self.director.prepare()
        for rank in range(self.size):
            self._start(rank)

    def _start(self, rank: int) -> None:
        assert self._guard is not None
        assert self._job is not None
        job = self._job
        self.steps.pop(rank, None)  # of a former life
        pipes: list[tuple[int, int]] = []
        try:
            for _ in range(3):
                pipes.append(os.pipe())
            reads, writes = zip(*pipes, strict=True)
            post = WorkerPipes(
                rank=rank,
                restarts=sum(exit_.rank == rank for exit_ in self.ends),
                stdout=writes[0],
                stderr=writes[1],
                messages=writes[2],
                guard=self._guard[1],
                not_mine=(*reads, *self._descriptors()),
            )
            pid = fork(lambda: be_worker(post, job))
        except OSError as error:
            for end in (end for pipe in pipes for end in pipe):
                os.close(end)
            raise WorkerFailed(
                f"{self.place.label(rank)} can't be started: {error.strerror}",
                "start fewer workers, or raise the limits of processes and open files (ulimit)",
            ) from None
        for descriptor in writes:
            os.close(descriptor)
        worker = self.running[rank] = _Worker(rank, pid)
        worker.pipes = [
            LinePipe(
                reads[0],
                lambda line: self._on_worker_output(worker, "stdout", line),
                MAX_OUTPUT_LINE_BYTES,
            ),
            LinePipe(
                reads[1],
                lambda line: self._on_worker_output(worker, "stderr", line),
                MAX_OUTPUT_LINE_BYTES,
            ),
            LinePipe(reads[2], lambda line: self._receive(worker, line), sys.maxsize),
        ]
        for pipe in worker.pipes:
            self._selector.register(pipe.descriptor, selectors.EVENT_READ, pipe)

    def kill(self, rank: int) -> None:
        worker = self.running.get(rank)
        if worker is not None:
            worker.expected = True
            worker.send(signal.SIGKILL)
            self.killed.append(rank)

    def restart(self, rank: int) -> None:
        if rank in self.running:
            self.running[rank].restarts = True
            self.kill(rank)
        else:
            self._start(rank)

    def pause(self, rank: int) -> None:
        if rank in self.running:
            self.running[rank].send(signal.SIGSTOP)

    def resume(self, rank: int) -> None:
        if rank in self.running:
            self.running[rank].send(signal.SIGCONT)

    def kill_store(self) -> None:
        if self._store is not None:
            self._store_began = 0.0  # that it died young says nothing of the next
            os.kill(self._store, signal.SIGKILL)

    def _descriptors(self) -> Iterator[int]:
        for worker in self.running.values():
            yield from (pipe.descriptor for pipe in worker.pipes)

    def watch(self, deadline: float | None, enough: Callable[[], bool]) -> None:
        """Listen to the workers until all have ended, or it is enough, or too late."""
        while self.running and not enough():
            left = (
                WORKER_EXIT_POLL_SECONDS
                if deadline is None
                else min(WORKER_EXIT_POLL_SECONDS, deadline - monotonic())
            )
            if left <= 0:
                return
            for key, _ in self._selector.select(left):
                pipe: LinePipe = key.data
                pipe.read()
                if pipe.ended:
                    self._selector.unregister(pipe.descriptor)
            self._reap()
            self._end_what_stands_still()
            if self.director is not None and not self._ending:
                self._notify(self.director.poll, self)

    def interrupt(self, grace: float) -> None:
        """What Ctrl-C does; a second one is less patient."""
        self._ending = True
        self._send(signal.SIGINT)
        already = len(self.signals)
        self.watch(monotonic() + grace, lambda: len(self.signals) > already)

    def end(self, grace: float) -> None:
        """None is left after this, nor the guard."""
        self._ending = True
        try:
            self._send(signal.SIGTERM)
            self._send(signal.SIGCONT)  # a paused one can't hear it
            self.watch(monotonic() + min(grace, TERM_GRACE_SECONDS), lambda: False)
        finally:
            self._send(signal.SIGKILL)
            self.watch(None, lambda: False)
            self._selector.close()
            if self._store is not None:
                _kill(self._store)
            if self._guard is not None:
                os.close(self._guard[1])
                _kill(self._guard[0])

    def _send(self, number: int) -> None:
        for worker in self.running.values():
            worker.send(number)

    def _reap(self) -> None:
        ended = []
        for worker in self.running.values():
            pid, status = os.waitpid(worker.pid, os.WNOHANG)
            if pid:
                ended.append((os.waitstatus_to_exitcode(status), worker))
        # Who was killed ended before those who noticed it, and got here in the same tick.
        for code, worker in sorted(ended, key=lambda pair: pair[0] >= 0):
            self._let_go(worker, code)
        if self._store is not None and os.waitpid(self._store, os.WNOHANG)[0]:
            self._host_another_store(self._store)

    def _host_another_store(self, dead: int) -> None:
        """At the same address, unless the one before died at once."""
        assert self._guard is not None
        self._store = None
        with suppress(BrokenPipeError):
            os.write(self._guard[1], b"-%d\n" % dead)
        if self._ending:
            return
        began, self._store_began = self._store_began, monotonic()
        try:
            if self._store_began - began < MIN_STORE_LIFE_SECONDS:
                raise RunError("the process that hosts the store died", "start again")
            others = tuple(self._descriptors())
            self._store, _ = fork_store(
                self.place, self._guard[1], port=self._port, not_mine=others
            )
        except ThalwegError as error:
            self.callback_error = error

    def _end_what_stands_still(self) -> None:
        """Who is stopped (SIGSTOP) when all others have ended well has nobody to go on with, and
        nobody knows when it will."""
        over = self.survives and any(exit_.code == 0 for exit_ in self.ends)
        if not over or not all(worker.is_stopped for worker in self.running.values()):
            self._stopped_since = None
            return
        self._stopped_since = self._stopped_since or monotonic()
        if monotonic() - self._stopped_since > STOPPED_WORKER_GRACE_SECONDS:
            for worker in self.running.values():
                told = f"rank {worker.rank} was stopped when the others ended, and is ended too"
                self._notify(self.on_line, worker.rank, "stderr", told)
                worker.expected = True
                worker.send(signal.SIGKILL)
            self._stopped_since = None

    def _let_go(self, worker: _Worker, code: int) -> None:
        """Take the last words of one that has ended, and close its pipes."""
        assert self._guard is not None
        del self.running[worker.rank]
        with suppress(BrokenPipeError):
            os.write(self._guard[1], b"-%d\n" % worker.pid)
        for pipe in worker.pipes:
            if not pipe.ended:
                self._selector.unregister(pipe.descriptor)
                for _ in range(
                    MAX_PIPE_BYTES // PIPE_CHUNK_BYTES
                ):  # a child of its may write for ever
                    if not pipe.read():
                        break
                pipe.flush()
            os.close(pipe.descriptor)
        exit_ = worker.end(code)
        self.ends.append(exit_)
        if code != 0:
            with suppress(OSError):  # its own children, if it had any
                os.killpg(worker.pid, signal.SIGKILL)
        line = worker.stderr_failure.line
        if line and line not in self._lines and (self._ending or exit_.failure is None):
            self._lines.add(line)
            self._notify(self.on_line, worker.rank, "stderr", line)
        if self._ending:
            return
        if worker.restarts:
            self._start(worker.rank)
        elif not worker.expected and (code != 0 or (self.returns and exit_.result is None)):
            self._note_failure(exit_)

    def report_failures_except(self, told: str) -> None:
        """Tell why others failed than for this reason: each reason once, and none again."""
        causes = [
            exit_
            for exit_ in reversed(self.failures)
            if not exit_.is_consequence() and exit_ not in self._reported
        ]
        for problem, exit_ in {
            exit_.failure.problem: exit_ for exit_ in causes if exit_.failure
        }.items():
            if problem not in told:
                line = str(exit_.as_error(self.place.label(exit_.rank)))
                self._notify(self.on_line, exit_.rank, "stderr", line)

    def _note_failure(self, exit_: WorkerExit) -> None:
        told = exit_.as_error(self.place.label(exit_.rank)).problem
        lives = sum(other.rank == exit_.rank for other in self.ends)
        if exit_.code < 0 and lives <= self.restarts:
            self._notify(self.on_line, exit_.rank, "stderr", f"{told}; it is started again")
            self._start(exit_.rank)
            return
        self.failures.append(exit_)
        alone = not exit_.is_consequence() and not exit_.is_mistake()  # others make those as well
        if self._is_spare(exit_) and alone and not self.done():
            is_over = not self.running and self.is_lost()
            line = told if is_over else f"{told}; others go on"
            self._notify(self.on_line, exit_.rank, "stderr", line)
            self._reported.append(exit_)

    def _on_worker_output(self, worker: _Worker, stream: str, line: bytes) -> None:
        # Of a line that redraws itself, a progress bar's, the last state is told.
        text = line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
        if stream == "stderr" and worker.stderr_failure.read_line(text):
            return  # if it is why all end it is told at the end, once for all that say the same
        self._notify(self.on_line, worker.rank, stream, text)

    def _receive(self, worker: _Worker, line: bytes) -> None:
        try:
            (kind, content), *_ = json.loads(line).items()
        except ValueError:  # cut off by its end
            return
        if kind == "message":
            if type(content.get("step")) is int:
                self.steps[worker.rank] = content["step"]
            self._notify(self.on_message, worker.rank, content)
        elif kind == "result":
            worker.result = content
        else:
            worker.reported_failure = Failure(**content)

    def _notify(self, callback: Callable[..., None], *arguments: Any) -> None:
        """A caller's error ends the run, but not before the workers have ended."""
        if self.callback_error is None:
            try:
                callback(*arguments)
            except BaseException as error:
                self.callback_error = error


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def allow_descriptors(number: int) -> None:
    """So many open files more than usual, if the system lets us."""
    number += BASE_DESCRIPTOR_COUNT
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < number:
        most = number if hard == resource.RLIM_INFINITY else min(number, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
