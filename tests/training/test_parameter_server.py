from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from thalweg.facts import Size
from thalweg.training.gradients import FLAGS, layout_of
from thalweg.training.parameter_server import ParameterServer
from thalweg.transports import Array

BUCKET = Size.parse("1MB")


class Setup:
    """A server for a line of one weight and one bias, and gradients for it."""

    def __init__(self, workers: int, staleness: int, **options: float) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), **{"lr": 1.0, **options})
        self.parameters = dict(self.model.named_parameters())
        layout = layout_of(self.parameters, BUCKET)
        self.server = ParameterServer(
            self.parameters, self.optimizer, layout, range(workers), staleness
        )
        self.layout = layout_of(self.parameters, BUCKET)

    def push(self, worker: int, weight: float, bias: float | None = 0.0) -> list[int]:
        [bucket] = self.layout.buckets
        bucket.views[FLAGS].copy_(torch.tensor([1.0, 0.0 if bias is None else 1.0]))
        bucket.views["weight"].fill_(weight)
        bucket.views["bias"].fill_(bias or 0.0)
        return self.server.push(worker, 0, bucket.vector.copy())

    def answer(self) -> Array:
        return np.concatenate(self.server.answer())


def test_every_gradient_is_a_step_with_its_share_of_the_learning_rate() -> None:
    setup = Setup(workers=2, staleness=9)
    before = float(setup.model.weight.detach())
    setup.push(0, 0.5)
    setup.push(1, 0.25)
    assert float(setup.server.parameters["weight"].detach()) == pytest.approx(before - 0.5 * 0.75)
    assert float(setup.model.weight.detach()) == before  # the script's own is left alone
    assert setup.server.clocks == {0: 1, 1: 1}


def test_the_scripts_learning_rate_is_followed() -> None:
    setup = Setup(workers=1, staleness=9)
    before = float(setup.model.weight.detach())
    setup.optimizer.param_groups[0]["lr"] = 0.125
    setup.push(0, 1.0)
    assert float(setup.server.parameters["weight"].detach()) == pytest.approx(before - 0.125)


def test_who_took_no_part_has_no_gradient() -> None:
    """Momentum would move it otherwise."""
    setup = Setup(workers=1, staleness=9, momentum=0.9)
    setup.push(0, 1.0, bias=1.0)
    between = float(setup.server.parameters["bias"].detach())
    setup.push(0, 1.0, bias=None)
    assert float(setup.server.parameters["bias"].detach()) == between


def test_nobody_gets_too_far_ahead() -> None:
    setup = Setup(workers=3, staleness=1)
    assert setup.push(0, 0.1) == [0]  # a step ahead
    assert setup.push(0, 0.1) == []  # two
    assert setup.push(1, 0.1) == [1]
    assert setup.push(2, 0.1) == [0, 2]
    assert setup.server.clocks == {0: 2, 1: 1, 2: 1}


def test_without_staleness_all_go_in_step() -> None:
    setup = Setup(workers=3, staleness=0)
    assert setup.push(0, 0.1) == []
    assert setup.push(1, 0.1) == []
    assert setup.push(2, 0.1) == [0, 1, 2]


def test_nobody_waits_for_one_who_is_gone() -> None:
    setup = Setup(workers=3, staleness=0)
    setup.push(0, 0.1)
    setup.push(1, 0.1)
    assert setup.server.lose(2) == [0, 1]
    assert setup.push(2, 0.1) == []  # it isn't one of us any more


def test_all_are_given_the_same_at_a_meeting() -> None:
    setup = Setup(workers=3, staleness=1)
    assert setup.server.meet(0) == []
    assert setup.push(1, 0.5) == [1]  # who is at the meeting holds nobody up
    assert setup.server.meet(1) == []
    assert setup.server.meet(2) == [0, 1, 2]
    assert setup.server.meet(0) == []  # another one


def test_a_meeting_goes_on_without_one_who_is_gone() -> None:
    setup = Setup(workers=3, staleness=1)
    setup.server.meet(0)
    setup.server.meet(1)
    assert setup.server.lose(2) == [0, 1]


def test_one_worker_alone_trains_as_without() -> None:
    setup = Setup(workers=1, staleness=0, momentum=0.9)
    twin = nn.Linear(1, 1)
    twin.load_state_dict(setup.model.state_dict())
    optimizer = torch.optim.SGD(twin.parameters(), lr=1.0, momentum=0.9)
    for step in range(5):
        for parameter in twin.parameters():
            parameter.grad = torch.full_like(parameter, 0.1 * step)
        optimizer.step()
        setup.push(0, 0.1 * step, 0.1 * step)
    for name, parameter in twin.named_parameters():
        assert torch.equal(setup.server.parameters[name], parameter)
