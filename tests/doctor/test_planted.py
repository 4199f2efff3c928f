"""Faults planted in real hosts and real processes: each is found, and the line names who it is and
says what to do."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path
from time import time

import pytest
import torch

import thalweg
from tests.conftest import LabOf
from tests.doctor.patients import examined_here, examined_in, problems
from thalweg.doctor import Finding, ping
from thalweg.doctor import run_checks as examination
from thalweg.doctor.finding import failed
from thalweg.doctor.limits import files_needed
from thalweg.doctor.run_checks import examine
from thalweg.lab import Lab
from thalweg.lab.fabric import Sockets
from thalweg.lab.namespaces import set_host_identity
from thalweg.lab.packet_faults import set_blackhole
from thalweg.launch.worker_process import SendMessage


def only(findings: list[Finding], check: str) -> Finding:
    """The one that isn't fine. (Addresses that nobody has a name for take long to look up.)"""
    [found] = [finding for finding in problems(findings) if finding.check != "name lookups"]
    print(found.line)
    assert found.check == check
    assert found.remedy
    return found


# In the lab, where hosts are hosts


@pytest.mark.usefixtures("needs_lab")
def test_a_host_whose_name_is_its_loopback(lab_of: LabOf, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n127.0.1.1 host1\n")

    def plant(rank: int) -> None:
        if rank == 1:
            set_host_identity("host1", tmp_path / "hosts")
            os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
        os.environ.pop("GLOO_SOCKET_IFNAME", None)

    lab = lab_of(racks=2, hosts=2, uplink="100mbit")
    found = examined_in(lab, plant)
    trap = only(found, "host name")
    assert (trap.verdict, trap.ranks, trap.hosts) == ("fail", (1,), ("host1",))
    assert trap.text.startswith(
        "rank 1 on host1: the host's own name, host1, resolves to 127.0.1.1"
    )
    assert trap.remedy.startswith("set GLOO_SOCKET_IFNAME to eth0, or give host1 its own address")


@pytest.mark.usefixtures("needs_lab")
def test_that_name_does_not_matter_where_gloo_is_told_the_interface(
    lab_of: LabOf, tmp_path: Path
) -> None:
    hosts = "127.0.0.1 localhost\n127.0.1.1 host1\n10.84.0.2 b\n::ffff:10.84.0.2 b\n"
    (tmp_path / "hosts").write_text(hosts)

    def plant(rank: int) -> None:
        if rank == 1:
            set_host_identity("host1", tmp_path / "hosts")

    lab = lab_of(hosts=2)
    assert problems(examined_in(lab, plant)) == []


@pytest.mark.usefixtures("needs_lab")
def test_an_interface_that_leads_nowhere(name: str) -> None:
    def plant(rank: int) -> None:
        if rank == 1:
            os.environ["THALWEG_IFNAME"] = "mgmt0"

    with Lab(hosts=3, name=name) as lab:
        with Sockets() as sockets:
            host = sockets[lab.wiring.host("host1")]
            host.link("add", ifname="mgmt0", kind="veth", peer="far")
            index = host.link_lookup(ifname="mgmt0")[0]
            host.addr("add", index=index, address="172.30.0.1", prefixlen=24)
            for end in ("mgmt0", "far"):
                host.link("set", ifname=end, state="up")
        found = examined_in(lab, plant)
    cut_off = only(found, "reachability")
    assert (cut_off.verdict, cut_off.ranks, cut_off.hosts) == ("fail", (1,), ("host1",))
    assert cut_off.text.startswith("nobody reaches rank 1 on host1 at 172.30.0.1 (mgmt0): ")
    assert "THALWEG_IFNAME" in cut_off.remedy


@pytest.mark.usefixtures("needs_lab")
def test_an_interface_that_is_not_there_and_the_rest_is_still_looked_at(lab_of: LabOf) -> None:
    def plant(rank: int) -> None:
        if rank == 0:
            os.environ["THALWEG_IFNAME"] = "ib0"

    lab = lab_of(hosts=2)
    found = examined_in(lab, plant)
    absent = only(found, "interface")
    assert absent.verdict == "fail"
    assert absent.text.startswith("rank 0 on host0: THALWEG_IFNAME names the interface 'ib0'")
    assert absent.remedy == "use one of eth0, lo"
    assert [f.verdict for f in found if f.check == "reachability"] == ["ok"]


@pytest.mark.usefixtures("needs_lab")
def test_a_pair_between_which_nothing_passes(name: str) -> None:
    with Lab(racks=2, hosts=2, nic="100mbit", name=name) as lab:
        set_blackhole(lab.wiring, 0, 2, on=True)
        found = examined_in(lab)
    pair = only(found, "reachability")
    assert (pair.verdict, pair.ranks, pair.hosts) == ("fail", (0, 2), ("host0", "host2"))
    one, other = pair.text.split("; ")
    assert one == "rank 0 on host0 can't reach rank 2 on host2 at 10.84.1.1 (eth0): no route"
    assert other == "rank 2 on host2 can't reach rank 0 on host0 at 10.84.0.1 (eth0): timed out"
    assert "let all TCP ports through" in pair.remedy


@pytest.mark.usefixtures("needs_lab")
def test_a_slow_host(name: str) -> None:
    with Lab(hosts=3, nic=["100mbit", "100mbit", "10mbit"], name=name) as lab:
        found = examined_in(lab)
    slow = only(found, "rates")
    assert (slow.verdict, slow.ranks, slow.hosts) == ("warn", (2,), ("host2",))
    assert slow.text.startswith("rank 2 on host2: flows get ")


@pytest.mark.usefixtures("needs_lab")
def test_a_clock_that_is_off(lab_of: LabOf) -> None:
    def work(rank: int, report: SendMessage) -> list[str]:
        if rank == 1:
            ping.time = lambda: time() + 3.0  # type: ignore[attr-defined]
        found = examine(5.0)
        return [f"{f.verdict} {f.line}" for f in problems(list(found.findings)) if found.reports]

    lab = lab_of(hosts=2)
    [line], _ = lab.run(work, process_group=False)
    assert line.startswith("warn clocks: rank 1 on host1: the clock is 3 s ahead of host0's")
    assert "NTP" in line


@pytest.mark.usefixtures("needs_lab")
def test_a_healthy_lab_has_nothing(lab_of: LabOf) -> None:
    lab = lab_of(racks=2, hosts=2, uplink="100mbit")
    assert problems(examined_in(lab)) == []


# In processes of this machine


def test_another_version_of_thalweg() -> None:
    def plant(rank: int) -> None:
        if rank == 1:
            thalweg.__version__ = "0.0.9"

    found, *others = examined_here(2, plant)
    mixed = only(list(found.findings), "versions")
    assert (mixed.verdict, mixed.ranks) == ("fail", (1,))
    assert f"thalweg differs: rank 1 on {mixed.hosts[0]}: 0.0.9; rank 0" in mixed.text
    assert not any(other.reports for other in others)


def test_another_version_of_torch_is_a_warning() -> None:
    def plant(rank: int) -> None:
        if rank == 0:
            torch.__version__ = "2.6.0"

    found = [f for f in examined_here(3, plant)[0].findings if f.check != "threads"]
    mixed = only(found, "versions")  # and more workers than cores, perhaps
    assert (mixed.verdict, mixed.ranks) == ("warn", (0,))
    assert "torch differs: rank 0 on " in mixed.text


def test_too_few_open_files() -> None:
    few = files_needed(2) - 1

    def plant(rank: int) -> None:
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_NOFILE, (few, few))

    limit = only(list(examined_here(2, plant)[0].findings), "open files")
    assert (limit.verdict, limit.ranks) == ("fail", (1,))
    assert f"{few} may be open, and a worker of 2 needs {few + 1}" in limit.text
    assert limit.remedy.startswith(f"run ulimit -n {few + 1}")


def test_a_cluster_file_for_others(tmp_path: Path) -> None:
    file = tmp_path / "three.toml"
    file.write_text('[[rack]]\nname = "a"\nhosts = 3\n')

    def plant(rank: int) -> None:
        os.environ["THALWEG_CLUSTER"] = str(file)

    wrong = only(list(examined_here(2, plant)[0].findings), "cluster file")
    assert (wrong.verdict, wrong.ranks) == ("fail", (0, 1))
    assert "the cluster has 3 workers, and 2 were started" in wrong.text


def test_two_secrets() -> None:
    def plant(rank: int) -> None:
        os.environ["THALWEG_SECRET"] = "0123456789abcdef" if rank else "fedcba9876543210"

    found = examined_here(3, plant)[0]
    wrong = [f for f in found.findings if f.check == "secret"]
    assert [(f.verdict, f.ranks) for f in wrong] == [("fail", (0,))]
    assert "0123456789abcdef" not in str(found.packed())


def test_who_never_comes() -> None:
    def plant(rank: int) -> None:
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    found, *_ = examined_here(3, plant, timeout=2.0)
    absent = [f for f in problems(list(found.findings)) if f.check == "ranks"]
    assert [(f.verdict, f.ranks, f.text) for f in absent] == [
        ("fail", (2,), "rank 2 hasn't joined within 2 s")
    ]


def test_who_comes_and_then_dies() -> None:
    def die(*arguments: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def plant(rank: int) -> None:
        examination.max_ping_seconds = lambda number: 1.0
        examination.LEADER_MARGIN_SECONDS = 0.5
        if rank == 1:
            examination.ping_all = die  # type: ignore[assignment]

    found, *_ = examined_here(3, plant)
    gone = [f for f in problems(list(found.findings)) if f.check == "ranks"]
    [(verdict, ranks, text)] = [(f.verdict, f.ranks, f.text) for f in gone]
    assert (verdict, ranks) == ("fail", (1,))
    assert text.startswith("rank 1 on ")
    assert text.endswith(" joined, and then stopped answering")


def test_without_rank_0_the_others_say_so() -> None:
    def plant(rank: int) -> None:
        examination.LEADER_MARGIN_SECONDS = 0.5
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    [found] = examined_here(2, plant, timeout=1.0)
    assert found.reports
    assert failed(found.findings)
    [absent] = [f for f in found.findings if f.check == "ranks"]
    assert absent.text.startswith("rank 0 hasn't joined within 1.5 s, as rank 1 on ")


def test_a_store_that_nobody_can_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a worker of a launcher whose rank 0 isn't there; and MASTER_ADDR is a trap."""
    variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    for name, value in {**variables, "MASTER_ADDR": "localhost", "MASTER_PORT": "9"}.items():
        monkeypatch.setenv(name, value)
    found = examine(0.5)
    wrong = {f.check: f for f in found.findings if f.verdict == "fail"}
    assert found.reports
    assert wrong["store"].text.startswith("rank 1 can't reach the store at localhost:9: ")
    assert (
        "MASTER_ADDR is localhost, which is this host on every host" in wrong["meeting point"].text
    )
    assert wrong["meeting point"].ranks == (1,)
    assert all(f.remedy for f in wrong.values())
