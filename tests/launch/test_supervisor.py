"""Real processes and real signals; every wait has a deadline."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
import typer
from typer.testing import CliRunner

from thalweg.cli import train
from thalweg.errors import PeerLost, PlanError, UsageError, WorkerFailed
from thalweg.launch.launcher_variables import read_rank_assignment
from thalweg.launch.place import Place
from thalweg.launch.store import open_store
from thalweg.launch.supervisor import SendMessage, run_command, run_workers
from thalweg.launch.worker_group import WorkerGroup
from thalweg.launch.worker_process import RESTARTS_VARIABLE

TIMEOUT = 30.0
FOREVER = 600.0


def quiet(rank: int, stream: str, line: str) -> None:
    pass


def lives(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


def wait_until(condition: Callable[[], bool], seconds: float = TIMEOUT) -> None:
    deadline = monotonic() + seconds
    while not condition():
        assert monotonic() < deadline
        sleep(0.02)


class Pids:
    """The process ids that workers report."""

    def __init__(self) -> None:
        self.by_rank: dict[int, int] = {}

    def __call__(self, rank: int, message: Mapping[str, Any]) -> None:
        self.by_rank[rank] = message["pid"]

    def none_lives(self) -> bool:
        return bool(self.by_rank) and not any(lives(pid) for pid in self.by_rank.values())


# What goes well


def test_a_worker_runs_its_own_exit_functions_and_not_those_of_the_supervisor() -> None:
    heard: list[tuple[int, str]] = []

    def supervisors() -> None:
        print("the supervisor's")

    def work(rank: int, report: SendMessage) -> None:
        atexit.register(print, "at the end")
        print("first")

    atexit.register(supervisors)
    try:
        run_workers(
            2, work, timeout=TIMEOUT, on_line=lambda rank, _, text: heard.append((rank, text))
        )
    finally:
        atexit.unregister(supervisors)
    for rank in range(2):
        assert [text for of, text in heard if of == rank] == ["first", "at the end"]


def test_results_come_by_rank_and_messages_in_order() -> None:
    heard: dict[int, list[int]] = {0: [], 1: [], 2: []}

    def work(rank: int, report: SendMessage) -> dict[str, Any]:
        sleep(0.1 * (2 - rank))
        for step in range(200):
            report({"step": step, "padding": "x" * 1000})
        return {"square": rank * rank}

    results = run_workers(
        3, work, timeout=TIMEOUT, on_message=lambda rank, m: heard[rank].append(m["step"])
    )
    assert results == [{"square": 0}, {"square": 1}, {"square": 4}]
    assert heard == {rank: list(range(200)) for rank in range(3)}


def test_a_worker_knows_its_seat_and_all_share_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def work(rank: int, report: SendMessage) -> dict[str, Any]:
        assignment = read_rank_assignment(os.environ)
        store = open_store(assignment, timeout=10)
        store.set(f"from {rank}", str(rank))
        heard = [int(store.get(f"from {other}")) for other in range(assignment.size)]
        return {
            "seat": [
                assignment.rank,
                assignment.size,
                assignment.local_rank,
                assignment.hosted,
                assignment.launcher,
            ],
            "heard": heard,
            "threads": [os.environ["OMP_NUM_THREADS"], torch.get_num_threads()],
        }

    for rank, result in enumerate(run_workers(3, work, timeout=TIMEOUT)):
        assert result == {
            "seat": [rank, 3, rank, True, "thalweg"],
            "heard": [0, 1, 2],
            "threads": ["1", 1],
        }


def test_plain_gloo_meets_at_the_hosted_store() -> None:
    def work(rank: int, report: SendMessage) -> dict[str, Any]:
        dist.init_process_group("gloo")
        vector = torch.full((5,), float(rank + 1))
        dist.all_reduce(vector)
        dist.destroy_process_group()
        return {"sum": vector.tolist()}

    assert run_workers(3, work, timeout=TIMEOUT) == [{"sum": [6.0] * 5}] * 3


def test_enter_runs_first_in_the_worker() -> None:
    here = os.getpid()
    entered: list[int | None] = []

    class Watched(Place):
        def enter(self, rank: int | None) -> None:
            entered.append(rank)
            assert os.getpid() != here

    def work(rank: int, report: SendMessage) -> dict[str, Any]:
        return {"entered": entered}

    results = run_workers(2, work, place=Watched(), timeout=TIMEOUT)
    assert results == [{"entered": [0]}, {"entered": [1]}]
    assert entered == []


def test_output_has_prefixes_and_keeps_its_stream(capsys: pytest.CaptureFixture[str]) -> None:
    def work(rank: int, report: SendMessage) -> None:
        print("first")
        os.system("echo from a child")  # the descriptors are the pipes, not only sys.stdout
        print("1/3\r2/3\r3/3")
        print("trouble", file=sys.stderr)
        print(b"\xff".decode(errors="surrogateescape"), "ü")
        print("no end of line", end="")

    assert run_workers(1, work, timeout=TIMEOUT) == [{}]
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        "[0] first",
        "[0] from a child",
        "[0] 3/3",
        "[0] \\udcff ü",
        "[0] no end of line",
    ]
    assert err == "[0] trouble\n"


def test_much_output_neither_blocks_nor_gets_lost() -> None:
    nbytes = {0: 0, 1: 0, 2: 0}

    def count(rank: int, stream: str, line: str) -> None:
        nbytes[rank] += len(line)

    def work(rank: int, report: SendMessage) -> dict[str, Any]:
        for _ in range(50):
            sys.stdout.write("x" * 99_999 + "\n")
            sys.stderr.write("y" * 100)
            sys.stderr.flush()
        sys.stdout.write("z" * 3_000_000)
        return {"long": "r" * 2_000_000}

    results = run_workers(3, work, on_line=count, timeout=TIMEOUT)
    assert nbytes == dict.fromkeys(range(3), 50 * 99_999 + 50 * 100 + 3_000_000)
    assert [len(result["long"]) for result in results] == [2_000_000] * 3


# What goes wrong


def test_an_error_of_ours_is_printed_once_with_its_remedy(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def work(rank: int, report: SendMessage) -> None:
        if rank == 1:
            raise PeerLost("rank 0 is gone", "look at it")

    with pytest.raises(WorkerFailed) as caught:
        run_workers(2, work, timeout=TIMEOUT)
    assert str(caught.value) == "rank 1: rank 0 is gone; look at it"
    assert caught.value.remedy == "look at it"
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("debug", [False, True])
def test_any_other_error_is_one_line(debug: bool, capfd: pytest.CaptureFixture[str]) -> None:
    def work(rank: int, report: SendMessage) -> None:
        if rank == 1:
            raise TypeError("two\nlines")

    with pytest.raises(WorkerFailed, match=r"^rank 1: TypeError: two lines \(test_supervisor.py:"):
        run_workers(2, work, timeout=TIMEOUT, debug=debug)
    out, err = capfd.readouterr()
    assert out == ""
    assert ("[1] TypeError: two" in err) if debug else (err == "")


def test_reasons_of_spare_workers_are_printed_once(tmp_path: Path) -> None:
    said: list[str] = []

    def work(rank: int, report: SendMessage) -> None:
        wait_until(lambda: rank == 0 or (tmp_path / f"{rank - 1}").exists())
        raise ValueError(f"the reason of {rank}")

    with pytest.raises(WorkerFailed, match="the reason of 0"):
        run_workers(
            3,
            work,
            spare=range(3),
            timeout=TIMEOUT,
            debug=False,
            director=Marks(tmp_path),
            on_line=lambda rank, stream, line: said.append(line),
        )
    told = [[line for line in said if f"the reason of {rank}" in line] for rank in range(3)]
    assert [len(lines) for lines in told] == [1, 1, 1], said
    assert [lines[0].endswith("the others continue") for lines in told] == [True, True, False]


class Marks:
    """A director that leaves a file for each of three workers that has ended."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def prepare(self) -> None:
        pass

    def poll(self, workers: WorkerGroup) -> None:
        for rank in {0, 1, 2} - set(workers.running):
            (self._folder / f"{rank}").touch()


def test_what_is_no_json_is_an_error_of_the_worker() -> None:
    with pytest.raises(UsageError, match=r"result can't be sent as JSON: .*set is not JSON"):
        run_workers(1, lambda rank, report: {"x": {1}}, timeout=TIMEOUT)


def test_a_mistake_that_all_made_is_a_mistake_of_usage() -> None:
    def work(rank: int, report: SendMessage) -> None:
        raise PlanError("there is no plan 'x'", "see `thalweg plans`")

    with pytest.raises(UsageError, match=r"^there is no plan 'x'; see `thalweg plans`$"):
        run_workers(3, work, timeout=TIMEOUT)


@pytest.mark.parametrize("code", [0, 3])
def test_leaving_without_a_word(code: int) -> None:
    def work(rank: int, report: SendMessage) -> None:
        if rank == 1:
            os._exit(code)

    how = f"with exit code {code}" if code else "without a result"
    with pytest.raises(WorkerFailed, match=f"rank 1 ended {how}; "):
        run_workers(2, work, timeout=TIMEOUT)


def test_sys_exit_is_as_in_any_program(capfd: pytest.CaptureFixture[str]) -> None:
    def work(rank: int, report: SendMessage) -> None:
        sys.exit("no such file" if rank else None)

    with pytest.raises(WorkerFailed, match="rank 1 ended with exit code 1; "):
        run_workers(2, work, timeout=TIMEOUT)
    assert capfd.readouterr().err == "[1] no such file\n"


def test_the_cause_is_named_not_its_consequence() -> None:
    def work(rank: int, report: SendMessage) -> None:
        if rank == 0:
            raise PeerLost("rank 1 is gone", "look at it")
        if rank == 1:
            sleep(0.3)
            raise ValueError("mine")
        sleep(0.6)
        raise ValueError("later")

    with pytest.raises(WorkerFailed, match=r"^rank 1: ValueError: mine"):
        run_workers(3, work, timeout=TIMEOUT)


def waits_in_init(rank: int) -> None:
    if rank != 2:
        dist.init_process_group("gloo")


def waits_in_all_reduce(rank: int) -> None:
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    if rank != 2:
        dist.all_reduce(torch.ones(1))


def waits_in_sleep(rank: int) -> None:
    if rank != 2:
        sleep(FOREVER)


@pytest.mark.parametrize("wait", [waits_in_init, waits_in_all_reduce, waits_in_sleep])
def test_a_killed_worker_is_the_cause_and_the_others_end(wait: Callable[[int], None]) -> None:
    pids = Pids()
    last_words: list[str] = []

    def work(rank: int, report: SendMessage) -> None:
        report({"pid": os.getpid()})
        wait(rank)
        sleep(0.3)
        print("last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(
        WorkerFailed, match=r"^rank 2 was killed by SIGKILL \(out of memory\?\); unless somebody "
    ):
        run_workers(
            3,
            work,
            timeout=None,
            grace=0.5,
            on_message=pids,
            on_line=lambda rank, stream, line: last_words.append(f"{rank}: {line}"),
        )
    assert pids.none_lives()
    assert "2: last words" in last_words


def test_who_ignores_sigterm_is_killed() -> None:
    pids = Pids()

    def work(rank: int, report: SendMessage) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        report({"pid": os.getpid()})
        if rank == 0:
            raise ValueError("mine")
        sleep(FOREVER)

    with pytest.raises(WorkerFailed, match="rank 0: ValueError: mine"):
        run_workers(2, work, timeout=TIMEOUT, grace=0.3, on_message=pids)
    assert pids.none_lives()


def test_the_deadline_ends_the_run() -> None:
    pids = Pids()

    def work(rank: int, report: SendMessage) -> None:
        report({"pid": os.getpid()})
        if rank != 1:
            sleep(FOREVER)

    with pytest.raises(WorkerFailed, match=r"^ranks 0, 2 didn't finish within 3 s; "):
        run_workers(3, work, timeout=3, on_message=pids)
    assert pids.none_lives()


def test_an_error_in_the_callers_own_function_ends_the_run() -> None:
    pids = Pids()

    def object_to(rank: int, message: Mapping[str, Any]) -> None:
        pids(rank, message)
        raise LookupError("the caller's")

    def work(rank: int, report: SendMessage) -> None:
        report({"pid": os.getpid()})
        sleep(FOREVER)

    with pytest.raises(LookupError, match="the caller's"):
        run_workers(1, work, timeout=TIMEOUT, on_message=object_to)
    assert pids.none_lives()


def test_an_address_that_is_not_ours() -> None:
    class Elsewhere(Place):
        address = "192.0.2.1"

    with pytest.raises(UsageError, match=r"can't listen at 192.0.2.1: .*; name an address"):
        run_workers(1, lambda rank, report: None, timeout=TIMEOUT, place=Elsewhere())


# A director


class Plot:
    """Does `act` to the workers once `when` holds of their steps."""

    def __init__(
        self, *scenes: tuple[Callable[[WorkerGroup], bool], Callable[[WorkerGroup], None]]
    ) -> None:
        self.scenes = list(scenes)
        self.prepared = 0

    def prepare(self) -> None:
        self.prepared += 1

    def poll(self, workers: WorkerGroup) -> None:
        while self.scenes and self.scenes[0][0](workers):
            self.scenes.pop(0)[1](workers)


def counting(steps: int) -> Callable[[int, SendMessage], dict[str, Any]]:
    def work(rank: int, report: SendMessage) -> dict[str, Any]:
        for step in range(1, steps + 1):
            report({"step": step})
            sleep(0.02)
        return {"steps": steps}

    return work


def test_who_is_killed_on_purpose_is_no_failure() -> None:
    plot = Plot((lambda w: w.steps.get(1, 0) >= 3, lambda w: w.kill(1)))
    results = run_workers(3, counting(40), timeout=TIMEOUT, director=plot)
    assert results == [{"steps": 40}, {}, {"steps": 40}]
    assert (plot.prepared, plot.scenes) == (1, [])


def test_a_worker_is_restarted_alive_or_dead() -> None:
    began: list[int] = []
    plot = Plot(
        (lambda w: w.steps.get(0, 0) >= 3, lambda w: w.kill(1)),
        (lambda w: 1 not in w.running, lambda w: w.restart(1)),
        (lambda w: w.steps.get(2, 0) >= 20, lambda w: w.restart(2)),
    )

    def heard(rank: int, message: dict[str, Any]) -> None:
        if message["step"] == 1:
            began.append(rank)

    results = run_workers(3, counting(40), timeout=TIMEOUT, director=plot, on_message=heard)
    assert results == [{"steps": 40}] * 3
    assert sorted(began) == [0, 1, 1, 2, 2]


def test_a_paused_worker_stands_still_until_it_is_resumed() -> None:
    still: list[int] = []

    def since(workers: WorkerGroup) -> bool:
        still.append(workers.steps[1])
        return workers.steps[0] >= 40

    plot = Plot(
        (lambda w: w.steps.get(1, 0) >= 3, lambda w: w.pause(1)),
        (since, lambda w: w.resume(1)),
    )
    results = run_workers(2, counting(60), timeout=TIMEOUT, director=plot)
    assert results == [{"steps": 60}] * 2
    assert still[-1] < 20


def test_a_paused_worker_ends_with_the_others() -> None:
    def work(rank: int, report: SendMessage) -> None:
        report({"step": 1, "pid": os.getpid()})
        sleep(FOREVER if rank else 0.5)
        raise ValueError("enough")

    pids = Pids()
    plot = Plot((lambda w: 1 in w.steps, lambda w: w.pause(1)))
    with pytest.raises(WorkerFailed, match="rank 0: ValueError: enough"):
        run_workers(2, work, timeout=TIMEOUT, director=plot, grace=0.3, on_message=pids)
    assert pids.none_lives()


def test_a_hooks_error_ends_the_run() -> None:
    def fall(workers: WorkerGroup) -> bool:
        raise OSError("the scenery fell")

    with pytest.raises(OSError, match="the scenery fell"):
        run_workers(2, counting(2000), timeout=TIMEOUT, director=Plot((fall, lambda w: None)))


def test_with_keep_going_one_failure_is_reported_when_all_have_ended() -> None:
    heard: list[tuple[int, str, str]] = []
    command = ["sh", "-c", "test $RANK = 0 && exit 3; sleep 1; echo done"]
    with pytest.raises(WorkerFailed, match="rank 0 ended with exit code 3"):
        run_command(
            3,
            command,
            on_line=lambda *line: heard.append(line),
            timeout=TIMEOUT,
            grace=0.1,
            keep_going=True,
        )
    assert sorted(heard) == [(1, "stdout", "done"), (2, "stdout", "done")]


# Signals to the supervisor


def functions() -> None:
    def work(rank: int, report: SendMessage) -> None:
        child = subprocess.Popen(["sleep", "600"])
        print("pids", os.getpid(), child.pid)
        sleep(FOREVER)

    run_workers(2, work, timeout=None, grace=2)


def stubborn(grace: float = 0.5) -> None:
    def work(rank: int, report: SendMessage) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("pids", os.getpid(), os.getpid())
        sleep(FOREVER)

    run_workers(2, work, timeout=None, grace=grace)


def programs() -> None:
    run_command(2, ["sh", "-c", "sleep 600 & echo pids $$ $!; wait"], grace=2)


class Forked:
    """A process of its own that does `work`, as the leader of a session, and its two streams."""

    def __init__(self, work: Callable[[], None]) -> None:
        pipes = [os.pipe(), os.pipe()]

        def begin() -> None:
            os.setsid()
            for number, (reads, writes) in enumerate(pipes, start=1):
                os.dup2(writes, number)
                os.close(reads)
                os.close(writes)
            sys.stdout, sys.stderr = (os.fdopen(n, "w", 1, closefd=False) for n in (1, 2))
            work()

        with warnings.catch_warnings():  # Python 3.12 and later warn of BLAS's threads
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process = multiprocessing.get_context("fork").Process(target=begin)
            self._process.start()
        for _, writes in pipes:
            os.close(writes)
        self.stdout, self.stderr = (os.fdopen(reads) for reads, _ in pipes)
        assert self._process.pid is not None
        self.pid = self._process.pid

    def wait(self) -> None:
        self._process.join(TIMEOUT)
        assert self._process.exitcode is not None


@contextmanager
def supervisor(work: Callable[[], None]) -> Iterator[tuple[Forked, list[int]]]:
    """A running one, and the processes under it."""
    process = Forked(work)
    pids: list[int] = []
    try:
        for _ in range(2):
            line = process.stdout.readline().split()
            assert line[1] == "pids", line
            pids += map(int, line[2:])
        yield process, pids
    finally:
        for pid in [process.pid, *pids]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        process.stderr.close()


@pytest.mark.parametrize("work", [functions, programs, stubborn])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_supervisor_leaves_nothing(
    work: Callable[[], None], number: signal.Signals
) -> None:
    with supervisor(work) as (process, pids):
        os.killpg(process.pid, number)  # as a terminal does: to its whole group
        process.wait()
        assert process.stderr.read().splitlines()[-1] == "KeyboardInterrupt"
        wait_until(lambda: not any(map(lives, pids)))


def test_a_second_interrupt_is_less_patient() -> None:
    with supervisor(lambda: stubborn(grace=FOREVER)) as (process, pids):
        os.kill(process.pid, signal.SIGINT)
        sleep(0.5)
        os.kill(process.pid, signal.SIGINT)
        process.wait()
        wait_until(lambda: not any(map(lives, pids)))


@pytest.mark.parametrize("work", [functions, programs, stubborn])
def test_a_killed_supervisor_leaves_nothing(work: Callable[[], None]) -> None:
    with supervisor(work) as (process, pids):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        wait_until(lambda: not any(map(lives, pids)))


# Programs


def script(folder: Path, source: str) -> list[str]:
    path = folder / "train.py"
    path.write_text(textwrap.dedent(source))
    return [sys.executable, str(path)]


def test_programs_meet_at_the_hosted_store(tmp_path: Path) -> None:
    heard: list[tuple[int, str, str]] = []
    command = script(
        tmp_path,
        """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.tensor([dist.get_rank() + 1])
        dist.all_reduce(total)
        print(total.item())
        dist.destroy_process_group()
        """,
    )
    run_command(2, command, on_line=lambda *line: heard.append(line), timeout=TIMEOUT)
    assert sorted(heard) == [(0, "stdout", "3"), (1, "stdout", "3")]


def test_the_cause_is_read_from_a_traceback(tmp_path: Path) -> None:
    command = script(
        tmp_path,
        """
        import os, sys, time
        class PeerLost(Exception): pass
        if os.environ["RANK"] == "0":
            time.sleep(0.5)
            try:
                raise KeyError("inner")
            except KeyError:
                raise ValueError("bad lr")
        raise PeerLost("rank 0 is gone")
        """,
    )
    with pytest.raises(WorkerFailed, match=r"^rank 0: ValueError: bad lr; its traceback is above$"):
        run_command(2, command, on_line=quiet, timeout=TIMEOUT)


@pytest.mark.parametrize("end", ["sys.exit(2)", "os.abort()"])
def test_the_last_line_of_a_worker_is_not_lost(end: str, tmp_path: Path) -> None:
    """However it ended, if it is a line of Thalweg's."""
    line = "thalweg: there is no plan 'rinq'; use ring"
    source = f"import os, sys\nprint({line!r}, file=sys.stderr)\n{end}\n"
    said: list[str] = []
    with pytest.raises(WorkerFailed) as caught:
        run_command(
            1,
            script(tmp_path, source),
            timeout=TIMEOUT,
            on_line=lambda rank, stream, text: said.append(text),
        )
    told = [*said, str(caught.value)]
    assert len([text for text in told if "there is no plan 'rinq'" in text]) == 1, told


def test_a_program_that_leaves_with_a_code_or_a_signal() -> None:
    with pytest.raises(WorkerFailed, match=r"^rank 1 ended with exit code 7; "):
        run_command(2, ["sh", "-c", "test $RANK = 0 || exit 7"], timeout=TIMEOUT)
    with pytest.raises(WorkerFailed, match=r"^rank [01] was killed by SIGSEGV; "):
        run_command(2, ["sh", "-c", "kill -SEGV $$"], on_line=quiet, timeout=TIMEOUT)


@pytest.mark.parametrize(
    ("restarts", "told"),
    [
        (0, ["rank 1 was killed by SIGSEGV; the others continue"]),
        (1, ["rank 1 was killed by SIGSEGV; it is restarted", "back"]),
    ],
)
def test_a_program_that_is_killed_is_done_without(restarts: int, told: list[str]) -> None:
    lines: list[str] = []
    program = (
        f"test $RANK = 0 && exit; test ${RESTARTS_VARIABLE} = 0 || exec echo back; kill -SEGV $$"
    )
    run_command(
        2,
        ["sh", "-c", program],
        on_line=lambda _, __, line: lines.append(line),
        timeout=TIMEOUT,
        restarts=restarts,
    )
    assert lines == told


def test_a_program_that_stays_stopped_ends_with_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("thalweg.launch.worker_group.STOPPED_WORKER_GRACE_SECONDS", 0.3)
    lines: list[str] = []
    program = ["sh", "-c", "test $RANK = 0 && exit; kill -STOP $$; echo went on"]
    run_command(2, program, on_line=lambda _, __, line: lines.append(line), timeout=TIMEOUT)
    assert lines == ["rank 1 was stopped when the others ended, and is killed"]


def test_what_is_no_program(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no program 'no-such-program'; "):
        run_command(2, ["no-such-program"])
    broken = tmp_path / "broken"
    broken.write_bytes(b"\x7fELF")
    broken.chmod(0o755)
    with pytest.raises(UsageError, match=f"can't run {broken}: Exec format error; "):
        run_command(2, [str(broken)], timeout=TIMEOUT)


def test_the_command_passes_arguments_on(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command(context_settings={"allow_interspersed_args": False})(train.run)
    _, path = script(tmp_path, "import sys; print(*sys.argv[1:])")
    for arguments in ([path], ["--", path], ["--", sys.executable, path]):
        done = CliRunner().invoke(app, ["--workers", "2", *arguments, "--lr", "0.1", "--", "-v"])
        assert sorted(done.output.splitlines()) == ["[0] --lr 0.1 -- -v", "[1] --lr 0.1 -- -v"]
    missing = CliRunner().invoke(app, ["--workers", "2", str(tmp_path / "none.py")])
    assert isinstance(missing.exception, UsageError)
