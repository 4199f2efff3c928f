"""Training goes on bit by bit as without them, while strangers try all they can."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from time import sleep
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.training.workers import fingerprint, one_value
from tests.transports.strangers import Eavesdropper, calling
from thalweg.launch.supervisor import SendMessage, run_workers
from thalweg.training import Run, attach
from thalweg.training.exchanges.tree import TreeExchange
from thalweg.transports import Label, TcpTransport, Transport, wrapping_transports
from thalweg.transports import best_effort as over_post
from thalweg.transports import tcp as over_tcp
from thalweg.transports.best_effort import BestEffortTransport
from thalweg.transports.endpoint import Endpoint

ROOT = Path(__file__).parent.parent.parent
SIZE, BATCH, STEPS = 3, 12, 160
FIRST, LAST = 20, 140  # between these steps
SECONDS = 240.0
MEMORY = 16 << 20  # bytes of growth that are noise


class Siege:
    """Of one rank, by a process of its own; and by a member that has lost its mind."""

    def __init__(
        self,
        endpoint: Endpoint,
        number: int,
        folder: Path,
        transport: BestEffortTransport | None = None,
    ) -> None:
        self._door = endpoint
        self._post = transport
        tap = Eavesdropper(endpoint.record.endpoint)
        with calling(endpoint.identity, replace(endpoint.record, endpoint=tap.endpoint)) as member:
            for _ in range(5):
                member.say(self._header(1000), os.urandom(1000))
            sleep(0.3)
        recording = folder / f"{endpoint.rank}-{endpoint.record.endpoint.rpartition(':')[2]}"
        recording.write_bytes(bytes(tap.recordings[0]))
        tap.close()
        arguments = [
            endpoint.record.endpoint,
            endpoint.record.key.hex(),
            str(endpoint.rank),
            str(number),
        ]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.transports.strangers", *arguments, str(recording)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
        )
        others = replace(
            endpoint.identity, record=replace(endpoint.record, rank=(endpoint.rank + 1) % SIZE)
        )
        for _ in range(number // 50):
            with calling(others, endpoint.record) as liar:  # in another's name
                liar.say(self._header(1), b"x")
            for said in (
                (self._header(2), b"x"),
                (self._header(1 << 62), b"x"),
                (self._header(1), b"xy"),
                (b"\xff" + os.urandom(len(self._header(0)) - 9) + bytes(8), b""),  # no message
                (os.urandom(len(self._header(0))), b"x"),
            ):
                with calling(endpoint.identity, endpoint.record) as member:
                    member.say(*said)

    def over(self) -> int:
        """How much was tried."""
        said, _ = self._process.communicate(timeout=SECONDS)
        return int(said)

    def _header(self, nbytes: int) -> bytes:
        """Of no step that ever comes."""
        step = 1 << 40
        if self._post is not None:
            return over_post.POST_HEADER_STRUCT.pack(
                over_post.MessageKind.LEAVE, 0, step, 0, 0, nbytes
            )
        return over_tcp.TCP_HEADER_STRUCT.pack(1 << 40, *Label(step, 0, 0, 1), nbytes)


def besiege(run: Run, transport: TcpTransport, number: int, folder: Path) -> list[Siege]:
    """At all doors of this rank."""
    sieges = [Siege(transport._wire.endpoint, number, folder)]
    if isinstance(run._session.exchange, TreeExchange):
        post = run._session.exchange.relay._messages
        sieges.append(Siege(post._endpoint, number, folder, post))
    return sieges


def trained(sync: str, number: int, folder: Path) -> list[dict[str, Any]]:
    """With so many attempts against every endpoint of every rank."""
    held: list[TcpTransport] = []

    def kept(transport: Transport) -> Transport:
        assert isinstance(transport, TcpTransport)
        held.append(transport)
        return transport

    def work(rank: int, report: SendMessage) -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 300), nn.Tanh(), nn.Linear(300, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.005, momentum=0.9)
        data = TensorDataset(torch.randn(BATCH * STEPS, 20), torch.randn(BATCH * STEPS, 1))
        with wrapping_transports(kept):
            run = attach(model, optimizer, data=data, batch=BATCH, plan=sync, timeout=SECONDS)
        sieges: list[Siege] = []
        tried, memory = 0, 0
        for x, y in run.batches(0):
            if run.step == FIRST:
                memory = psutil.Process().memory_info().rss
                sieges = besiege(run, held[0], number, folder) if number else []
            if run.step == LAST:
                tried = sum(siege.over() for siege in sieges)
            loss = run.mean((model(x) - y).square().mean(1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sleep(0.01)
        result = {
            "steps": run.step,
            "print": fingerprint(model),
            "grown": psutil.Process().memory_info().rss - memory,
            "refused": dict(run.report().rejected),
            "tried": tried,
        }
        run.close()
        return result

    return run_workers(SIZE, work, timeout=SECONDS, debug=True)


@pytest.mark.parametrize(
    ("sync", "number"),
    [
        ("ring", 400),
        pytest.param("ring", 3400, marks=pytest.mark.slow),
        pytest.param("gc(stragglers=1)", 1700, marks=pytest.mark.slow),
    ],
)
def test_strangers_change_nothing(
    sync: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10,000 attempts in all where it is slow: 3400 on each of three ranks, or 1700 on both doors
    of each."""
    monkeypatch.setenv("THALWEG_ENCRYPTION", "on")
    calm, besieged = (trained(sync, attempts, tmp_path) for attempts in (0, number))
    assert one_value(besieged, "steps") == one_value(calm, "steps") == STEPS
    assert one_value(besieged, "print") == one_value(calm, "print")
    assert sum(result["tried"] for result in besieged) >= SIZE * number
    for result, before in zip(besieged, calm, strict=True):
        assert not before["refused"].get("stranger")
        refused = result["refused"]
        assert sum(refused.values()) >= number, refused
        kinds = {"stranger", "unfinished", "forged", "malformed", "truncated", "too_large"}
        assert kinds | {"tampered"} <= refused.keys()
        assert result["grown"] - before["grown"] < MEMORY
