"""`thalweg lab` as a user types it, in labs of their own names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from shlex import split

import pytest

from tests.cli.command import thalweg
from tests.lab.remains import named_remains, wait_until
from thalweg.cli.lab import down
from thalweg.errors import UsageError
from thalweg.lab import Lab, registry

NAME = f"cli{os.getpid()}"
OTHER = f"{NAME}-other"
pytestmark = pytest.mark.usefixtures("needs_lab")


def lab(command: str, folder: Path, name: str = NAME) -> subprocess.CompletedProcess[str]:
    return thalweg("lab", *split(command), "--name", name, cwd=folder)


@pytest.fixture(scope="module")
def standing(needs_lab: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("lab")
    done = lab("up 2+1 --nic 100mbit --uplink 50mbit", folder)
    assert (done.returncode, done.stderr) == (0, "")
    yield
    lab("down", folder)


@pytest.fixture
def two_racks(standing: None, tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    Lab.find(NAME).restore()


def links(folder: Path) -> tuple[dict[str, dict[str, dict[str, object]]], ...]:
    """By host and by rack, as `status` tells them."""
    document = json.loads(lab("status --json -", folder).stdout)
    hosts = {row["host"]: row for row in document["rows"]}
    return hosts, {row["rack"]: row for row in document["settings"]["uplinks"]}


def test_hosts_addresses_and_rates(two_racks: Path) -> None:
    hosts, racks = links(two_racks)
    assert [(row["rack"], row["ranks"], row["address"]) for row in hosts.values()] == [
        ("rack0", [0], "10.84.0.1"),
        ("rack0", [1], "10.84.0.2"),
        ("rack1", [2], "10.84.1.1"),
    ]
    assert {row["nic_out"]["rate"] for row in hosts.values()} == {"100mbit"}
    assert {row["uplink_in"]["rate"] for row in racks.values()} == {"50mbit"}
    shown = lab("status", two_racks).stdout
    assert "host2" in shown
    assert "TCP congestion control" in shown


def test_links_change_and_change_back(two_racks: Path) -> None:
    assert lab("degrade --rack 0 --rate 20mbit --direction in", two_racks).returncode == 0
    assert lab("cut --host 2 --direction out", two_racks).returncode == 0
    assert lab("flow --rack 1 --direction out", two_racks).returncode == 0
    hosts, racks = links(two_racks)
    assert racks["rack0"]["uplink_in"]["rate"] == "20mbit"
    assert racks["rack0"]["uplink_out"]["rate"] == "50mbit"
    assert hosts["host2"]["nic_out"]["cut"]
    assert not hosts["host2"]["nic_in"]["cut"]
    assert racks["rack1"]["uplink_out"]["flows"] == 1
    shown = lab("status", two_racks).stdout
    assert "20mbit (of 50mbit)" in shown
    assert "CUT" in shown
    assert lab("heal --host 2", two_racks).returncode == 0
    assert lab("restore", two_racks).returncode == 0
    hosts, racks = links(two_racks)
    ways = [row[way] for row in racks.values() for way in ("uplink_out", "uplink_in")]
    assert [(way["rate"], way["flows"], way["cut"]) for way in ways] == [("50mbit", 0, False)] * 4


SLEEPER = "echo here; sleep 3"
SCRIPT = """
import os, socket
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank())])
dist.all_reduce(total)
names = "RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR GLOO_SOCKET_IFNAME".split()
print(socket.gethostname(), total.item(), *(os.environ[name] for name in names))
dist.destroy_process_group()
"""


def test_a_script_of_ones_own_runs_on_every_host(two_racks: Path) -> None:
    (two_racks / "train.py").write_text(SCRIPT)
    done = thalweg("lab", "run", "--name", NAME, "--", sys.executable, "train.py", cwd=two_racks)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == [
        f"[{rank}] host{rank} 3.0 {rank} 3 0 10.84.255.1 eth0" for rank in range(3)
    ]


def test_a_lab_only_for_this_script_is_gone_afterwards(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = thalweg(
        *split(f"lab run --name {NAME}-once --lab 1x2 --nic 1gbit -- train.py"), cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 2
    assert not list(Path("/var/run/netns").glob(f"*.{NAME}-once.*"))


def test_killing_a_host_is_told_with_its_name(two_racks: Path) -> None:
    running = subprocess.Popen(
        [sys.executable, "-m", "thalweg", *split(f"lab run --name {NAME} -- sh -c"), SLEEPER],
        cwd=two_racks,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert running.stdout is not None
    for _ in range(3):
        running.stdout.readline()
    killed = lab("kill --host 1", two_racks)
    assert "processes on host1 killed" in killed.stdout
    _, stderr = running.communicate(timeout=30)
    assert running.returncode == 0
    assert "rank 1 on host1 was killed by SIGKILL (out of memory?); the others continue" in stderr


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("up 0x3", "'0x3' is not a layout of racks"),
        ("up 256x1", "hosts; use at most 255 racks"),
        (
            "up 1x255",
            "hosts; use at most 255 racks, and 254 hosts in each",
        ),
        ("up --nic fast", "'fast' is not a rate"),
        ("up --nic 1bit", "the lab can't emulate a link of 1bit; give 8kbit to 34gbit"),
        ("up nowhere.toml", "can't read nowhere.toml"),
        (
            "up 2x1",
            "there is a lab '{name}' already; use another name, or take one down with "
            "`thalweg lab down --name {name}`",
        ),
        ("degrade --rack 5 --rate 1mbit", "there is no rack 5; there are 2"),
        ("degrade --host nobody --rate 1mbit", "there is no host 'nobody'; give a rank"),
        ("degrade --rack 0 --rate slow", "'slow' is not a rate"),
        ("degrade --rate 1mbit", "a link belongs to a rack or a host; give one"),
        ("cut --rack 0 --direction up", "'up' is not a direction; give out, in or both"),
        ("kill --host 0", "no process runs on host0; start one"),
    ],
)
def test_mistakes_are_one_line(two_racks: Path, command: str, line: str) -> None:
    done = lab(command, two_racks)
    assert (done.returncode, done.stdout) == (2, "")
    [printed] = done.stderr.splitlines()
    assert line.format(name=NAME) in printed


def test_no_lab_of_that_name(tmp_path: Path) -> None:
    for command in ("status", "down", "restore", "degrade --rack 0 --rate 1mbit"):
        done = lab(command, tmp_path, OTHER)
        assert done.returncode == 2
        assert f"there is no lab '{OTHER}'; make one with `thalweg lab up`" in done.stderr


def test_all_are_those_of_this_user_that_no_process_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(registry, "LAB_REGISTRY_PATH", tmp_path)  # none of this machine's own
    theirs, mine = (Lab(hosts=1, name=f"{NAME}-{whose}") for whose in ("theirs", "mine"))
    with Lab(hosts=1, name=f"{NAME}-used"):
        with monkeypatch.context() as another_user:
            another_user.setenv("SUDO_UID", "31415")
            theirs.up(owned=False)
        try:
            mine.up(owned=False)
            down(every=True)
            assert registry.names() == [f"{NAME}-theirs", f"{NAME}-used"]
        finally:
            mine.down()
            theirs.down()
    printed = capsys.readouterr().out.splitlines()
    stays = f"{NAME}-used stays: process {os.getpid()} uses it; or --name {NAME}-used"
    assert printed == [f"{NAME}-mine is down", stays]


def test_all_and_a_name_contradict_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "LAB_REGISTRY_PATH", tmp_path)
    with pytest.raises(UsageError, match=r"^--all and --name can't be used together; give one"):
        down(name=NAME, every=True)


def test_nothing_stays_of_a_lab_whose_building_is_ended() -> None:
    building = subprocess.Popen(
        [sys.executable, "-m", "thalweg", "lab", "up", "2x20", "--name", OTHER],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_until(lambda: Path(f"/var/run/netns/thalweg.{OTHER}.host1").exists())
    building.terminate()
    assert building.wait(60) == 130
    assert not named_remains(OTHER)


def test_without_a_name_only_ones_own_lab_is_meant(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(folder: Path) -> None:
        for command in ("status", "degrade --rack 0 --rate 1mbit", "kill --host 0", "down"):
            done = thalweg("lab", *split(command), cwd=folder)
            assert (done.returncode, done.stdout) == (2, "")
            [printed] = done.stderr.splitlines()
            assert printed.startswith("thalweg: which lab? there is ")
            assert f"{OTHER} (from {tmp_path})" in printed
            assert printed.endswith("; give --name, or make one with `thalweg lab up`")

    assert lab("up 1x1", tmp_path, OTHER).returncode == 0
    try:
        refused(tmp_path_factory.mktemp("elsewhere"))
        with monkeypatch.context() as another_user:
            another_user.setenv("SUDO_UID", "31415")
            refused(tmp_path)
        done = thalweg("lab", "down", cwd=tmp_path)
        assert (done.returncode, done.stdout) == (0, f"{OTHER} is down\n")
    finally:
        lab("down", tmp_path, OTHER)


def test_flows_are_no_processes_of_a_host(two_racks: Path) -> None:
    assert lab("flow --host 0 --direction out", two_racks).returncode == 0
    assert links(two_racks)[0]["host0"]["processes"] == 0
    done = lab("kill --host 0", two_racks)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "no process runs on host0" in done.stderr


def test_a_lab_of_which_a_part_is_gone_is_told_in_one_line() -> None:
    with Lab(hosts=1, name=OTHER):
        subprocess.run(["ip", "netns", "del", f"thalweg.{OTHER}.host0"], check=True)
        for command in ("status", "degrade --host 0 --rate 10mbit", "run -- true"):
            done = thalweg("lab", *split(command)[:1], "--name", OTHER, *split(command)[1:])
            assert done.returncode in (1, 2)
            assert f"namespace thalweg.{OTHER}.host0 is gone; take the lab down" in done.stderr


def test_a_lab_that_was_half_built_goes_with_the_next(tmp_path: Path) -> None:
    half = subprocess.Popen(
        [sys.executable, "-m", "thalweg", "lab", "up", "2x20", "--name", OTHER],
        stdout=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: Path(f"/var/run/netns/thalweg.{OTHER}.host1").exists())
    finally:
        half.kill()
        half.wait()
    assert named_remains(OTHER)
    assert lab("up 1x1", tmp_path, OTHER).returncode == 0  # under the same name
    assert lab("down", tmp_path, OTHER).returncode == 0
    assert not named_remains(OTHER)
