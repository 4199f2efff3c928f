"""The code of the processes that the supervisor forks: its workers, and the guard.

A worker leads its own session, so that Ctrl-C reaches the supervisor alone, writes its output and
messages into pipes, and leaves by `_exit`: it never returns into the supervisor's stack.

The guard outlives a supervisor that is killed. Workers write their process id into its pipe before
anything else; the supervisor removes those that ended. When the pipe closes, the supervisor is
dead, and the guard kills the remaining process groups.

Fork while no other Python thread of this process runs; threads of numpy and torch may.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from threading import Lock, current_thread, main_thread
from typing import Any, NoReturn

from thalweg.errors import INTERRUPTED_EXIT_CODE, ThalwegError, UsageError
from thalweg.launch.place import Place

HELD_SIGNALS = (signal.SIGINT, signal.SIGTERM)
PIPE_CHUNK_BYTES = 1 << 16
RESTARTS_VARIABLE = "THALWEG_RESTARTS"  # number of restarts of this worker
MAX_PROBLEM_CHARACTERS = 400


SendMessage = Callable[[Mapping[str, Any]], None]
"""A function that sends one JSON object from a worker to the supervisor."""
Work = Callable[[int, SendMessage], Mapping[str, Any] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """The work and environment of every worker."""

    entry_point: Work
    place: Place
    environment: Mapping[str, str] = field(repr=False)  # the job secret is in it
    debug: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The error of a worker, as it reports it."""

    kind: str
    problem: str
    remedy: str
    exit_code: int


@contextmanager
def signals_noted(noted: list[int]) -> Iterator[None]:
    """Append Ctrl-C and SIGTERM to this list inside the context instead of raising them."""
    previous: dict[int, Any] = {}
    try:
        if current_thread() is main_thread():
            for number in HELD_SIGNALS:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    previous[number] = signal.signal(number, lambda came, _: noted.append(came))
        yield
    finally:
        for ours, handler in previous.items():
            signal.signal(ours, handler)


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM until the end of this context. The mask blocks them in this thread
    and its forks; a library's thread may still receive one, which is raised again at the end."""
    noted: list[int] = []
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, HELD_SIGNALS)
    try:
        with signals_noted(noted):
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for came in noted:
            signal.raise_signal(came)


def fork(child: Callable[[], NoReturn]) -> int:
    """Fork, with signals blocked until the child is ready for them; its process id."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()  # otherwise both processes write it
    with signals_blocked():
        with warnings.catch_warnings():  # Python 3.12 and later warn of BLAS's threads too
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            child()
    return pid


def fork_guard() -> tuple[int, int]:
    """Start the guard; its process id, and the pipe to register processes in."""
    reads, writes = os.pipe()
    pid = fork(lambda: _be_guard(reads, writes))
    os.close(reads)
    return pid, writes


def be_worker(
    job: WorkerSpec,
    rank: int,
    restarts: int,
    pipes: Sequence[int],
    guard: int,
    to_close: Iterable[int],
) -> NoReturn:
    """Do the work of this rank in a fork, after `restarts` earlier processes of the rank. `pipes`
    are its ends for stdout, stderr and messages, `to_close` the supervisor's descriptors."""
    code = 1
    gc.freeze()  # otherwise the first full collection copies all memory shared with the parent
    atexit._clear()  # the parent's functions
    try:
        os.setsid()
        os.write(guard, b"%d\n" % os.getpid())
        for descriptor in (guard, *to_close):
            os.close(descriptor)
        stdout, stderr, messages = pipes
        _redirect(stdout, stderr)
        os.environ.update(job.environment, RANK=str(rank))
        os.environ.update(job.place.environment(rank))
        os.environ[RESTARTS_VARIABLE] = str(restarts)
        code = _outcome(rank, job, partial(_send, messages, Lock()))
        if code == 0:
            atexit._run_exitfuncs()  # as at the end of a script: they close the run
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _be_guard(registrations: int, supervisors_end: int) -> NoReturn:
    """Wait until the supervisor is dead, and kill the process groups that it left."""
    try:
        os.close(supervisors_end)
        os.setsid()
        for ignored in (*HELD_SIGNALS, signal.SIGHUP):
            signal.signal(ignored, signal.SIG_IGN)
        groups: set[int] = set()
        with os.fdopen(registrations, "rb") as lines:
            for line in lines:
                group = int(line)
                groups.add(group) if group > 0 else groups.discard(-group)
        for group in groups:
            with suppress(OSError):
                os.killpg(group, signal.SIGKILL)
    finally:
        os._exit(0)


def program(command: Sequence[str]) -> Work:
    """Work that executes another program."""

    def work(rank: int, report: SendMessage) -> NoReturn:
        for ignored_by_python in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(ignored_by_python, signal.SIG_DFL)
        try:
            os.execvp(command[0], list(command))
        except OSError as error:
            problem = f"can't run {command[0]}: {error.strerror}"
            raise UsageError(problem, "name a program or a .py file") from None

    return work


class LinePipe:
    """The supervisor's end of a worker's pipe, read by lines."""

    def __init__(self, descriptor: int, on_line: Callable[[bytes], None], longest: int) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self.ended = False
        self._on_line = on_line
        self._longest = longest
        self._partial = b""

    def read(self) -> int:
        """Read one chunk without blocking; its number of bytes."""
        try:
            data = os.read(self.descriptor, PIPE_CHUNK_BYTES)
        except BlockingIOError:
            return 0
        self.ended = not data
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            self._on_line(line)
        if self.ended or len(self._partial) > self._longest:
            self.flush()
        return len(data)

    def flush(self) -> None:
        """Pass on the last line, which had no end."""
        if self._partial:
            self._on_line(self._partial)
            self._partial = b""


def _send(descriptor: int, lock: Lock, kind: str, content: Mapping[str, Any]) -> None:
    """Write the JSON line `{kind: content}` to the message pipe; any thread may call this."""
    try:
        left = json.dumps({kind: dict(content)}).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"a worker's {kind} can't be sent as JSON: {error}",
            "send numbers, strings, lists and dicts of them",
        ) from None
    with lock:
        while left:
            left = left[os.write(descriptor, left) :]


def _redirect(stdout: int, stderr: int) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (stdout, 1), (stderr, 2)):
        os.dup2(source, target)
        os.close(source)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", 1, "utf-8", "backslashreplace", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, "utf-8", "backslashreplace", closefd=False)


def _outcome(rank: int, job: WorkerSpec, send: Callable[[str, Mapping[str, Any]], None]) -> int:
    """Do the work and report its result or failure; the exit code."""
    try:
        _reset_signals()
        job.place.enter(rank)
        send("result", job.entry_point(rank, partial(send, "message")) or {})
    except KeyboardInterrupt:
        return INTERRUPTED_EXIT_CODE
    except SystemExit as leave:
        if leave.code is None or leave.code == 0:
            send("result", {})
        elif isinstance(leave.code, int):
            return leave.code
        else:
            print(leave.code, file=sys.stderr)
            return 1
    except BaseException as error:
        if job.debug:
            traceback.print_exc()
        failure = _failure(error, job.debug)
        send("failure", asdict(failure))
        return failure.exit_code
    return 0


def _reset_signals() -> None:
    """Restore the default signal handling, whatever the supervisor has set."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_SIGNALS)


def _failure(error: BaseException, debug: bool) -> Failure:
    kind = type(error).__name__
    if isinstance(error, ThalwegError):
        return Failure(
            kind=kind, problem=error.problem, remedy=error.remedy, exit_code=error.exit_code
        )
    remedy = "its traceback is above" if debug else "run with --debug for its traceback"
    return Failure(kind=kind, problem=_in_one_line(error), remedy=remedy, exit_code=1)


def _in_one_line(error: BaseException) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(":")
    if len(text) > MAX_PROBLEM_CHARACTERS:
        text = f"{text[:MAX_PROBLEM_CHARACTERS]} ..."
    frames = traceback.extract_tb(error.__traceback__)
    return f"{text} ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else text
