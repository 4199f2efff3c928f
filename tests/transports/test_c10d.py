"""What is Gloo's own: nothing comes back, and threads that must not outlive the transport."""

from __future__ import annotations

import os
import signal
import sys
import threading
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.transports.ranks import LABEL, hear, run_ranks, soon, tell
from thalweg.errors import PeerLost, WorkerFailed
from thalweg.runtime import World
from thalweg.runtime.supervisor import Report, run_command, run_workers
from thalweg.transports import C10dTransport, Transport


def receivers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("thalweg-from")]


def test_a_peer_that_dies_between_header_and_bytes() -> None:
    told: list[str] = []

    def work(rank: int, report: Report) -> None:
        World.join(20).join_process_group()
        group = dist.new_group()
        if rank == 1:
            header = torch.tensor([*LABEL, 1_000_000])
            group.send([header], 0, 0).wait(timedelta(seconds=20))
            os.kill(os.getpid(), signal.SIGKILL)
        transport = C10dTransport(group)
        with pytest.raises(PeerLost) as lost:
            transport.receive(1, LABEL, soon())
        transport.close()
        assert not receivers()
        report({"said": lost.value.problem})

    with pytest.raises(WorkerFailed, match="rank 1 was killed by SIGKILL"):
        run_workers(2, work, grace=15, timeout=60, on_message=lambda _, m: told.append(m["said"]))
    [said] = told
    assert said.startswith("rank 0 lost its connection to rank 1 (")
    assert ".cc" not in said


def test_a_peer_that_closed_is_told_apart_from_one_that_died() -> None:
    def work(transport: Transport) -> None:
        tell(transport, 1 - transport.rank)
        hear(transport, 1 - transport.rank)
        if transport.rank == 1:
            transport.close()
        else:
            with pytest.raises(PeerLost, match="rank 1 has closed its connection to rank 0; look"):
                transport.receive(1, LABEL, soon())

    run_ranks("c10d", 2, work)


class _SlowGroup:
    """Of a message's two parts, the second leaves 0.3 s after the first."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.recv = group.recv

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> dist.Work:
        work = self._group.send(tensors, peer, tag)
        threading.Event().wait(0.3)
        return work


def test_a_goodbye_never_comes_between_header_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo would take the bytes for a header, and abort the process that receives them."""

    def work(transport: Transport) -> None:
        tell(transport, 1 - transport.rank)
        hear(transport, 1 - transport.rank)
        if transport.rank == 0:
            assert isinstance(transport, C10dTransport)
            monkeypatch.setattr(transport, "_group", _SlowGroup(transport._group))
            closing = threading.Timer(0.15, transport.close)
            closing.start()
            transport.send(1, LABEL, np.ones(10_000), soon())
            closing.join()
        else:
            assert transport.receive(0, LABEL, soon()).nbytes == 80_000

    run_ranks("c10d", 2, work)


def test_a_long_silence_is_no_loss() -> None:
    """The group's timeout is for its collectives, not for these receives."""

    def work(rank: int, report: Report) -> None:
        world = World.join(20)
        world.join_process_group()
        transport = C10dTransport(dist.new_group(timeout=timedelta(seconds=0.2)))
        tell(transport, 1 - rank)
        hear(transport, 1 - rank)
        threading.Event().wait(0.6)
        tell(transport, 1 - rank, 1)
        hear(transport, 1 - rank, 1)
        transport.close()

    run_workers(2, work, timeout=60, grace=1, debug=True)


def test_no_thread_is_left_when_all_close_nor_when_only_one_does() -> None:
    def work(transport: Transport) -> None:
        for peer in {0, 1, 2} - {transport.rank}:
            tell(transport, peer)
        for peer in {0, 1, 2} - {transport.rank}:
            hear(transport, peer)
        if transport.rank != 2:
            transport.close()
            assert not receivers()

    run_ranks("c10d", 3, work)


SCRIPT = """
import os, sys
from time import monotonic
import numpy as np
from thalweg.errors import PeerLost
from thalweg.runtime import World
from thalweg.transports import Label
world = World.join(30)
rank, label, array = world.rank, Label(0, 0, 0, 1), np.ones(300_000)
for name in ("zeromq", "c10d"):
    transport = world.transport(name)
    for _ in range(3):
        sending = transport.send((rank + 1) % 3, label, array, monotonic() + 30)
        transport.receive((rank + 2) % 3, label, monotonic() + 30)
        sending.wait(monotonic() + 30)
if sys.argv[1:] == ["die"]:
    if rank == 2:
        os.kill(os.getpid(), 9)
    try:
        transport.receive(2, label, monotonic() + 30)
    except PeerLost:
        print("lost", flush=True)
print("end", flush=True)
"""


@pytest.mark.parametrize("how", ["all live", "die"])
def test_an_interpreter_ends_well_without_close(how: str, tmp_path: Path) -> None:
    """A thread in C++ at that moment would end it in abort()."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    lines: list[str] = []

    command = [sys.executable, "-W", "ignore", str(script), how]
    run_command(3, command, on_line=lambda _, __, line: lines.append(line), grace=20, timeout=60)
    if how == "die":
        killed = "rank 2 was killed by SIGKILL (out of memory?); others go on"
        assert sorted(lines) == ["end"] * 2 + ["lost"] * 2 + [killed]
    else:
        assert lines == ["end"] * 3


def test_a_group_that_was_destroyed_first() -> None:
    def work(rank: int, report: Report) -> None:
        world = World.join(20)
        transport = world.transport("c10d")
        tell(transport, 1 - rank)
        hear(transport, 1 - rank)
        dist.destroy_process_group()
        transport.close()
        assert not receivers()

    run_workers(2, work, timeout=60, grace=1, debug=True)
