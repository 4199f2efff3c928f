"""Training goes on bit by bit as without them, while strangers try all they can."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.training.workers import fingerprint, one_value
from tests.transports.strangers import Eavesdropper, pushing
from thalweg.runtime.supervisor import Report, run_workers
from thalweg.training import Run, attach
from thalweg.transports import Label, Transport, ZeroMqTransport
from thalweg.transports import post as over_post
from thalweg.transports import zeromq as over_zeromq
from thalweg.transports.door import Door
from thalweg.transports.post import Post

ROOT = Path(__file__).parent.parent.parent
SIZE, BATCH, STEPS = 3, 12, 160
FIRST, LAST = 20, 140  # between these steps
SECONDS = 240.0
MEMORY = 16 << 20  # bytes of growth that are noise


class Siege:
    """Of one rank, by a process of its own; and by a member that has lost its mind."""

    def __init__(self, door: Door, number: int, folder: Path, post: Post | None = None) -> None:
        self._door = door
        self._post = post
        tap = Eavesdropper(door.card.endpoint)
        with self._member(tap.endpoint) as socket:
            for _ in range(5):
                socket.send_multipart(self._message(door.rank, np.random.bytes(1000)))
            sleep(0.3)
        recording = folder / f"{door.rank}-{door.card.endpoint.rpartition(':')[2]}"
        recording.write_bytes(bytes(tap.recordings[0]))
        tap.close()
        arguments = [door.card.endpoint, door.card.key.hex(), str(number), str(recording)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.transports.strangers", *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
        )
        with self._member(door.card.endpoint) as socket:
            for _ in range(number // 50):
                for frames in (
                    self._message((door.rank + 1) % SIZE, b"x"),  # in another's name
                    self._message(door.rank, b"x", nbytes=2),
                    [*self._message(door.rank, b"x"), b"y"],
                    [np.random.bytes(7)],
                    [np.random.bytes(over_zeromq.HEADER.size), b"x"],
                ):
                    socket.send_multipart(frames)
            sleep(0.3)

    def over(self) -> int:
        """How much was tried."""
        said, _ = self._process.communicate(timeout=SECONDS)
        return int(said)

    def _member(self, endpoint: str) -> Any:
        """A connection with this rank's own keys."""
        keys = self._door._keys
        assert keys is not None
        return pushing(endpoint, server=self._door.card.key, keys=(keys.public, keys.private))

    def _message(self, sender: int, payload: bytes, nbytes: int | None = None) -> list[bytes]:
        """Of no step that ever comes."""
        length, step = len(payload) if nbytes is None else nbytes, 1 << 40
        if self._post is not None:
            fields = (over_post.MAGIC, over_post.VERSION, over_post.Sort.LEAVE, 0)
            place = (sender, self._post.rank, self._post._room, step, 0, 0)
            return [over_post.HEADER.pack(*fields, *place, length), payload]
        label, formation = Label(step, 0, 0, 1), 1 << 40
        fields = (over_zeromq.MAGIC, over_zeromq.VERSION, 0)
        return [over_zeromq.HEADER.pack(*fields, sender, formation, *label, length), payload]


def besiege(run: Run, transport: ZeroMqTransport, number: int, folder: Path) -> list[Siege]:
    """At all doors of this rank."""
    sieges = [Siege(transport._door, number, folder)]
    if run._session.tree is not None:
        post = run._session.tree._relay._post
        sieges.append(Siege(post._door, number, folder, post))
    return sieges


def trained(sync: str, number: int, folder: Path) -> list[dict[str, Any]]:
    """With so many attempts against every door of every rank."""
    held: list[ZeroMqTransport] = []

    def kept(transport: Transport) -> Transport:
        assert isinstance(transport, ZeroMqTransport)
        held.append(transport)
        return transport

    def work(rank: int, report: Report) -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 300), nn.Tanh(), nn.Linear(300, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.005, momentum=0.9)
        data = TensorDataset(torch.randn(BATCH * STEPS, 20), torch.randn(BATCH * STEPS, 1))
        run = attach(
            model, optimizer, data=data, batch=BATCH, sync=sync, timeout=SECONDS, wrap=kept
        )
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
        told = {
            "steps": run.step,
            "print": fingerprint(model),
            "grown": psutil.Process().memory_info().rss - memory,
            "refused": dict(run.refused),
            "tried": tried,
        }
        run.close()
        return told

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
    monkeypatch.setenv("THALWEG_CURVE", "on")
    calm, besieged = (trained(sync, attempts, tmp_path) for attempts in (0, number))
    assert one_value(besieged, "steps") == one_value(calm, "steps") == STEPS
    assert one_value(besieged, "print") == one_value(calm, "print")
    assert sum(result["tried"] for result in besieged) >= SIZE * number
    for result, before in zip(besieged, calm, strict=True):
        assert not before["refused"].get("stranger")
        refused = result["refused"]
        away = refused["stranger"] + refused["unfinished"]
        assert away >= number / 2, refused
        assert {"forged", "malformed", "truncated", "too_large"} <= refused.keys()
        assert result["grown"] - before["grown"] < MEMORY
