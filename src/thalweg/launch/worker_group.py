"""The worker processes of a run, which are started, watched and ended together."""

from __future__ import annotations

import json
import os
import resource
import selectors
import signal
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from time import monotonic
from typing import Any, Protocol

import psutil

from thalweg.errors import RunError, ThalwegError, UsageError, WorkerFailed
from thalweg.launch.place import Place
from thalweg.launch.root_cause import StderrFailure, WorkerExit
from thalweg.launch.store_process import fork_store
from thalweg.launch.worker_process import (
    PIPE_CHUNK_BYTES,
    Failure,
    LinePipe,
    WorkerSpec,
    be_worker,
    fork,
    fork_guard,
)

OnMessage = Callable[[int, dict[str, Any]], None]
"""Called with the rank and its message."""
OnLine = Callable[[int, str, str], None]
"""Called with the rank, "stdout" or "stderr", and a line of that stream."""
WORKER_EXIT_POLL_SECONDS = 0.05
TERM_GRACE_SECONDS = 2.0  # from SIGTERM to SIGKILL
MAX_OUTPUT_LINE_BYTES = 1 << 20  # a longer line is split
MAX_PIPE_BYTES = 1 << 20  # capacity of a pipe
MIN_STORE_LIFE_SECONDS = 0.5  # a store that died sooner isn't replaced
STOPPED_WORKER_GRACE_SECONDS = 10.0  # for a stopped worker after all others have ended
BASE_DESCRIPTOR_COUNT = 64  # open files of a process without workers


class _Worker:
    """A running worker process, as the supervisor tracks it."""

    def __init__(self, rank: int, pid: int) -> None:
        self.rank = rank
        self.pid = pid
        self.pipes: list[LinePipe] = []
        self.result: dict[str, Any] | None = None
        self.reported_failure: Failure | None = None
        self.stderr_failure = StderrFailure()
        self.expected = False  # its end is no failure
        self.restarts = False  # after its end

    def end(self, code: int) -> WorkerExit:
        seen = self.stderr_failure
        is_usage_error = code == UsageError.exit_code and seen.line
        uncaught = seen.failure if code == 1 or is_usage_error else None  # others only printed it
        return WorkerExit(
            rank=self.rank, code=code, failure=self.reported_failure or uncaught, result=self.result
        )

    @property
    def is_stopped(self) -> bool:
        with suppress(psutil.NoSuchProcess):
            return bool(psutil.Process(self.pid).status() == psutil.STATUS_STOPPED)
        return False

    def send(self, number: int) -> None:
        """Send a signal to the process group, or to the process before it leads one."""
        try:
            os.killpg(self.pid, number)
        except OSError:
            with suppress(OSError):
                os.kill(self.pid, number)


class SupervisorHook(Protocol):
    """A hook that the supervisor calls, for example to inject events."""

    def prepare(self) -> None:
        """Prepare, before any worker starts."""

    def poll(self, workers: WorkerGroup) -> None:
        """React to the workers, after each of their messages and many times a second."""


@dataclass(slots=True, eq=False, kw_only=True)
class WorkerGroup:
    """Forks the store and the workers, and reads their pipes until all have ended."""

    size: int
    place: Place
    returns: bool  # each worker must send a result
    keep_going: bool = False  # after a failure
    spare: Collection[int] = ()  # ranks that the others don't need
    survives: bool = False  # a killed worker is no failure: the others decide whether to continue
    restarts: int = 0  # of each killed worker
    on_message: OnMessage
    on_line: OnLine
    director: SupervisorHook | None = None
    running: dict[int, _Worker] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)  # the last one that each rank reported
    ends: list[WorkerExit] = field(default_factory=list)
    failures: list[WorkerExit] = field(default_factory=list)
    killed: list[int] = field(default_factory=list)  # by the director
    signals: list[int] = field(default_factory=list)
    callback_error: BaseException | None = None
    _reported: list[WorkerExit] = field(default_factory=list)  # failures passed to `on_line`
    _lines: set[str] = field(default_factory=set)  # final lines of workers passed to it
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
        """True if there is no need to wait for the remaining workers."""
        return self.is_cancelled() or (self.has_failed() and not self.keep_going)

    def has_failed(self) -> bool:
        return any(not self._is_spare(exit_) for exit_ in self.failures)

    def is_lost(self) -> bool:
        """True if some workers failed and none has ended successfully."""
        return bool(self.failures) and all(exit_.code != 0 for exit_ in self.ends)

    def _is_spare(self, exit_: WorkerExit) -> bool:
        return exit_.rank in self.spare or (self.survives and exit_.code < 0)

    def host_store(self) -> int:
        """Start the store, before any worker; its port."""
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
        self.steps.pop(rank, None)  # of its previous process
        pipes: list[tuple[int, int]] = []
        try:
            for _ in range(3):
                pipes.append(os.pipe())
            reads, writes = zip(*pipes, strict=True)
            restarts = sum(exit_.rank == rank for exit_ in self.ends)
            guard, to_close = self._guard[1], (*reads, *self._descriptors())
            pid = fork(lambda: be_worker(job, rank, restarts, writes, guard, to_close))
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
        stdout, stderr = (partial(self._on_output, worker, name) for name in ("stdout", "stderr"))
        worker.pipes = [
            LinePipe(reads[0], stdout, MAX_OUTPUT_LINE_BYTES),
            LinePipe(reads[1], stderr, MAX_OUTPUT_LINE_BYTES),
            LinePipe(reads[2], partial(self._receive, worker), sys.maxsize),
        ]
        for pipe in worker.pipes:
            self._selector.register(pipe.descriptor, selectors.EVENT_READ, pipe)

    def kill(self, rank: int) -> None:
        """Kill this worker, which is no failure."""
        worker = self.running.get(rank)
        if worker is not None:
            worker.expected = True
            worker.send(signal.SIGKILL)
            self.killed.append(rank)

    def restart(self, rank: int) -> None:
        """Start this worker again, after killing it if it runs."""
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
        """Kill the store's process, which is replaced."""
        if self._store is not None:
            self._store_began = 0.0  # its early end is no reason against another
            os.kill(self._store, signal.SIGKILL)

    def _descriptors(self) -> Iterator[int]:
        for worker in self.running.values():
            yield from (pipe.descriptor for pipe in worker.pipes)

    def watch(self, deadline: float, enough: Callable[[], bool]) -> None:
        """Read the workers' pipes until all have ended, or `enough`, or the deadline."""
        while self.running and not enough():
            left = min(WORKER_EXIT_POLL_SECONDS, deadline - monotonic())
            if left <= 0:
                return
            for key, _ in self._selector.select(left):
                pipe: LinePipe = key.data
                pipe.read()
                if pipe.ended:
                    self._selector.unregister(pipe.descriptor)
            self._reap()
            self._kill_stopped()
            if self.director is not None and not self._ending:
                self._notify(self.director.poll, self)

    def interrupt(self, grace: float) -> None:
        """Interrupt all workers after Ctrl-C, and wait until they end or for a second Ctrl-C."""
        self._ending = True
        self._send(signal.SIGINT)
        already = len(self.signals)
        self.watch(monotonic() + grace, lambda: len(self.signals) > already)

    def end(self, grace: float) -> None:
        """End all workers, the store and the guard."""
        self._ending = True
        try:
            self._send(signal.SIGTERM)
            self._send(signal.SIGCONT)  # a stopped process handles no SIGTERM
            self.watch(monotonic() + min(grace, TERM_GRACE_SECONDS), lambda: False)
        finally:
            self._send(signal.SIGKILL)
            self.watch(inf, lambda: False)
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
        # A killed worker ended before those that noticed it, though both are reaped at once.
        for code, worker in sorted(ended, key=lambda pair: pair[0] >= 0):
            self._finish(worker, code)
        if self._store is not None and os.waitpid(self._store, os.WNOHANG)[0]:
            self._replace_store(self._store)

    def _replace_store(self, dead: int) -> None:
        """Start another store at the same address, unless the previous one died at once."""
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
                self.place, self._guard[1], port=self._port, to_close=others
            )
        except ThalwegError as error:
            self.callback_error = error

    def _kill_stopped(self) -> None:
        """Kill workers that stay stopped (SIGSTOP) after all others have ended successfully: they
        have no rank to continue with, and may never resume."""
        over = self.survives and any(exit_.code == 0 for exit_ in self.ends)
        if not over or not all(worker.is_stopped for worker in self.running.values()):
            self._stopped_since = None
            return
        self._stopped_since = self._stopped_since or monotonic()
        if monotonic() - self._stopped_since > STOPPED_WORKER_GRACE_SECONDS:
            for worker in self.running.values():
                line = f"rank {worker.rank} was stopped when the others ended, and is killed"
                self._notify(self.on_line, worker.rank, "stderr", line)
                worker.expected = True
                worker.send(signal.SIGKILL)
            self._stopped_since = None

    def _finish(self, worker: _Worker, code: int) -> None:
        """Read the rest of an ended worker's output, close its pipes, and record its exit."""
        assert self._guard is not None
        del self.running[worker.rank]
        with suppress(BrokenPipeError):
            os.write(self._guard[1], b"-%d\n" % worker.pid)
        for pipe in worker.pipes:
            if not pipe.ended:
                self._selector.unregister(pipe.descriptor)
                chunks = MAX_PIPE_BYTES // PIPE_CHUNK_BYTES  # a child process may write for ever
                while chunks and pipe.read():
                    chunks -= 1
                pipe.flush()
            os.close(pipe.descriptor)
        exit_ = worker.end(code)
        self.ends.append(exit_)
        if code != 0:
            with suppress(OSError):  # its child processes, if any
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

    def report_failures_except(self, reported: str) -> None:
        """Pass every other cause of failure to `on_line`, each once."""
        problems = {}
        for exit_ in reversed(self.failures):
            if exit_.failure and not exit_.is_consequence() and exit_ not in self._reported:
                problems[exit_.failure.problem] = exit_
        for problem, exit_ in problems.items():
            if problem not in reported:
                line = str(exit_.as_error(self.place.label(exit_.rank)))
                self._notify(self.on_line, exit_.rank, "stderr", line)

    def _note_failure(self, exit_: WorkerExit) -> None:
        problem = exit_.as_error(self.place.label(exit_.rank)).problem
        exits = sum(other.rank == exit_.rank for other in self.ends)
        if exit_.code < 0 and exits <= self.restarts:
            self._notify(self.on_line, exit_.rank, "stderr", f"{problem}; it is restarted")
            self._start(exit_.rank)
            return
        self.failures.append(exit_)
        alone = not exit_.is_consequence() and not exit_.is_mistake()  # others fail like that too
        if self._is_spare(exit_) and alone and not self.done():
            is_over = not self.running and self.is_lost()
            line = problem if is_over else f"{problem}; the others continue"
            self._notify(self.on_line, exit_.rank, "stderr", line)
            self._reported.append(exit_)

    def _on_output(self, worker: _Worker, stream: str, line: bytes) -> None:
        # Of a line that redraws itself, such as a progress bar, only the last state is printed.
        text = line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
        if stream == "stderr" and worker.stderr_failure.read_line(text):
            return  # the supervisor raises it at the end, once for all workers
        self._notify(self.on_line, worker.rank, stream, text)

    def _receive(self, worker: _Worker, line: bytes) -> None:
        try:
            (kind, content), *_ = json.loads(line).items()
        except ValueError:  # truncated by the worker's end
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
        """Call the caller's function; its error is raised after the workers have ended."""
        if self.callback_error is None:
            try:
                callback(*arguments)
            except BaseException as error:
                self.callback_error = error


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def allow_descriptors(number: int) -> None:
    """Raise the limit of open files to allow `number` more, as far as the system permits."""
    number += BASE_DESCRIPTOR_COUNT
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < number:
        most = number if hard == resource.RLIM_INFINITY else min(number, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
