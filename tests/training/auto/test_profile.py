"""What a step costs: sleeps of known length are found again, and so is who is late."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from time import perf_counter, sleep

import numpy as np
import pytest
import torch
from torch import nn

from thalweg.facts import Cluster, Duration, Host, Rack, StragglerDelay, Tensor
from thalweg.training.auto.profile import Profile, ProfileResult, Seconds, merged, straggler_delays

FORWARD, BACKWARD, COMMUNICATION = 0.01, 0.02, 0.015  # seconds
TENSORS = (Tensor(name="a", shape=(2, 2)), Tensor(name="b", shape=(2,)))


class Slow(torch.autograd.Function):
    """Backward takes a while."""

    @staticmethod
    def forward(ctx: object, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: object, *gradients: torch.Tensor) -> torch.Tensor:
        sleep(BACKWARD)
        return gradients[0]


class Sleepy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4, bias=False), nn.Linear(4, 1, bias=False)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        sleep(FORWARD)
        slowly: Callable[[torch.Tensor], torch.Tensor] = Slow.apply
        found: torch.Tensor = self.last(slowly(self.first(value)))
        return found


def test_a_step_is_taken_apart() -> None:
    model = Sleepy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    took = []
    with closing(Profile(dict(model.named_parameters()), optimizer)) as profile:
        for _ in range(4):
            began = perf_counter()
            model(torch.ones(2, 4)).sum().backward()
            sleep(COMMUNICATION)
            optimizer.step()
            optimizer.zero_grad()
            took.append(perf_counter() - began)
        assert len(profile) == 3  # nobody knows when the first began
        found = merged("sleepy", profile.tensors, np.array([profile.seconds()]))
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert len(profile) == 3
    costs = found.workload.costs
    forward, backward = costs.forward.seconds, costs.backward.seconds
    assert forward >= FORWARD
    assert backward >= BACKWARD
    assert forward + backward <= max(took) - COMMUNICATION  # which is part of neither
    assert costs.optimizer.seconds <= max(took) - FORWARD - BACKWARD - COMMUNICATION
    first, last = found.workload.tensors
    assert (first.name, last.name) == ("first.weight", "last.weight")
    assert first.ready is not None
    assert last.ready is not None
    assert first.ready.seconds == pytest.approx(costs.backward.seconds, rel=0.01)
    assert last.ready.seconds == 0.0


def test_the_last_of_several_backwards_counts() -> None:
    model = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with closing(Profile(dict(model.named_parameters()), optimizer)) as profile:
        for _ in range(2):
            for _ in range(3):
                sleep(0.01)
                model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    forward, backward, _, ready = profile.seconds()
    assert forward >= 0.03
    assert (backward, ready) == (0.0, 0.0)


def steps(seconds: Seconds) -> Seconds:
    """Rows as profiles give them: of each step forward as given, a backward of 0.2 s, an optimizer
    of 0.05 s, and gradients ready after 0.2 and 0 s."""
    rest = np.broadcast_to([0.2, 0.05, 0.2, 0.0], (*seconds.shape, 4))
    return np.concatenate([seconds[:, :, None], rest], axis=2).reshape(len(seconds), -1)


def test_ranks_are_merged() -> None:
    forward = np.full((3, 5), 0.1)
    forward[2] = 0.3  # one is always slower, which is not being late
    found = merged("two", TENSORS, steps(forward))
    costs = found.workload.costs
    assert costs.forward.seconds == pytest.approx(0.1)
    assert costs.backward.seconds == pytest.approx(0.2)
    assert costs.optimizer.seconds == pytest.approx(0.05)
    assert [t.ready and t.ready.seconds for t in found.workload.tensors] == [0.2, 0.0]
    assert {delay.probability for delay in found.straggler_delays} == {0.0}
    assert found.spread == 0.0


def test_who_is_late_is_found() -> None:
    """All are late at 2 of 20 steps by 2 s, and one host at 8 of 20 by 3 s mostly; a hundredth of a
    second is noise."""
    rng = np.random.default_rng(0)
    forward = 0.1 + 0.01 * rng.random((8, 20))
    for rank in range(8):
        forward[rank, [2 * rank, 2 * rank + 1]] += 2.0
    forward[5, :6] += 3.0
    found = merged("two", TENSORS, steps(forward))
    for rank, delay in enumerate(found.straggler_delays):
        if rank != 5:
            assert delay.probability == pytest.approx(0.1)
            assert delay.delay.seconds == pytest.approx(2.0, abs=0.05)
    assert found.straggler_delays[5].probability == pytest.approx(0.4)
    assert found.straggler_delays[5].delay.seconds == pytest.approx(3.0, abs=0.05)
    assert found.spread < 0.05
    cluster = found.with_straggler_delays(Cluster.flat(8))
    assert cluster.host(5).late == found.straggler_delays[5]
    assert cluster.host(4).late == found.straggler_delays[0]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_delays_are_whole_however_few_the_ranks(ranks: int) -> None:
    """Of twenty steps the last rank is late at four, by 2 s, and nobody else is."""
    rng = np.random.default_rng(ranks)
    forward = 0.1 + 0.001 * rng.random((ranks, 20))
    forward[-1, ::5] += 2.0
    found = merged("two", TENSORS, steps(forward))
    seen = sum(delay.probability for delay in found.straggler_delays)
    assert seen == pytest.approx(4 / 20)
    assert found.straggler_delays[-1].delay.seconds == pytest.approx(2.0, abs=0.01)


def test_a_host_is_as_late_as_its_ranks_are_on_average() -> None:
    """One of two is late at every fifth step by 2 s, the other at every tenth by 1 s: 0.3 of them a
    step, which together lose 0.5 s."""
    workload = merged("two", TENSORS, steps(np.full((4, 2), 0.1))).workload
    often = StragglerDelay(probability=0.2, delay=Duration(2.0))
    seldom = StragglerDelay(probability=0.1, delay=Duration(1.0))
    found = ProfileResult(
        workload=workload, straggler_delays=(often, seldom, often, StragglerDelay()), spread=0.0
    )
    hosts = [Host(name="a", ranks=(0, 1)), Host(name="b", ranks=(2,)), Host(name="c", ranks=(3,))]
    a, b, c = found.with_straggler_delays(
        Cluster(racks=(Rack(name="r", hosts=tuple(hosts)),))
    ).hosts
    assert a.late.probability == pytest.approx(0.15)
    assert 2 * a.late.probability * a.late.delay.seconds == pytest.approx(0.5)
    assert (b.late, c.late) == (often, StragglerDelay())


def test_a_few_steps_tell_little_of_each() -> None:
    """Two of eight are late once in five steps: 2 of 40 for all of them."""
    excess = np.zeros((8, 5))
    excess[0, 0] = excess[3, 2] = 1.0
    assert [delay.probability for delay in straggler_delays(excess, 0.2)] == [
        pytest.approx(0.05)
    ] * 8
