"""The worker processes of a run, which are started, watched and ended together.

What follows from the end of a worker, by the first row that applies:

    how the worker ended                           what follows
    all workers are being ended                    its exit is recorded
    killed by `restart`                            its rank is started again
    killed by `kill`, or while stopped at the end  nothing: the end was expected
    with exit code 0, and a result if `returns`    nothing
    by a signal, at most `max_restarts` times      a line is printed, and its rank is started again
    in another way, or by a signal once more       a failure

    whose failure it is                            what follows
    a rank of `spare`, or with `survives` any      the others continue, and a line says so; the run
    rank, if a signal killed it                    fails if no worker ends successfully
    any other rank                                 the run fails: at once, or with `keep_going` when
                                                   all workers have ended
"""

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
from thalweg.launch.store import fork_store
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
STOPPED_WORKER_GRACE_SECONDS = 10.0  # for stopped workers after all others have ended
BASE_DESCRIPTOR_COUNT = 64  # open files of a process without workers


@dataclass(slots=True, eq=False)
class _Worker:
    """A running worker process, as the supervisor tracks it."""

    rank: int
    pid: int
    pipes: list[LinePipe] = field(default_factory=list)
    result: dict[str, Any] | None = None
    reported_failure: Failure | None = None
    stderr_failure: StderrFailure = field(default_factory=StderrFailure)
    end_is_expected: bool = False  # its end is no failure
    starts_again: bool = False  # after its end

    def exit(self, code: int) -> WorkerExit:
        """The exit of this worker, which ended with this code. An error that it printed is its
        failure only if the code says so: otherwise the program went on after the error."""
        printed = self.stderr_failure
        is_usage_error = code == UsageError.exit_code and printed.line
        uncaught = printed.failure if code == 1 or is_usage_error else None
        return WorkerExit(
            rank=self.rank, code=code, failure=self.reported_failure or uncaught, result=self.result
        )

    def send(self, number: int) -> None:
        """Send a signal to the worker's process group; to the process alone before it leads one."""
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
    """The store and the workers of a run, as the supervisor starts, watches and ends them. The hook
    `director` may kill, restart and pause workers meanwhile."""

    size: int
    place: Place
    returns: bool  # each worker must send a result
    keep_going: bool = False  # the other workers go on after a failure
    spare: Collection[int] = ()  # ranks that the others don't need
    survives: bool = False  # the others decide whether to continue after a worker was killed
    max_restarts: int = 0  # of each rank, after a signal killed its worker
    on_message: OnMessage
    on_line: OnLine
    director: SupervisorHook | None = None
    running: dict[int, _Worker] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)  # the last step that each rank reported
    exits: list[WorkerExit] = field(default_factory=list)
    failures: list[WorkerExit] = field(default_factory=list)
    killed: list[int] = field(default_factory=list)  # ranks, by the director
    signals: list[int] = field(default_factory=list)  # that the supervisor received
    error: BaseException | None = None  # of a callback, or of a store that can't be replaced
    _printed_exits: list[WorkerExit] = field(default_factory=list)  # failures passed to `on_line`
    _printed_lines: set[str] = field(default_factory=set)  # Thalweg's lines passed to `on_line`
    _ending: bool = False  # all workers are being ended
    _job: WorkerSpec | None = None
    # The process that kills all others if the supervisor dies, and the pipe that it reads: process
    # ids of what has started, and negative ones of what has ended.
    _guard: tuple[int, int] = field(default_factory=fork_guard)
    _store: int | None = None  # process id
    _port: int = 0  # of the store
    _store_began: float = 0.0
    _last_needed: float = 0.0  # when a worker last ran, or none had ended successfully
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def is_cancelled(self) -> bool:
        return bool(self.signals) or self.error is not None

    def done(self) -> bool:
        """True if there is no need to wait for the remaining workers."""
        return self.is_cancelled() or (self.has_failed() and not self.keep_going)

    def has_failed(self) -> bool:
        """True if a worker failed without which the others can't continue."""
        return any(not self._is_spare(exit_) for exit_ in self.failures)

    def is_lost(self) -> bool:
        """True if some workers failed and none has ended successfully."""
        return bool(self.failures) and all(exit_.code != 0 for exit_ in self.exits)

    def _is_spare(self, exit_: WorkerExit) -> bool:
        return exit_.rank in self.spare or (self.survives and exit_.code < 0)

    def host_store(self) -> int:
        """Start the store, before any worker, or another one at its address; returns its port."""
        allow_descriptors(3 * self.size)
        self._store_began = monotonic()
        self._store, self._port = fork_store(
            self.place, self._guard[1], port=self._port, to_close=tuple(self._descriptors())
        )
        return self._port

    def start(self, job: WorkerSpec) -> None:
        self._job = job
        if self.director is not None:
            self.director.prepare()
        for rank in range(self.size):
            self._start(rank)

    def _start(self, rank: int) -> None:
        assert self._job is not None
        job = self._job
        self.steps.pop(rank, None)  # of its previous process
        pipes: list[tuple[int, int]] = []
        try:
            for _ in range(3):
                pipes.append(os.pipe())
            reads, writes = zip(*pipes, strict=True)
            restart_count = sum(exit_.rank == rank for exit_ in self.exits)
            guard, to_close = self._guard[1], (*reads, *self._descriptors())
            pid = fork(lambda: be_worker(job, rank, restart_count, writes, guard, to_close))
        except OSError as error:
            for descriptor in (descriptor for pipe in pipes for descriptor in pipe):
                os.close(descriptor)
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
        """Kill this worker; its end is no failure."""
        worker = self.running.get(rank)
        if worker is not None:
            worker.end_is_expected = True
            worker.send(signal.SIGKILL)
            self.killed.append(rank)

    def restart(self, rank: int) -> None:
        """Start this worker again, after killing it if it runs."""
        if rank in self.running:
            self.running[rank].starts_again = True
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
        """Kill the store's process; another one replaces it."""
        if self._store is not None:
            self._store_began = 0.0  # so that this end doesn't count as that of a failed start
            os.kill(self._store, signal.SIGKILL)

    def _descriptors(self) -> Iterator[int]:
        for worker in self.running.values():
            yield from (pipe.descriptor for pipe in worker.pipes)

    def watch(self, deadline: float, enough: Callable[[], bool]) -> None:
        """Read the workers' pipes, act on the end of workers and of the store, and call the
        director, until all workers have ended, or `enough`, or the deadline."""
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
        signal_count = len(self.signals)
        self.watch(monotonic() + grace, lambda: len(self.signals) > signal_count)

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
            os.close(self._guard[1])
            _kill(self._guard[0])

    def _send(self, number: int) -> None:
        for worker in self.running.values():
            worker.send(number)

    def _reap(self) -> None:
        """Collect the exit codes of ended workers, and replace the store if it has ended."""
        ended = []
        for worker in self.running.values():
            pid, status = os.waitpid(worker.pid, os.WNOHANG)
            if pid:
                ended.append((os.waitstatus_to_exitcode(status), worker))
        # Killed workers come first: the others that ended since may have failed because of them.
        for code, worker in sorted(ended, key=lambda pair: pair[0] >= 0):
            self._finish(worker, code)
        if self._store is not None and os.waitpid(self._store, os.WNOHANG)[0]:
            self._replace_store(self._store)

    def _replace_store(self, dead: int) -> None:
        """Start another store at the same address, unless the previous one died at once."""
        self._store = None
        with suppress(BrokenPipeError):
            os.write(self._guard[1], b"-%d\n" % dead)
        if self._ending:
            return
        try:
            if monotonic() - self._store_began < MIN_STORE_LIFE_SECONDS:
                raise RunError("the process that hosts the store died", "start again")
            self.host_store()
        except ThalwegError as error:
            self.error = error

    def _kill_stopped(self) -> None:
        """Kill workers that stay stopped (SIGSTOP) after all others have ended successfully: they
        have no rank to continue with, and may never resume."""
        is_finished = self.survives and any(exit_.code == 0 for exit_ in self.exits)
        if not is_finished or not all(
            psutil.Process(worker.pid).status() == psutil.STATUS_STOPPED
            for worker in self.running.values()
        ):
            self._last_needed = monotonic()
        elif monotonic() - self._last_needed > STOPPED_WORKER_GRACE_SECONDS:
            self._last_needed = monotonic()
            for worker in self.running.values():
                line = f"rank {worker.rank} was stopped when the others ended, and is killed"
                self._notify(self.on_line, worker.rank, "stderr", line)
                worker.end_is_expected = True
                worker.send(signal.SIGKILL)

    def _finish(self, worker: _Worker, code: int) -> None:
        """Read the rest of an ended worker's output, close its pipes, record its exit, and do what
        follows from it (see the module's table)."""
        del self.running[worker.rank]
        with suppress(BrokenPipeError):
            os.write(self._guard[1], b"-%d\n" % worker.pid)
        for pipe in worker.pipes:
            if not pipe.ended:
                self._selector.unregister(pipe.descriptor)
                chunks = MAX_PIPE_BYTES // PIPE_CHUNK_BYTES  # a child process may keep writing
                while chunks and pipe.read():
                    chunks -= 1
                pipe.flush()
            os.close(pipe.descriptor)
        exit_ = worker.exit(code)
        self.exits.append(exit_)
        if code != 0:
            with suppress(OSError):  # its child processes, if any
                os.killpg(worker.pid, signal.SIGKILL)
        # `_on_output` didn't print this line, as the supervisor raises failures as errors. But it
        # raises none of workers that it ends itself, or whose program went on after the error.
        line, isnt_raised = worker.stderr_failure.line, self._ending or exit_.failure is None
        if line and isnt_raised and line not in self._printed_lines:
            self._printed_lines.add(line)
            self._notify(self.on_line, worker.rank, "stderr", line)
        if self._ending:
            return
        if worker.starts_again:
            self._start(worker.rank)
        elif not worker.end_is_expected and (code != 0 or (self.returns and exit_.result is None)):
            self._note_failure(exit_)

    def print_failures_except(self, root_cause: str) -> None:
        """Pass each problem that caused a failure to `on_line` once, without the printed ones and
        without the problem that this text of the root cause contains."""
        problems = {}
        for exit_ in reversed(self.failures):
            if exit_.failure and not exit_.is_consequence() and exit_ not in self._printed_exits:
                problems[exit_.failure.problem] = exit_
        for problem, exit_ in problems.items():
            if problem not in root_cause:
                line = str(exit_.as_error(self.place.label(exit_.rank)))
                self._notify(self.on_line, exit_.rank, "stderr", line)

    def _note_failure(self, exit_: WorkerExit) -> None:
        """Start the rank again if it may be restarted; otherwise record the failure, and print it
        if the others continue."""
        problem = exit_.as_error(self.place.label(exit_.rank)).problem
        exit_count = sum(other.rank == exit_.rank for other in self.exits)
        if exit_.code < 0 and exit_count <= self.max_restarts:
            self._notify(self.on_line, exit_.rank, "stderr", f"{problem}; it is restarted")
            self._start(exit_.rank)
            return
        self.failures.append(exit_)
        # Other ranks fail with a usage error too, or are the cause of a consequence.
        is_of_this_rank = not exit_.is_usage_error() and not exit_.is_consequence()
        if self._is_spare(exit_) and is_of_this_rank and not self.done():
            is_over = not self.running and self.is_lost()
            line = problem if is_over else f"{problem}; the others continue"
            self._notify(self.on_line, exit_.rank, "stderr", line)
            self._printed_exits.append(exit_)

    def _on_output(self, worker: _Worker, stream: str, line: bytes) -> None:
        # Of a line that redraws itself, such as a progress bar, only the last state is printed.
        text = line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
        if stream == "stderr" and worker.stderr_failure.read_line(text):
            return  # `_finish` prints this line, or the supervisor raises it
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
        """Call a function of the caller; the supervisor raises its error after all workers have
        ended."""
        if self.error is None:
            try:
                callback(*arguments)
            except BaseException as error:
                self.error = error


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def allow_descriptors(number: int) -> None:
    """Raise the limit of open files to allow `number` more, as far as the system permits."""
    number += BASE_DESCRIPTOR_COUNT
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < number:
        allowed = number if hard == resource.RLIM_INFINITY else min(number, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
