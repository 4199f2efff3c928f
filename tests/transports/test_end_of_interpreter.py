"""A script that ends without closing its transport."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from thalweg.launch.supervisor import run_command

SCRIPT = """
import os, sys
from time import monotonic
import numpy as np
from thalweg.errors import PeerLost
from thalweg.members.world import World
from thalweg.transports import Address, Label
world = World.join(30)
rank, label, array = world.rank, Label(0, 0, 0, 1), np.ones(300_000)
transport = world.transport()
for _ in range(3):
    sending = transport.send((rank + 1) % 3, label, array, monotonic() + 30)
    transport.receive_any([Address((rank + 2) % 3, label)], monotonic() + 30)
    sending.wait(monotonic() + 30)
if sys.argv[1:] == ["die"]:
    if rank == 2:
        os.kill(os.getpid(), 9)
    try:
        transport.receive_any([Address(2, label)], monotonic() + 30)
    except PeerLost:
        print("lost", flush=True)
print("end", flush=True)
"""


@pytest.mark.parametrize("how", ["all live", "die"])
def test_an_interpreter_ends_well_without_close(how: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    lines: list[str] = []

    command = [sys.executable, "-W", "ignore", str(script), how]
    run_command(3, command, on_line=lambda _, __, line: lines.append(line), grace=20, timeout=60)
    if how == "die":
        killed = "rank 2 was killed by SIGKILL (out of memory?); the others continue"
        assert sorted(lines) == ["end"] * 2 + ["lost"] * 2 + [killed]
    else:
        assert lines == ["end"] * 3
