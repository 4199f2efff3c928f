"""Where a rank is in its data, when it leaves steps out."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import TensorDataset

from thalweg.training.data.loader import Feed
from thalweg.training.data.position import Course, Position
from thalweg.training.data.sampler import Batches


@pytest.mark.parametrize(
    ("skipped", "position"),
    [
        (1, Position(epoch=0, batch=3)),
        (2, Position(epoch=0, batch=4)),  # its end: what scripts do there is still to be done
        (3, Position(epoch=1, batch=1)),
        (6, Position(epoch=1, batch=4)),
        (11, Position(epoch=3, batch=1)),
    ],
)
def test_batches_are_left_out_over_epochs(skipped: int, position: Position) -> None:
    batches = Batches(samples=8, batch=2, size=1, seed=0)
    course = Course(Feed(data=TensorDataset(torch.zeros(8)), batches=batches, loader={}, rank=0))
    taken: list[Position] = []
    for epoch in course.epochs(5):
        for _ in course.batches(epoch, lambda: None, lambda: lambda number: False):
            course.stepped()
            taken.append(course.position)
            if len(taken) == 2:
                course.skip(skipped)
                assert course.position == position
    rest = 5 * 4 - 2 - skipped
    assert len(taken) == 2 + rest
