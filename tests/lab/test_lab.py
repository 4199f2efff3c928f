"""Real namespaces, real TCP: how fast links are, who reaches whom, and work in a lab.

Of a NIC's rate 95.6 % are payload: 1,448 bytes of each packet of 1,514.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from time import monotonic, sleep
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

from tests.conftest import LabOf
from tests.lab.remains import named_remains, wait_until
from tests.lab.traffic import Stream, rates
from thalweg.errors import LabError, UsageError, WorkerFailed
from thalweg.facts import Cluster, Duplex, Duration, Host, Rack, Rate, read_cluster
from thalweg.facts.cluster import ASSUMED_LATENCY
from thalweg.lab import Lab, sweep
from thalweg.lab.fabric import has_netem
from thalweg.lab.lab import MESSAGE_CORE_SECONDS
from thalweg.lab.namespaces import inside
from thalweg.launch.launcher_variables import CLUSTER_VARIABLE
from thalweg.launch.worker_process import SendMessage, fork

pytestmark = pytest.mark.usefixtures("needs_lab")
MBIT = 1e6
FOREVER = 600.0
ATTEMPTS = 8


def is_all_of(measured: float, mbit: float) -> bool:
    print(f"{measured / MBIT / mbit:.1%} of {mbit:g} Mbit/s")
    return 0.93 <= measured / MBIT / mbit <= 1.02


def reach(lab: Lab, wanted: dict[tuple[int, int], float]) -> bool:
    """Whether streams, all at once, each get all of so many Mbit/s. This process drives both ends,
    and may be starved on a busy machine, so there are some attempts; a link of another rate fails
    all of them."""
    with ExitStack() as stack:
        streams = [stack.enter_context(Stream(lab, *pair)) for pair in wanted]
        for _ in range(ATTEMPTS):
            measured = rates(streams, skip=1.0, seconds=1.5)
            if all(map(is_all_of, measured, wanted.values())):
                return True
    return False


# How fast links are


ALL = {"in the rack": (0, 1), "across": (2, 3), "across, beside it": (1, 4)}


@pytest.mark.parametrize(
    ("mbit", "which"),
    [
        (50, list(ALL)),
        (200, list(ALL)),
        pytest.param(500, ["in the rack"], marks=pytest.mark.slow),
        pytest.param(500, ["across"], marks=pytest.mark.slow),
    ],
)
def test_a_stream_gets_all_of_a_nic_and_no_uplink_is_no_bottleneck(
    mbit: int, which: list[str], name: str
) -> None:
    with Lab(racks=2, hosts=3, nic=f"{mbit}mbit", uplink=None, name=name) as lab:
        assert reach(lab, {ALL[stream]: mbit for stream in which})
        uplinks = [row for link, row in lab.links.status().items() if link.kind == "uplink"]
        assert {row["rate"] for row in uplinks} == {None}


@pytest.mark.slow
def test_four_streams_share_an_uplink(name: str) -> None:
    with ExitStack() as stack:
        lab = Lab(racks=2, hosts=4, nic="100mbit", uplink="100mbit", name=name)
        stack.enter_context(lab)
        streams = [stack.enter_context(Stream(lab, rank, rank + 4)) for rank in range(4)]
        measured = rates(streams, skip=1.0, seconds=15.0)
        print("shares", [f"{each / sum(measured):.0%}" for each in measured])
        assert is_all_of(sum(measured), 100)
        assert min(measured) >= 5 * MBIT


def test_every_host_has_its_own_nic_and_every_rack_its_own_uplink(name: str) -> None:
    """Racks of 1, 3 and 2 hosts; no stream is in another's way."""
    nics = ["20mbit", "60mbit", "100mbit", "200mbit", "100mbit", "100mbit"]
    uplinks = ["100mbit", "30mbit", "200mbit"]
    with Lab(hosts=[1, 3, 2], nic=nics, uplink=uplinks, name=name) as lab:
        assert reach(lab, {(0, 4): 20, (1, 3): 60, (2, 5): 30})


def test_the_directions_of_a_link_differ(name: str) -> None:
    uneven = Duplex(Rate.parse("100mbit"), Rate.parse("20mbit"))
    cluster = Cluster.regular([2, 1], nic=[uneven, "200mbit", "200mbit"], uplink=[uneven, "1gbit"])
    with Lab.of(cluster, name=name) as lab:
        assert reach(lab, {(0, 1): 100, (1, 2): 100})
        assert reach(lab, {(1, 0): 20, (2, 1): 20})


def test_the_slowest_and_the_fastest_rate_are_the_kernels_too(name: str) -> None:
    with Lab(hosts=2, nic=["8kbit", "34gbit"], name=name) as lab:
        found = {link[1:]: row["rate"] for link, row in lab.links.status().items()}
    assert found["host0", "out"] == found["host0", "in"] == "8kbit"
    assert found["host1", "out"] == found["host1", "in"] == "34gbit"


# Who reaches whom


def test_hosts_have_names_addresses_and_reach_each_other(lab_of: LabOf) -> None:
    def work(rank: int, report: SendMessage) -> dict[str, Any]:
        with socket.create_server(("", 5000)) as listener:
            listener.settimeout(20)
            report({"step": 1})
            dist.barrier()
            others = [f"host{other}" for other in range(3) if other != rank]
            calls = [socket.create_connection((other, 5000), timeout=20) for other in others]
            callers = sorted(listener.accept()[1][0] for _ in others)
            dist.barrier()
        for call in calls:
            call.close()
        return {
            "hostname": socket.gethostname(),
            "callers": callers,
            "interfaces": sorted(name for _, name in socket.if_nameindex()),
            "cluster": read_cluster(Path(os.environ[CLUSTER_VARIABLE])).workers,
        }

    here = socket.gethostname()
    lab = lab_of(racks=2, hosts=[2, 1])
    results = lab.run(work, timeout="60s")
    addresses = [lab.wiring.hosts[f"host{rank}"] for rank in range(3)]
    assert [result["hostname"] for result in results] == ["host0", "host1", "host2"]
    for rank, result in enumerate(results):
        assert result["callers"] == sorted(set(addresses) - {addresses[rank]})
        assert result["interfaces"] == ["eth0", "lo"]
        assert result["cluster"] == 3
    assert socket.gethostname() == here


def test_ranks_of_one_host_share_it(name: str) -> None:
    hosts = (Host(name="a.b", ranks=(0, 2)), Host(name="spine", ranks=(1,)))
    cluster = Cluster(racks=(Rack(name="spine", hosts=hosts),))

    def work(rank: int, report: SendMessage) -> list[str]:
        total = torch.tensor([rank])
        dist.all_reduce(total)
        assert total.item() == 3
        seat = [os.environ[key] for key in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")]
        return [socket.gethostname(), *seat]

    with Lab.of(cluster, name=name) as lab:
        assert lab.run(work, timeout="60s") == [
            ["a.b", "0", "2"],
            ["spine", "0", "1"],
            ["a.b", "1", "2"],
        ]


def test_two_labs_at_once_have_the_same_addresses_and_do_not_meet(
    new_name: Callable[[], str],
) -> None:
    def work(rank: int, report: SendMessage, base: float) -> float:
        total = torch.tensor([base + rank])
        dist.all_reduce(total)
        return float(total.item())

    with Lab(hosts=2, name=new_name()) as one, Lab(hosts=2, name=new_name()) as other:
        address = one.wiring.hosts["host0"]
        assert address == other.wiring.hosts["host0"]
        with inside(one.wiring.host("host0")):
            listener = socket.create_server((address, 5000))
        with listener:
            with inside(one.wiring.host("host1")):
                socket.create_connection((address, 5000), timeout=5).close()
            with inside(other.wiring.host("host1")), pytest.raises(ConnectionRefusedError):
                socket.create_connection((address, 5000), timeout=5)
        assert one.run(work, 10.0, timeout="60s") == [21.0] * 2
        assert other.run(work, 20.0, timeout="60s") == [41.0] * 2


# Work


def test_results_come_by_rank_and_arguments_arrive(lab_of: LabOf) -> None:
    def work(rank: int, report: SendMessage, base: int, texts: list[str]) -> dict[str, Any]:
        sleep(0.05 * (2 - rank))
        total = torch.tensor([float(rank + 1)])
        dist.all_reduce(total)
        return {"sum": total.item(), "rank": rank + base, "texts": texts}

    lab = lab_of(racks=2, hosts=[2, 1])
    results = lab.run(work, 10, ["a", "b"], timeout="60s")
    assert results == [{"sum": 6.0, "rank": 10 + rank, "texts": ["a", "b"]} for rank in range(3)]


def test_any_json_comes_back_and_so_does_nothing(lab_of: LabOf) -> None:
    values: list[Any] = [None, 3, [1, [2.5, "ü"]], False]

    def work(rank: int, report: SendMessage) -> Any:
        assert not dist.is_initialized()
        return values[rank]

    lab = lab_of(racks=2, hosts=2)
    assert lab.run(work, process_group=False, timeout="60s") == values


def test_reports_and_printed_lines_are_heard(
    lab_of: LabOf, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(rank: int, report: SendMessage) -> None:
        report({"step": 1, "text": f"from {rank}"})
        print(f"out of {socket.gethostname()}")
        print("trouble", file=sys.stderr)

    heard: list[tuple[int, dict[str, Any]]] = []
    lines: list[tuple[int, str, str]] = []
    lab = lab_of(hosts=2)
    lab.run(
        work,
        process_group=False,
        timeout="60s",
        on_message=lambda rank, message: heard.append((rank, message)),
    )
    out, err = capsys.readouterr()
    lab.run(work, process_group=False, timeout="60s", on_line=lambda *line: lines.append(line))
    assert sorted(heard, key=lambda pair: pair[0]) == [
        (rank, {"step": 1, "text": f"from {rank}"}) for rank in range(2)
    ]
    assert sorted(out.splitlines()) == ["[0] out of host0", "[1] out of host1"]
    assert sorted(err.splitlines()) == ["[0] trouble", "[1] trouble"]
    assert sorted(lines) == [
        (0, "stderr", "trouble"),
        (0, "stdout", "out of host0"),
        (1, "stderr", "trouble"),
        (1, "stdout", "out of host1"),
    ]


def test_an_error_names_the_rank_and_the_host(lab_of: LabOf) -> None:
    def work(rank: int, report: SendMessage) -> None:
        if rank == 2:
            raise ValueError("bad lr")
        dist.barrier()

    lab = lab_of(racks=2, hosts=2)
    with pytest.raises(WorkerFailed, match=r"^rank 2 on host2: ValueError: bad lr \(test_lab"):
        lab.run(work, timeout="60s")
    assert lab.run(lambda rank, report: rank, timeout="60s") == [0, 1, 2, 3]


def test_what_is_no_json_is_told(lab_of: LabOf) -> None:
    problem = r"^a worker's result can't be sent as JSON: .*set is not"
    with pytest.raises(UsageError, match=problem):
        lab_of(hosts=2).run(lambda rank, report: {1}, process_group=False, timeout="60s")


def test_the_timeout_ends_a_run_and_the_lab_goes_on(lab_of: LabOf) -> None:
    def work(rank: int, report: SendMessage, seconds: float) -> None:
        sleep(seconds if rank == 1 else 0.0)

    lab = lab_of(hosts=2)
    with pytest.raises(WorkerFailed, match=r"^ranks? (0, )?1 didn't finish within 0.5 s; "):
        lab.run(work, FOREVER, process_group=False, timeout="500ms")
    assert lab.processes() == {"host0": [], "host1": []}
    assert lab.run(work, 0.0, process_group=False, timeout="60s") == [None, None]


def test_who_runs_on_a_host_is_known(lab_of: LabOf, tmp_path: Path) -> None:
    seen: list[dict[str, list[int]]] = []

    def work(rank: int, report: SendMessage) -> int:
        report({"step": 1})
        wait_until((tmp_path / "seen").exists)
        return os.getpid()

    lab = lab_of(hosts=2)
    ready: set[int] = set()

    def look(rank: int, message: dict[str, Any]) -> None:
        ready.add(rank)
        if len(ready) == 1:  # the other may not have reported, but is there
            seen.append(lab.processes())
            (tmp_path / "seen").touch()

    pids = lab.run(work, timeout="60s", on_message=look)
    assert seen == [{"host0": [pids[0]], "host1": [pids[1]]}]


# Mistakes


def message_of(error: pytest.ExceptionInfo[UsageError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    assert error.value.remedy in text
    return text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nic": "fast"}, "'fast' is not a rate; write it like 200mbit"),
        ({"nic": "100mpps"}, "'100mpps' is not a rate; write it like 200mbit"),
        ({"nic": "1kbit"}, "the lab can't emulate a link of 1kbit; give 8kbit to 34gbit"),
        ({"uplink": "1tbit"}, "the lab can't emulate a link of 1tbit; give 8kbit to 34gbit"),
        ({"nic": ["1gbit"], "hosts": 2}, "the hosts' NICs are 1, not 2; list 2, or give one"),
        ({"uplink": ["1gbit"], "racks": 2}, "the uplinks are 1, not 2; list 2, or give one"),
        ({"hosts": 0}, "a cluster needs at least one worker in every rack; "),
        ({"hosts": [2, 0]}, "a cluster needs at least one worker in every rack; "),
        ({"hosts": []}, "a cluster needs at least one worker in every rack; "),
        ({"racks": 0}, "a cluster needs at least one worker in every rack; "),
        ({"racks": 3, "hosts": [1, 2]}, "3 racks, but hosts for 2; give hosts for each rack, or "),
        ({"hosts": 255}, "a lab has too few addresses for 1 racks of up to 255 hosts; "),
        ({"latency": "soon"}, "'soon' is not a duration; write it like 50ms"),
        ({"loss": 1.0}, "a link can't lose a fraction of 1.0; give 0 to below 1"),
        ({"loss": -0.1}, "a link can't lose a fraction of -0.1; give 0 to below 1"),
        ({"name": ""}, "'' is not a name for a lab; "),
        ({"name": "My Lab"}, "'My Lab' is not a name for a lab; "),
    ],
)
def test_mistakes_are_told_before_anything_is_built(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        Lab(**options)
    assert message_of(caught).startswith(message)


def test_a_name_that_is_taken(lab_of: LabOf) -> None:
    lab = lab_of(hosts=2)
    with pytest.raises(LabError) as caught:
        Lab(hosts=2, name=lab.name).up()
    assert message_of(caught) == (
        f"there is a lab {lab.name!r} already; "
        f"use another name, or take one down with `thalweg lab down --name {lab.name}`"
    )
    assert len(lab.run(lambda rank, report: None, timeout="60s")) == 2


def test_up_twice_is_refused_and_the_lab_stays(name: str) -> None:
    with Lab(hosts=1, name=name) as lab:
        with pytest.raises(LabError) as caught:
            lab.up()
        assert message_of(caught).startswith(f"lab {name!r} is up already; ")
        with pytest.raises(LabError, match="is up already"):
            Lab.find(name).up()
        assert len(lab.run(lambda rank, report: None, timeout="60s")) == 1
    assert named_remains(name) == []


def test_a_lab_that_is_not_up(name: str) -> None:
    lab = Lab(hosts=1, name=name)
    for use in (lambda: lab.name, lambda: lab.links, lambda: lab.run(print), lambda: lab.notes):
        with pytest.raises(LabError) as caught:
            use()
        assert message_of(caught).startswith("the lab isn't up; ")
    lab.down()
    with pytest.raises(LabError, match=r"^there is no lab ''; "):  # and not the only one
        Lab.find("")
    with pytest.raises(
        LabError, match=f"^there is no lab '{name}'; make one with `thalweg lab up`"
    ):
        Lab.find(name)


def test_latency_without_netem(name: str) -> None:
    if has_netem():
        pytest.skip("this kernel has netem")
    for asked in ({"latency": "5ms"}, {"loss": 0.01}):
        with pytest.raises(LabError) as caught:
            Lab(racks=2, hosts=1, name=name, **asked).up()
        assert message_of(caught) == (
            "this kernel has no netem, so links can't have latency or loss; "
            "load sch_netem, leave them out, or go on without them (without_netem='go on')"
        )
        assert named_remains(name) == []
    with Lab(racks=2, hosts=1, latency="5ms", name=name, without_netem="go on") as lab:
        assert "NO latency or loss on uplinks: this kernel has no netem" in lab.notes
        assert {row["latency_ms"] for row in lab.links.status().values()} == {0.0}
        assert Lab.find(name).notes == lab.notes


def test_latency_with_netem(name: str) -> None:
    if not has_netem():
        pytest.skip("this kernel has no netem")
    with Lab(racks=2, hosts=1, latency="20ms", name=name) as lab:
        assert "latency and loss of uplinks by netem" in lab.notes
        start = monotonic()
        with Stream(lab, 0, 1):
            assert monotonic() - start >= 0.08  # there and back, through two uplinks each way


def in_a_fork(work: Callable[[], str]) -> str:
    """What this says in a process of its own, which then leaves without a farewell."""
    reads, writes = os.pipe()

    def be_child() -> NoReturn:
        try:
            os.write(writes, work().encode())
        finally:
            os._exit(0)

    pid = fork(be_child)
    os.close(writes)
    with os.fdopen(reads) as pipe:
        said = pipe.read()
    os.waitpid(pid, 0)
    return said


def test_without_root(new_name: Callable[[], str]) -> None:
    def leave_one_behind() -> str:
        lab = Lab(hosts=1, name=new_name())
        lab.up()
        return lab.name

    def try_as_nobody() -> str:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        try:
            Lab(hosts=2).up()
        except BaseException as error:
            return f"{type(error).__name__}: {error}"
        return "it is up"

    message = (
        "LabError: the lab needs root (CAP_SYS_ADMIN and CAP_NET_ADMIN) to make network "
        "namespaces; run it with sudo or in a privileged container, or use local workers without "
        "shaping instead (--workers N)"
    )
    assert in_a_fork(try_as_nobody) == message
    abandoned = in_a_fork(leave_one_behind)
    try:
        assert in_a_fork(try_as_nobody) == message  # who can't clean up isn't told of that
    finally:
        sweep()
    assert named_remains(abandoned) == []


# What a message costs


def test_hosts_that_share_cores_take_turns_unless_the_cluster_says_otherwise() -> None:
    cores = len(os.sched_getaffinity(0))
    many = Lab(racks=2, hosts=10 * cores)
    assert many.cluster.latency.seconds == pytest.approx(
        ASSUMED_LATENCY.seconds + 20 * MESSAGE_CORE_SECONDS
    )
    assert Lab(hosts=1).cluster.latency == ASSUMED_LATENCY
    declared = Cluster.regular([10 * cores], latency=Duration.parse("50us"))
    assert Lab.of(declared).cluster.latency == declared.latency
