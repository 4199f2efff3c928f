"""The exchange by rounds without a run, as a process group or a benchmark uses it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import FileStore

from tests.training.workers import on_ranks, same_bits
from thalweg.catalog import parse_plan
from thalweg.facts import Size
from thalweg.members.world import World
from thalweg.training.buckets import Layout
from thalweg.training.exchanges.compressed import Compression
from thalweg.training.exchanges.rounds import RoundsExchange
from thalweg.training.plan_context import Peers

SIZE, STEPS = 3, 4
TENSORS = {"one": torch.zeros(40, 30), "other": torch.zeros(7), "last": torch.zeros(5, 5)}


@pytest.mark.parametrize("text", ["ring", "halving_doubling", "ring+fp16", "ring+powersgd(rank=2)"])
def test_on_any_store_that_the_ranks_share(text: str, tmp_path: Path) -> None:
    """Values of rank r at step t are r + t everywhere, which no compressor changes."""

    def work(rank: int) -> dict[str, Any]:
        world = World.of(FileStore(str(tmp_path / "store"), SIZE), rank, SIZE, timeout=20.0)
        peers = Peers.of(world)
        plan = parse_plan(text)
        layout = Layout.of(TENSORS, Size.parse("2KB"), Compression.of(plan).arrange)
        exchange = RoundsExchange(peers, plan, layout)
        results = []
        for step in range(STEPS):
            exchange.begin()
            for bucket in layout.buckets:
                bucket.flat.fill_((rank + step) * exchange.factor)
                exchange.send(bucket, is_finite=True)
            exchange.finish()
            peers.clock.tick()
            results.append([tuple(bucket.flat.aminmax()) for bucket in layout.buckets])
        peers.collectives().barrier()
        peers.engine.close()
        return {"print": torch.tensor(results).tolist()}

    results = on_ranks(SIZE, work)
    assert same_bits([{"print": str(result["print"])} for result in results])
    for step, buckets in enumerate(results[0]["print"]):
        for least, most in buckets:
            assert least == pytest.approx(1 + step, rel=1e-3)
            assert most == pytest.approx(1 + step, rel=1e-3)
