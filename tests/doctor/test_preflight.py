"""What `attach()` notices in passing: one line for each trap, on the rank that it concerns, and
nothing on a healthy run."""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import thalweg
from thalweg.doctor.limits import files_needed
from thalweg.doctor.local_checks import preflight, publish
from thalweg.errors import RunError
from thalweg.lab import Lab
from thalweg.lab.namespaces import set_host_identity
from thalweg.launch.supervisor import run_workers
from thalweg.launch.worker_process import SendMessage
from thalweg.members.world import World
from thalweg.training import attach
from thalweg.transports.store_client import StoreClient

Lines = list[tuple[int, str]]
LIMIT = 60.0


def attached(plant: Callable[[int], None]) -> Callable[[int, SendMessage], dict[str, Any]]:
    def work(rank: int, report: SendMessage) -> dict[str, Any]:
        logging.getLogger().handlers.clear()  # pytest's: what is logged goes to stderr, as ever
        plant(rank)
        model = nn.Linear(2, 1)
        run = attach(model, torch.optim.SGD(model.parameters(), lr=0.1), plan="ring", timeout="20s")
        run.close()
        return {}

    return work


def here(size: int, plant: Callable[[int], None]) -> Lines:
    """What the ranks write to stderr."""
    logged: Lines = []

    def heard(rank: int, stream: str, line: str) -> None:
        logged.append((rank, line))

    run_workers(size, attached(plant), timeout=LIMIT, on_line=heard)
    return logged


def in_a_lab(hosts: int, name: str, plant: Callable[[int], None]) -> Lines:
    logged: Lines = []

    def heard(rank: int, stream: str, line: str) -> None:
        if "[c10d]" not in line:  # torch misses the names behind addresses
            logged.append((rank, line))

    with Lab(hosts=hosts, name=name) as lab:
        lab.run(attached(plant), process_group=False, timeout="60s", on_line=heard)
    return logged


def test_a_healthy_run_has_nothing() -> None:
    assert here(2, lambda rank: None) == []


@pytest.mark.usefixtures("needs_lab")
def test_a_healthy_lab_has_nothing(name: str) -> None:
    assert in_a_lab(2, name, lambda rank: None) == []


def test_few_open_files_are_told_by_the_rank_that_has_them() -> None:
    few = files_needed(3) - 1

    def plant(rank: int) -> None:
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_NOFILE, (few, few))

    [(rank, line)] = here(3, plant)
    assert rank == 1
    assert line.startswith("open files: rank 1 on ")
    assert f"; run ulimit -n {few + 1}" in line


def test_versions_that_differ_are_told_by_rank_0() -> None:
    def plant(rank: int) -> None:
        if rank == 1:
            thalweg.__version__ = "0.0.9"
            torch.__version__ = "2.6.0"

    ranks, lines = zip(*here(3, plant), strict=True)
    assert ranks == (0, 0)
    assert all(line.startswith("versions: ") and "rank 1 on " in line for line in lines)
    assert "thalweg differs" in lines[0]
    assert "torch differs" in lines[1]


@pytest.mark.usefixtures("needs_lab")
def test_a_host_name_that_is_loopback_is_told_where_gloo_would_take_it(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n127.0.1.1 host1\n")

    def plant(rank: int) -> None:
        if rank == 1:
            set_host_identity("host1", tmp_path / "hosts")
        os.environ.pop("GLOO_SOCKET_IFNAME", None)

    [(rank, line)] = in_a_lab(2, name, plant)
    assert rank == 1
    assert line.startswith(
        "host name: rank 1 on host1: the host's own name, host1, resolves to 127"
    )
    assert "set GLOO_SOCKET_IFNAME to eth0" in line


@pytest.mark.usefixtures("needs_lab")
def test_a_loopback_address_among_hosts_is_told(name: str) -> None:
    """Of `quick` itself: with such an address nobody would get through to train."""

    def work(rank: int, report: SendMessage) -> list[str]:
        world = World.join(20)
        if rank == 0:
            world = replace(world, address="127.0.1.1")
        publish(world)
        world.leave(20, world.abort_flag())
        return [finding.line for finding in preflight(world)]

    with Lab(hosts=2, name=name) as lab:
        [line], nothing = lab.run(work, process_group=False)
    assert nothing == []
    assert line.startswith("meeting point: rank 0 on host0 would publish 127.0.1.1")


class _Counting(StoreClient):
    """Counts what the store is asked."""

    asked = 0

    def call(self, call: Any) -> Any:
        self.asked += 1
        return super().call(call)


def test_it_costs_little_and_waits_for_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """One question to the store for each; and who hasn't published isn't waited for."""

    def work(rank: int, report: SendMessage) -> dict[str, Any]:
        world = World.join(20)
        line = _Counting(world.store, rank)
        with caplog.at_level(logging.DEBUG, logger="thalweg"):
            if rank == 0:
                publish(replace(world, store_client=line))
                preflight(replace(world, store_client=line))
        world.leave(20, world.abort_flag())
        return {"asked": line.asked, "logged": caplog.messages}

    first, second = run_workers(2, work, timeout=LIMIT)
    assert (first["asked"], second["asked"]) == (2, 0)
    assert not [line for line in first["logged"] if "failed" in line]  # as if it had given up


class _Broken(StoreClient):
    def call(self, call: Any) -> Any:
        raise RunError("the store is gone", "start again")


def test_it_never_raises() -> None:
    def work(rank: int, report: SendMessage) -> dict[str, int]:
        world = World.join(20)
        broken = replace(world, store_client=_Broken(world.store, rank))
        publish(broken)
        return {"found": len(preflight(broken))}

    assert run_workers(2, work, timeout=LIMIT) == [{"found": 0}] * 2
