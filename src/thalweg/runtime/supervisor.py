"""Workers on this machine, under one small supervisor that hosts their store.

The supervisor forks the workers, then opens the store that they meet at: no worker inherits its
threads. It reads their output and messages until all have ended. If one fails, the others get
`grace` seconds to end by themselves, since they may know a better reason; then they are ended.
However the supervisor leaves, by return, error, Ctrl-C or SIGKILL, no worker stays behind.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from time import monotonic
from typing import TYPE_CHECKING, Any

from thalweg.errors import DEBUG_VARIABLE, LaunchError, UsageError, WorkerFailed
from thalweg.runtime.forked import (
    PIPE_NBYTES,
    Failure,
    Job,
    LinePipe,
    Post,
    Report,
    Work,
    be_worker,
    fork,
    fork_guard,
    program,
)
from thalweg.runtime.last_words import LastWords
from thalweg.runtime.launch import LAUNCHER_VARIABLE
from thalweg.runtime.verdict import End, verdict

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["Report", "Work", "print_prefixed", "run_command", "run_workers"]

OnMessage = Callable[[int, dict[str, Any]], None]
"""Called with the rank and what it reported."""
OnLine = Callable[[int, str, str], None]
"""Called with the rank, "stdout" or "stderr", and a line of it."""
TICK = 0.05  # seconds between two looks at who has ended
TERM_GRACE = 2.0  # seconds from SIGTERM to SIGKILL, at most
LONGEST_LINE = 1 << 20  # bytes; what is longer is told in pieces
LONGEST_PIPE = 1 << 20  # bytes that a pipe can hold


def print_prefixed(rank: int, stream: str, line: str) -> None:
    print(f"[{rank}] {line}", file=sys.stderr if stream == "stderr" else sys.stdout, flush=True)


def ignore(rank: int, message: dict[str, Any]) -> None:
    pass


def run_workers(
    size: int,
    work: Work,
    *,
    timeout: float | None,
    on_message: OnMessage = ignore,
    on_line: OnLine = print_prefixed,
    enter: Callable[[int], None] | None = None,
    address: str = "127.0.0.1",
    grace: float = 5.0,
    debug: bool | None = None,
) -> list[dict[str, Any]]:
    """Run `work(rank, report)` in `size` forks of this process; every worker's result, by rank.

    `enter(rank)` runs first in each. The store listens at `address`, on a free port. Times are
    in seconds.
    """
    import torch._dynamo  # once, for all forks; optimizers load it

    def limited(rank: int, report: Report) -> Any:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"].partition(",")[0]))
        return work(rank, report)

    crew = _Crew(size=size, returns=True, on_message=on_message, on_line=on_line)
    wanted = DEBUG_VARIABLE in os.environ if debug is None else debug
    _supervise(crew, limited, enter, address, grace, timeout, wanted)
    return [end.result or {} for end in sorted(crew.ends, key=lambda end: end.rank)]


def run_command(
    size: int,
    command: Sequence[str],
    *,
    on_line: OnLine = print_prefixed,
    address: str = "127.0.0.1",
    grace: float = 5.0,
    timeout: float | None = None,
) -> None:
    """Run a program as `size` workers, until all have ended."""
    if not command or shutil.which(command[0]) is None:
        missing = f"there is no program {command[0]!r}" if command else "no program is named"
        raise UsageError(missing, "name a program or a .py file")
    crew = _Crew(size=size, returns=False, on_message=ignore, on_line=on_line)
    _supervise(crew, program(command), None, address, grace, timeout, debug=False)


def _supervise(
    crew: _Crew,
    work: Work,
    enter: Callable[[int], None] | None,
    address: str,
    grace: float,
    timeout: float | None,
    debug: bool,
) -> None:
    """Start all, wait for all, and raise what went wrong."""
    deadline = None if timeout is None else monotonic() + timeout
    with _listener(address) as listener, crew.keeping_signals():
        try:
            environment = _environment(crew.size, address, listener.getsockname()[1])
            job = Job(work=work, enter=enter, environment=environment, debug=debug)
            for rank in range(crew.size):
                crew.start(rank, job, listener.fileno())
            store = _store(listener, address)
            crew.watch(deadline, lambda: crew.called_off() or bool(crew.failures))
            overdue = [] if crew.called_off() or crew.failures else sorted(crew.living)
            if crew.failures:
                crew.watch(_earlier(deadline, monotonic() + grace), crew.called_off)
            if signal.SIGINT in crew.signals:
                crew.interrupt(grace)
        finally:
            crew.end(grace)
        del store
    if crew.broken is not None:
        raise crew.broken
    if crew.signals:
        raise KeyboardInterrupt
    if crew.failures:
        raise verdict(crew.size, crew.failures) from None
    if overdue:
        raise WorkerFailed(
            f"ranks {overdue} weren't done after {timeout:g} s",
            "allow more time, or look at what they wait for",
        )


def _environment(size: int, address: str, port: int) -> dict[str, str]:
    return {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        LAUNCHER_VARIABLE: "thalweg",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or "1",
        "PYTHONUNBUFFERED": "1",  # a pipe isn't a terminal, but somebody is watching
    }


def _listener(address: str) -> socket.socket:
    """Bound before the fork, so that workers know the port; opened as a store after it."""
    try:
        family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((address, 0), family=family, backlog=512)
    except OSError as error:
        raise LaunchError(
            f"the supervisor can't listen at {address}: {error.strerror}",
            "name an address of this machine",
        ) from None


def _store(listener: socket.socket, address: str) -> Store:
    from torch._C._distributed_c10d import TCPStore

    port = listener.getsockname()[1]
    return TCPStore(
        address,
        port,
        is_master=True,
        timeout=timedelta(seconds=60),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _earlier(deadline: float | None, other: float) -> float:
    return other if deadline is None else min(deadline, other)


class _Worker:
    """What the supervisor holds of a living one."""

    def __init__(self, rank: int, pid: int) -> None:
        self.rank = rank
        self.pid = pid
        self.pipes: list[LinePipe] = []
        self.result: dict[str, Any] | None = None
        self.said: Failure | None = None
        self.last_words = LastWords()

    def end(self, code: int) -> End:
        uncaught = self.last_words.failure if code == 1 else None  # others were only shown
        return End(rank=self.rank, code=code, failure=self.said or uncaught, result=self.result)

    def send(self, number: int) -> None:
        """To its whole group, which is there once it leads a session."""
        try:
            os.killpg(self.pid, number)
        except OSError:
            with suppress(OSError):
                os.kill(self.pid, number)


@dataclass(slots=True, eq=False, kw_only=True)
class _Crew:
    """The workers of a run: started, listened to, and ended together."""

    size: int
    returns: bool  # whether each must send a result
    on_message: OnMessage
    on_line: OnLine
    living: dict[int, _Worker] = field(default_factory=dict)
    ends: list[End] = field(default_factory=list)
    failures: list[End] = field(default_factory=list)
    signals: list[int] = field(default_factory=list)
    broken: BaseException | None = None
    _ending: bool = False
    _guard: tuple[int, int] | None = None
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def called_off(self) -> bool:
        return bool(self.signals) or self.broken is not None

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

    def start(self, rank: int, job: Job, listener: int) -> None:
        try:
            if self._guard is None:
                self._guard = fork_guard()
            reads, writes = zip(*(os.pipe() for _ in range(3)), strict=True)
            post = Post(
                rank=rank,
                stdout=writes[0],
                stderr=writes[1],
                messages=writes[2],
                guard=self._guard[1],
                not_mine=(listener, *reads, *self._descriptors()),
            )
            pid = fork(lambda: be_worker(post, job))
        except OSError as error:
            raise WorkerFailed(
                f"rank {rank} can't be started: {error.strerror}",
                "start fewer workers, or raise the limits of processes and open files (ulimit)",
            ) from None
        for descriptor in writes:
            os.close(descriptor)
        worker = self.living[rank] = _Worker(rank, pid)
        worker.pipes = [
            LinePipe(reads[0], lambda line: self._hear(worker, "stdout", line), LONGEST_LINE),
            LinePipe(reads[1], lambda line: self._hear(worker, "stderr", line), LONGEST_LINE),
            LinePipe(reads[2], lambda line: self._receive(worker, line), sys.maxsize),
        ]
        for pipe in worker.pipes:
            self._selector.register(pipe.descriptor, selectors.EVENT_READ, pipe)

    def _descriptors(self) -> Iterator[int]:
        for worker in self.living.values():
            yield from (pipe.descriptor for pipe in worker.pipes)

    def watch(self, deadline: float | None, enough: Callable[[], bool]) -> None:
        """Listen to the workers until all have ended, or it is enough, or too late."""
        while self.living and not enough():
            left = TICK if deadline is None else min(TICK, deadline - monotonic())
            if left <= 0:
                return
            for key, _ in self._selector.select(left):
                pipe: LinePipe = key.data
                pipe.read()
                if pipe.ended:
                    self._selector.unregister(pipe.descriptor)
            self._reap()

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
            self.watch(monotonic() + min(grace, TERM_GRACE), lambda: False)
        finally:
            self._send(signal.SIGKILL)
            self.watch(None, lambda: False)
            self._selector.close()
            if self._guard is not None:
                pid, descriptor = self._guard
                os.close(descriptor)
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    def _send(self, number: int) -> None:
        for worker in self.living.values():
            worker.send(number)

    def _reap(self) -> None:
        ended = []
        for worker in self.living.values():
            pid, status = os.waitpid(worker.pid, os.WNOHANG)
            if pid:
                ended.append((os.waitstatus_to_exitcode(status), worker))
        # Who was killed ended before those who noticed it, and got here in the same tick.
        for code, worker in sorted(ended, key=lambda pair: pair[0] >= 0):
            self._let_go(worker, code)

    def _let_go(self, worker: _Worker, code: int) -> None:
        """Take the last words of one that has ended, and close its pipes."""
        assert self._guard is not None
        del self.living[worker.rank]
        with suppress(BrokenPipeError):
            os.write(self._guard[1], b"-%d\n" % worker.pid)
        for pipe in worker.pipes:
            if not pipe.ended:
                self._selector.unregister(pipe.descriptor)
                for _ in range(LONGEST_PIPE // PIPE_NBYTES):  # a child of its may write for ever
                    if not pipe.read():
                        break
                pipe.flush()
            os.close(pipe.descriptor)
        end = worker.end(code)
        self.ends.append(end)
        if code != 0:
            with suppress(OSError):  # its own children, if it had any
                os.killpg(worker.pid, signal.SIGKILL)
        if not self._ending and (code != 0 or (self.returns and end.result is None)):
            self.failures.append(end)

    def _hear(self, worker: _Worker, stream: str, line: bytes) -> None:
        # Of a line that redraws itself, a progress bar's, the last state is told.
        text = line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
        if stream == "stderr":
            worker.last_words.hear(text)
        self._tell(self.on_line, worker.rank, stream, text)

    def _receive(self, worker: _Worker, line: bytes) -> None:
        try:
            (kind, content), *_ = json.loads(line).items()
        except ValueError:  # cut off by its end
            return
        if kind == "message":
            self._tell(self.on_message, worker.rank, content)
        elif kind == "result":
            worker.result = content
        else:
            worker.said = Failure(**content)

    def _tell(self, callback: Callable[..., None], *arguments: Any) -> None:
        """A caller's error ends the run, but not before the workers have ended."""
        if self.broken is None:
            try:
                callback(*arguments)
            except BaseException as error:
                self.broken = error
