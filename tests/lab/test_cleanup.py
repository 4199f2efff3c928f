"""However a lab ends, nothing of it stays: no namespace, no folder, no process, no interface."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.cli.command import thalweg
from tests.lab.remains import FOLDERS, MARK, Traces, interfaces, marked, named_remains, wait_until
from thalweg.errors import LabError, WorkerFailed
from thalweg.facts import Cluster
from thalweg.lab import Lab, registry, sweep
from thalweg.lab.namespaces import remove
from thalweg.launch.supervisor import run_workers
from thalweg.launch.worker_group import WorkerGroup
from thalweg.launch.worker_process import SendMessage

pytestmark = pytest.mark.usefixtures("needs_lab")
TIMEOUT = 60.0
FOREVER = 600.0


def quiet(rank: int, stream: str, line: str) -> None:
    pass


# In this process


def test_nothing_stays_after_the_end(name: str) -> None:
    with Lab(racks=2, hosts=2, name=name) as lab:
        traces = Traces(name)
        lab.links.fill(lab.links.of(rack=0), rate=None)
        lab.run(lambda rank, report: None, timeout="60s")
        assert traces.left() != []
    assert traces.left() == []


def test_nothing_stays_after_an_error_in_the_block(name: str) -> None:
    traces: list[Traces] = []

    def fail() -> None:
        with Lab(hosts=2, name=name) as lab:
            traces.append(Traces(name))
            lab.links.cut(lab.links.of(host=0))
            raise LookupError

    with pytest.raises(LookupError):
        fail()
    assert traces[0].left() == []


def test_nothing_stays_after_an_error_of_a_worker(name: str) -> None:
    def work(rank: int, report: SendMessage) -> None:
        subprocess.Popen(["sleep", str(FOREVER)])  # would stay, if nobody looked for it
        if rank == 1:
            raise ValueError("mine")

    with Lab(hosts=2, name=name) as lab:
        traces = Traces(name)
        with pytest.raises(WorkerFailed, match="rank 1 on host1: ValueError: mine"):
            lab.run(work, process_group=False, timeout="60s")
    assert traces.left() == []


def test_what_workers_left_running_ends_with_the_lab(name: str) -> None:
    def work(rank: int, report: SendMessage) -> int:
        daemon = subprocess.Popen(["sleep", str(FOREVER)], start_new_session=True)
        return daemon.pid

    with Lab(hosts=1, name=name) as lab:
        traces = Traces(name)
        [pid] = lab.run(work, process_group=False, timeout="60s")
        assert lab.processes() == {"host0": [pid]}
    assert traces.left() == []


def test_workers_of_one_lab_hold_nothing_of_another(
    new_name: Callable[[], str], tmp_path: Path
) -> None:
    def work(rank: int, report: SendMessage, other: str) -> list[str]:
        report({"step": 1})
        wait_until((tmp_path / "down").exists)
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
        return [line for line in lines if f"thalweg.{other}." in line]

    with Lab(hosts=1, name=new_name()) as stays, Lab(hosts=1, name=new_name()) as goes:

        def take_down(rank: int, message: dict[str, Any]) -> None:
            goes.down()
            (tmp_path / "down").touch()

        other = goes.name
        held = stays.run(work, other, process_group=False, on_message=take_down, timeout="60s")
        assert held == [[]]


def test_nothing_stays_of_a_lab_that_could_not_be_built(name: str) -> None:
    before = interfaces()

    def fail(done: int, total: int) -> None:
        if done == total - 1:
            raise LookupError

    with pytest.raises(LookupError):
        Lab(racks=2, hosts=2, name=name).up(progress=fail)
    assert named_remains(name) == []
    assert interfaces() == before


def test_a_lab_without_an_owner_stays_until_it_is_taken_down(name: str) -> None:
    source = f"from thalweg.lab import Lab; Lab(hosts=2, name={name!r}).up(owned=False)"
    subprocess.run([sys.executable, "-c", source], check=True, timeout=TIMEOUT)
    assert name not in sweep()
    lab = Lab.find(name)
    traces = Traces(name)
    assert lab.run(lambda rank, report: rank, timeout="60s") == [0, 1]
    lab.down()
    assert traces.left() == []


# In another process, which is told to end

IN_A_RUN = """
    import time
    from thalweg.lab import Lab

    def work(rank, report):
        report({{"step": 1}})
        time.sleep(600)

    heard = set()

    def ready(rank, message):
        heard.add(rank)
        if len(heard) == 3:
            print("ready", flush=True)

    with Lab(racks=2, hosts=[2, 1], name={name!r}) as lab:
        lab.links.fill(lab.links.of(rack=0, directions=("out",)))
        lab.run(work, on_message=ready, process_group=False)
"""
IN_THE_BLOCK = """
    import time
    from thalweg.lab import Lab

    with Lab(hosts=3, name={name!r}) as lab:
        lab.links.fill(lab.links.of(host=0, directions=("out",)))
        print("ready", flush=True)
        time.sleep(600)
"""
WHILE_IT_IS_BUILT = """
    import time
    from thalweg.lab import Lab

    def progress(done, total):
        if done == {done}:
            print("ready", flush=True)

    lab = Lab(racks=3, hosts=10, name={name!r})
    lab.up(progress=progress)
    time.sleep(600)
"""


@contextmanager
def owner(source: str, name: str, **values: int) -> Iterator[subprocess.Popen[str]]:
    """A process with a lab, ready to be disturbed."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(source.format(name=name, **values))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, MARK: name},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        for pid in marked(name):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate(timeout=TIMEOUT)
        sweep()


@pytest.mark.parametrize(
    ("source", "number"),
    [
        (IN_A_RUN, signal.SIGINT),
        (IN_A_RUN, signal.SIGTERM),
        (IN_THE_BLOCK, signal.SIGINT),
    ],
    ids=["Ctrl-C in a run", "SIGTERM in a run", "Ctrl-C in the block"],
)
def test_nothing_stays_of_one_that_is_interrupted(
    source: str, number: signal.Signals, name: str
) -> None:
    with owner(source, name) as process:
        traces = Traces(name)
        os.killpg(process.pid, number)  # as a terminal does: to its whole group
        _, errors = process.communicate(timeout=TIMEOUT)
        assert errors.splitlines()[-1] == "KeyboardInterrupt"
        wait_until(lambda: not marked(name))
        assert traces.left() == []


@pytest.mark.parametrize(
    "done",
    [
        pytest.param(1, marks=pytest.mark.slow),
        pytest.param(12, marks=pytest.mark.slow),
        pytest.param(33, marks=pytest.mark.slow),
        50,
    ],
)
def test_nothing_stays_of_one_that_is_interrupted_while_it_is_built(done: int, name: str) -> None:
    before = interfaces()
    with owner(WHILE_IT_IS_BUILT, name, done=done) as process:
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=TIMEOUT)
        assert errors.splitlines()[-1] == "KeyboardInterrupt"
        wait_until(lambda: not marked(name))
        assert named_remains(name) == []
        assert interfaces() == before


def test_who_takes_a_lab_down_while_it_is_built_waits_until_it_is(name: str) -> None:
    with owner(WHILE_IT_IS_BUILT, name, done=2) as process:
        Lab.find(name).down()
        process.kill()
        process.wait(TIMEOUT)
        wait_until(lambda: not marked(name))
    left = named_remains(name)
    remove(name)
    assert left == []


def test_a_lab_that_is_taken_down_before_it_is_built_is_told_and_not_built(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    enrol = registry.enrol

    def enrol_and_lose(*arguments: Any, **options: Any) -> registry.LabRecord:
        record = enrol(*arguments, **options)
        registry.unregister(record.name)
        enrol(*arguments, **options)  # and another takes its name
        return record

    monkeypatch.setattr(registry, "enrol", enrol_and_lose)
    try:
        with pytest.raises(LabError, match=f"^another process took lab '{name}' down; "):
            Lab(hosts=1, name=name).up(owned=False)
        assert registry.find(name).owner is not None
        assert named_remains(name) == [f"folder {name}"]
    finally:
        registry.unregister(name)
        remove(name)


def test_a_lab_that_goes_while_it_is_read_is_not_there(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_and_lose(text: str) -> Any:
        registry.unregister(name)
        return load(text)

    load = json.loads
    registry.enrol(name, Cluster.flat(1), loss=0.0, netem=False, notes=[])
    monkeypatch.setattr(json, "loads", load_and_lose)
    with pytest.raises(LabError, match=f"^there is no lab '{name}'; "):
        registry.find(name)


@pytest.mark.parametrize(
    ("source", "number"),
    [
        (IN_A_RUN, signal.SIGKILL),
        pytest.param(IN_THE_BLOCK, signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param(IN_THE_BLOCK, signal.SIGTERM, marks=pytest.mark.slow),
    ],
    ids=["SIGKILL in a run", "SIGKILL in the block", "SIGTERM in the block"],
)
def test_who_comes_next_removes_what_a_killed_one_left(
    source: str, number: signal.Signals, name: str, new_name: Callable[[], str]
) -> None:
    with owner(source, name) as process:
        traces = Traces(name)
        os.kill(process.pid, number)
        wait_until(lambda: marked(name) in ([], [process.pid]))  # its workers and flows go alone
        # Nobody has waited for the killed process, which makes it a zombie but no owner.
        wait_until(lambda: is_zombie(process.pid))
        with Lab(hosts=1, name=new_name()):
            assert traces.left() == []


def test_who_has_no_rights_to_remove_it_is_told_so(name: str) -> None:
    """And not that a device is busy."""
    with owner(IN_THE_BLOCK, name) as process:
        os.kill(process.pid, signal.SIGKILL)
        process.wait(TIMEOUT)
        done = thalweg("bench", "stragglers", "--tree", "2x2", rights=False)
        assert (done.returncode, "the lab needs root" in done.stderr) == (2, True)
    sweep()
    assert named_remains(name) == []


def is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_who_comes_next_removes_what_was_half_built_and_takes_its_name(name: str) -> None:
    with owner(WHILE_IT_IS_BUILT, name, done=20) as process:
        os.kill(process.pid, signal.SIGKILL)
        wait_until(lambda: is_zombie(process.pid))
        wait_until(lambda: not marked(name))  # a fork of its that makes one more namespace
        assert named_remains(name) != []
        with Lab(hosts=1, name=name) as lab:
            traces = Traces(name)
            assert len(named_remains(name)) == 3 + 1
            assert lab.run(lambda rank, report: rank, timeout="60s") == [0]
        assert traces.left() == []


def test_half_a_folder_of_a_process_that_is_gone_is_removed() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait(TIMEOUT)
    theirs = FOLDERS / f".{gone.pid}-half"
    ours = FOLDERS / f".{os.getpid()}-half"
    for folder in (theirs, ours):
        folder.mkdir()
        (folder / "lab.json").touch()
    try:
        sweep()
        assert not theirs.exists()
        assert ours.exists()  # somebody is still writing it
    finally:
        (ours / "lab.json").unlink()
        ours.rmdir()


@pytest.mark.slow
def test_many_start_and_sweep_at_once_and_none_takes_anothers(name: str) -> None:
    """Three processes at once want the name that a killed one left; one gets it, and keeps it."""
    contender = """
        import sys
        from thalweg.errors import LabError
        from thalweg.lab import Lab

        print("ready", flush=True)
        sys.stdin.readline()
        try:
            with Lab(hosts=2, name={name!r}) as lab:
                print(lab.run(lambda rank, report: rank, process_group=False), flush=True)
                sys.stdin.readline()
        except LabError as error:
            print(str(error).partition(";")[0], flush=True)
    """
    with owner(IN_THE_BLOCK, name) as killed:
        contenders = [
            subprocess.Popen(
                [sys.executable, "-c", textwrap.dedent(contender.format(name=name))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, MARK: name},
            )
            for _ in range(3)
        ]
        for process in contenders:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait(TIMEOUT)
        for process in contenders:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        said = [process.stdout.readline() for process in contenders if process.stdout]
        for process in contenders:
            process.communicate(timeout=TIMEOUT)
        refused = f"there is a lab {name!r} already\n"
        assert sorted(said) == sorted(["[0, 1]\n", refused, refused])
    assert named_remains(name) == []


def test_who_takes_a_lab_down_twice_leaves_the_next_of_that_name_alone(name: str) -> None:
    with Lab(hosts=1, name=name):
        former = Lab.find(name)
    with Lab(hosts=1, name=name) as lab:
        with pytest.raises(LabError, match=f"lab '{name}' isn't up"):
            former.links.cut(former.links.all())
        former.down()
        assert lab.run(lambda rank, report: rank, process_group=False, timeout="60s") == [0]


def test_two_processes_that_build_and_sweep_at_once_do_not_harm_each_other(name: str) -> None:
    """The one makes labs of one name, one after the other; the other takes down each that it has
    found there, slowly and maybe when it is gone already, and sweeps."""
    builder = """
        from thalweg.lab import Lab

        for _ in range({rounds}):
            lab = Lab(hosts=2, name={name!r})
            lab.up()
            lab.status()
            print("up", flush=True)
            input()
            lab.down()
    """
    remover = """
        from time import sleep
        from thalweg.lab import Lab, registry, sweep

        strike_off = registry.unregister

        def slowly(name):
            sleep(number / 5)
            strike_off(name)

        registry.unregister = slowly
        for number in range({rounds}):
            input()
            found = Lab.find({name!r})
            print("found", flush=True)
            input()
            found.down()
            assert {name!r} not in sweep()
    """
    rounds = 6
    build, remove = (
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(source.format(name=name, rounds=rounds))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, MARK: name},
        )
        for source in (builder, remover)
    )

    def go(process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()

    try:
        assert build.stdout is not None
        assert remove.stdout is not None
        for _ in range(rounds):
            assert build.stdout.readline() == "up\n"
            go(remove)
            assert remove.stdout.readline() == "found\n"
            go(build)
            go(remove)
        assert (build.wait(TIMEOUT), remove.wait(TIMEOUT)) == (0, 0)
    finally:
        for process in (build, remove):
            process.kill()
            process.communicate(timeout=TIMEOUT)
        sweep()
    assert named_remains(name) == []


def test_an_owner_lives_however_the_clock_is_set(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Lab(hosts=1, name=name):
        an_hour_later = psutil.Process().create_time() + 3600
        monkeypatch.setattr(psutil.Process, "create_time", lambda process: an_hour_later)
        assert not registry.find(name).abandoned()


def test_what_a_former_version_wrote_of_an_owner_is_understood(name: str) -> None:
    """It wrote no ticks."""
    with Lab(hosts=1, name=name):
        path = FOLDERS / name / "lab.json"
        about = json.loads(path.read_text())
        path.write_text(json.dumps(about | {"owner": about["owner"][:2]}))
        assert not registry.find(name).abandoned()
        gone = subprocess.Popen(["true"])
        gone.wait(TIMEOUT)
        path.write_text(json.dumps(about | {"owner": [gone.pid, about["owner"][1]]}))
        assert registry.find(name).abandoned()


# At random moments


class Assassin:
    """Kills a worker of a random host, so long after the start."""

    def __init__(self, lab: Lab, chance: random.Random) -> None:
        self.lab = lab
        self.host = chance.choice(list(lab.wiring.hosts))
        self.moment = chance.uniform(0.0, 0.6)
        self.start = 0.0
        self.done = False

    def prepare(self) -> None:
        self.start = monotonic()

    def poll(self, workers: WorkerGroup) -> None:
        if not self.done and monotonic() - self.start >= self.moment:
            for pid in self.lab.processes()[self.host]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                self.done = True


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_fifty_runs_with_a_worker_killed_at_a_random_moment(new_name: Callable[[], str]) -> None:
    chance = random.Random(84)
    before = interfaces()

    def work(rank: int, report: SendMessage) -> dict[str, Any]:
        dist.init_process_group("gloo")
        while True:
            dist.all_reduce(torch.ones(1000))
            sleep(0.001)

    for _ in range(50):
        with Lab(racks=2, hosts=[2, 1], nic="100mbit", name=new_name()) as lab:
            traces = Traces(lab.name)
            assassin = Assassin(lab, chance)
            with pytest.raises(WorkerFailed, match="killed by SIGKILL"):
                run_workers(
                    3,
                    work,
                    place=lab.place,
                    director=assassin,
                    timeout=TIMEOUT,
                    grace=0.3,
                    on_line=quiet,
                )
            assert assassin.done
        assert traces.left() == []
    assert interfaces() == before


def test_sweeping_leaves_living_labs_alone(name: str) -> None:
    with Lab(hosts=1, name=name) as lab:
        assert name not in sweep()
        with pytest.raises(LabError, match="already"):
            Lab(hosts=1, name=name).up()
        assert lab.run(lambda rank, report: rank, timeout="60s") == [0]
