"""The store of a run, as rank 0 hosts it and the other ranks connect to it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import replace

import psutil
import pytest
from torch.distributed import TCPStore

from thalweg.errors import LaunchError
from thalweg.launch.launcher_variables import RankAssignment, read_rank_assignment
from thalweg.launch.store import open_store


def seat(rank: int, port: int) -> RankAssignment:
    return RankAssignment(
        rank=rank,
        size=2,
        local_rank=rank,
        address="127.0.0.1",
        port=port,
        hosted=False,
        launcher="environment",
    )


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def test_alone_needs_no_network() -> None:
    store = open_store(read_rank_assignment({}), timeout=1)
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_rank_0_serves_all_and_torch_may_share_the_port() -> None:
    port = free_port()
    mine = open_store(seat(0, port), timeout=10)
    others = open_store(seat(1, port), timeout=10)
    torchs = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, multi_tenant=True)
    torchs.set("key", "torch's")
    mine.set("key", "ours")
    assert others.get("key") == b"ours"
    assert torchs.get("key") == b"torch's"


def test_at_an_address_it_listens_there_alone() -> None:
    """At a name, which others may resolve otherwise, torch decides."""

    def listens(address: str) -> set[str]:
        port = free_port()
        there = replace(seat(0, port), address=address)
        store = open_store(there, timeout=10)
        store.set("key", "value")
        connections = psutil.Process().net_connections("tcp")
        return {
            found.laddr.ip
            for found in connections
            if found.status == psutil.CONN_LISTEN and found.laddr.port == port
        }

    assert listens("127.0.0.1") == {"127.0.0.1"}
    assert listens("localhost")


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(LaunchError, match=f"port {port} is in use; set MASTER_PORT"):
            open_store(seat(0, port), timeout=5)


UNREACHABLE = """
import sys
from thalweg.errors import TransportError
from thalweg.launch.launcher_variables import RankAssignment
from thalweg.launch.store import open_store
for port in sys.argv[1:]:
    seat = RankAssignment(rank=1, size=2, local_rank=0, address="127.0.0.1", port=int(port),
                hosted=False, launcher="environment")
    print(port, flush=True)
    try:
        open_store(seat, timeout=0.5)
    except TransportError as error:
        print(error, flush=True)
"""


def test_what_a_client_says_that_cannot_reach_the_store() -> None:
    """One line if nobody is there, and of a server that is no store; nothing else on its two
    streams, with torch as talkative as it can be."""
    nobody = free_port()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-c", UNREACHABLE, str(nobody), str(port)],
            env={**os.environ, "TORCH_CPP_LOG_LEVEL": "INFO"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=True,
        )
    of_nobody, of_a_server = done.stdout.removeprefix(f"{nobody}\n").split(f"{port}\n")
    assert of_nobody == (
        f"rank 1 can't reach the store at 127.0.0.1:{nobody}: Connection refused; check that rank 0"
        " is running, and that no firewall blocks the address\n"
    )
    assert "doesn't answer as a store; " in of_a_server
