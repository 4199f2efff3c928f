"""Where a rank is in its data, when it leaves steps out."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import TensorDataset

from thalweg.training.data.loader import RankLoader
from thalweg.training.data.position import BatchIndex, DataPosition
from thalweg.training.data.sampler import BatchSampler


@pytest.mark.parametrize(
    ("skipped", "position"),
    [
        (1, BatchIndex(epoch=0, batch=3)),
        (2, BatchIndex(epoch=0, batch=4)),  # its end: what scripts do there is still to be done
        (3, BatchIndex(epoch=1, batch=1)),
        (6, BatchIndex(epoch=1, batch=4)),
        (11, BatchIndex(epoch=3, batch=1)),
    ],
)
def test_batches_are_left_out_over_epochs(skipped: int, position: BatchIndex) -> None:
    sampler = BatchSampler(samples=8, batch=2, size=1, seed=0)
    data_position = DataPosition(
        RankLoader(data=TensorDataset(torch.zeros(8)), sampler=sampler, loader={}, rank=0)
    )
    taken: list[BatchIndex] = []
    for epoch in data_position.epochs(5):
        for _ in data_position.batches(epoch, lambda: None, lambda: lambda number: False):
            data_position.stepped()
            taken.append(data_position.position)
            if len(taken) == 2:
                data_position.skip(skipped)
                assert data_position.position == position
    rest = 5 * 4 - 2 - skipped
    assert len(taken) == 2 + rest


@pytest.mark.parametrize("skipped", [1, 2, 3])
def test_a_safe_point_may_skip_the_rest_of_an_epoch(skipped: int) -> None:
    """A rank that was absent learns there of the steps that the others took."""
    sampler = BatchSampler(samples=8, batch=2, size=1, seed=0)
    data_position = DataPosition(
        RankLoader(data=TensorDataset(torch.zeros(8)), sampler=sampler, loader={}, rank=0)
    )
    taken: list[BatchIndex] = []

    def safe_point() -> None:
        if len(taken) == 2:
            data_position.skip(skipped)
            taken.append(data_position.position)

    for epoch in data_position.epochs(3):
        for _ in data_position.batches(epoch, safe_point, lambda: lambda number: False):
            data_position.stepped()
            taken.append(data_position.position)
    assert len(taken) == 3 * 4 - skipped + 1
    assert taken[-1] == BatchIndex(epoch=2, batch=4)
