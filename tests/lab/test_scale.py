"""As many hosts as the papers have: what they take, and that they work."""

from __future__ import annotations

import os
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
import torch
import torch._dynamo  # what a first run loads anyway
import torch.distributed as dist

from tests.lab.remains import Traces
from thalweg.lab import Lab
from thalweg.launch.worker_process import SendMessage

pytestmark = [pytest.mark.usefixtures("needs_lab"), pytest.mark.slow, pytest.mark.timeout(300)]
NBYTES = 4e9


def held_nbytes(pid: int) -> int:
    """Memory of a process; what it shares with others is counted in parts."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return 1024 * int(line.split()[1])
    raise LookupError(pid)


def total(rank: int, report: SendMessage, go: str | None) -> float:
    vector = torch.full((1000,), float(rank))
    dist.all_reduce(vector)
    report({"step": 1, "pid": os.getpid()})
    deadline = monotonic() + 100
    while go is not None and not Path(go).exists():
        assert monotonic() < deadline
        sleep(0.05)
    return float(vector[-1])


def test_84_hosts_are_up_initialised_and_down_in_little_memory(name: str, tmp_path: Path) -> None:
    pids: list[int] = []
    held: list[int] = []
    measuring = 0.0

    def heard(rank: int, message: dict[str, Any]) -> None:
        nonlocal measuring
        pids.append(message["pid"])
        if len(pids) == 84:
            start = monotonic()
            held.extend(map(held_nbytes, [os.getpid(), *pids]))
            measuring = monotonic() - start
            (tmp_path / "go").touch()

    start = monotonic()
    with Lab(racks=6, hosts=14, nic="1gbit", uplink="10gbit", name=name) as lab:
        built = monotonic() - start
        traces = Traces(name)
        results = lab.run(total, str(tmp_path / "go"), on_message=heard, timeout="200s")
        ran = monotonic() - start - built - measuring
    seconds = monotonic() - start - measuring
    print(f"84 hosts: {seconds:.1f} s (up {built:.1f}, run {ran:.1f}), {sum(held) / 1e9:.2f} GB")
    assert traces.left() == []
    assert results == [sum(range(84))] * 84
    assert sum(held) < NBYTES


def test_156_hosts_work(name: str) -> None:
    with Lab(racks=12, hosts=13, name=name) as lab:
        traces = Traces(name)
        assert lab.run(total, None, timeout="200s") == [sum(range(156))] * 156
    assert traces.left() == []
