from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.threads import run_threads
from thalweg.engine import collectives
from thalweg.engine.collectives import Collectives, RoundCounter
from thalweg.engine.engine import Engine
from thalweg.facts import Cluster
from thalweg.members.abort import AbortFlag
from thalweg.schedules import Group
from thalweg.transports import Transport

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def share(
    size: int,
    make: Callable[[int], list[torch.Tensor]],
    do: Callable[[Collectives, list[torch.Tensor]], None],
) -> list[list[torch.Tensor]]:
    """Each rank's tensors afterwards."""
    store = dist.HashStore()
    group = Group.everybody(Cluster.flat(size))

    def work(transport: Transport) -> list[torch.Tensor]:
        engine = Engine(transport, AbortFlag(store, transport.rank), timeout=20.0)
        tensors = make(transport.rank)
        do(Collectives(group, engine, RoundCounter()), tensors)
        return tensors

    by_rank = run_threads(range(size), work)
    return [by_rank[rank] for rank in range(size)]


def of_all_kinds(rank: int) -> list[torch.Tensor]:
    return [
        torch.full((3, 2), float(rank)).t(),  # not contiguous
        torch.tensor(rank),  # of no dimension
        torch.full((5,), rank, dtype=torch.bfloat16),
        torch.tensor([rank == 0, rank == 1]),
        torch.zeros(0),
        torch.full((2,), complex(rank, 1)),
        torch.full((3,), rank, dtype=torch.uint8),
    ]


@pytest.mark.parametrize("root", [0, 2])
@pytest.mark.parametrize("at_once", [1, 30, 1 << 20])
def test_everybody_takes_what_one_has(
    root: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collectives, "BROADCAST_CHUNK_BYTES", collectives.Size(at_once))
    for tensors in share(3, of_all_kinds, lambda s, t: s.broadcast(root, t)):
        for taken, wanted in zip(tensors, of_all_kinds(root), strict=True):
            assert taken.dtype == wanted.dtype
            assert torch.equal(taken, wanted)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_the_mean(size: int) -> None:
    def make(rank: int) -> list[torch.Tensor]:
        return [torch.full((4, 3), rank + 1.0, dtype=dtype).t() for dtype in DTYPES]

    for tensors in share(size, make, lambda s, t: s.all_reduce_mean(t)):
        for tensor in tensors:
            wanted = torch.full_like(tensor, (size + 1) / 2)
            torch.testing.assert_close(tensor, wanted)


def test_what_is_equal_keeps_its_bits() -> None:
    """Seven times x/7 is not always x, least of all in two bytes."""

    def make(rank: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        equal = [torch.rand(50, generator=generator).to(dtype) for dtype in DTYPES]
        return [*equal, torch.full((3,), float(rank)), torch.tensor([-torch.inf, 0.0])]

    plain = share(7, make, lambda s, t: s.all_reduce_mean(t))
    kept = share(7, make, lambda s, t: s.all_reduce_mean_of_differing(t))
    assert not all(torch.equal(a, b) for a, b in zip(plain[0], make(0), strict=True) if a.numel())
    for tensors in kept:
        *equal, different, infinite = tensors
        assert all(torch.equal(a, b) for a, b in zip(equal, make(0)[:4], strict=True))
        torch.testing.assert_close(different, torch.full((3,), 3.0))
        assert torch.equal(infinite, make(0)[-1])


def test_nothing_to_share() -> None:
    def nothing(collectives: Collectives, tensors: list[torch.Tensor]) -> None:
        collectives.broadcast(0, [])
        collectives.all_reduce_mean([])
        collectives.all_reduce_mean_of_differing([])

    assert share(2, lambda rank: [], nothing) == [[], []]
