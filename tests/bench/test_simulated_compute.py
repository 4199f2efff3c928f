from __future__ import annotations

from math import inf
from time import monotonic

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.training.workers import TIMEOUT, on_ranks
from thalweg import attach
from thalweg.bench.simulated_compute import Compute, ComputeSleeper, SimulatedCompute, shares_of
from thalweg.catalog import parse_plan
from thalweg.facts import Cluster, Duration, Host, Rack, StragglerDelay


class Clock:
    """Time that passes only in sleeps, and a little more than they ask for."""

    def __init__(self, oversleeps: float = 0.0) -> None:
        self.now = 0.0
        self.pauses: list[float] = []
        self._oversleeps = oversleeps

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds + self._oversleeps

    def sleeps(
        self, injection: SimulatedCompute, model: nn.Module, rank: int = 0, shares: float = 1
    ) -> ComputeSleeper:
        return ComputeSleeper(
            injection, rank, model, lambda: shares, now=lambda: self.now, pause=self.pause
        )


def injected(
    backward: float = 0.5,
    delay: StragglerDelay | None = None,
    cluster: Cluster | None = None,
    seed: int = 0,
) -> SimulatedCompute:
    compute = Compute(step=Duration(1.0), backward=backward, late=delay or StragglerDelay())
    return SimulatedCompute(compute=compute, cluster=cluster or Cluster.flat(4), seed=seed)


def layers() -> nn.Module:
    """Of 10, 20 and 70 elements."""
    return nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in ((7, 10), (10, 2), (2, 5))))


def test_gradients_take_their_share_and_forward_the_rest() -> None:
    clock = Clock()
    model = layers()
    sleeps = clock.sleeps(injected(backward=0.5), model)
    sleeps.begin(0)
    model(torch.ones(3, 7)).sum().backward()
    assert clock.pauses == pytest.approx([0.5, 0.05, 0.1, 0.35])


def test_a_code_for_one_straggler_takes_twice_as_long() -> None:
    clock = Clock()
    shares = shares_of(parse_plan("gc(stragglers=1)"), Cluster.flat(4), rank=2)
    model = layers()
    sleeps = clock.sleeps(injected(), model, shares=shares)
    sleeps.begin(0)
    model(torch.ones(3, 7)).sum().backward()
    assert clock.now == pytest.approx(2.0)


def test_a_late_wake_up_does_not_add_up() -> None:
    clock = Clock(oversleeps=0.01)
    model = layers()
    sleeps = clock.sleeps(injected(backward=1.0), model)
    sleeps.begin(0)
    model(torch.ones(3, 7)).sum().backward()
    assert clock.now == pytest.approx(1.01)


def test_who_is_late_depends_on_seed_rank_and_step_alone() -> None:
    delay = StragglerDelay(probability=0.3, delay=Duration(2.0))
    one, same, other = (injected(delay=delay, seed=seed) for seed in (7, 7, 8))
    course = [
        [it.delay(rank, step) for rank in range(4) for step in range(200)]
        for it in (one, same, other)
    ]
    assert course[0] == course[1] != course[2]
    assert set(course[0]) == {0.0, 2.0}
    assert 0.2 < course[0].count(2.0) / len(course[0]) < 0.4
    assert [one.delay(0, step) for step in range(50)] != [one.delay(1, step) for step in range(50)]


def test_a_host_that_is_often_late() -> None:
    always = StragglerDelay(probability=1.0, delay=Duration(3.0))
    hosts = (Host(name="a", ranks=(0,)), Host(name="b", ranks=(1,), late=always))
    cluster = Cluster(racks=(Rack(name="r", hosts=hosts),))
    everybody = StragglerDelay(probability=1.0, delay=Duration(0.5))
    injection = injected(delay=everybody, cluster=cluster)
    assert [injection.delay(rank, 5) for rank in range(2)] == [0.5, 3.5]
    clock = Clock()
    clock.sleeps(injection, layers(), rank=1).begin(5)
    assert clock.now == pytest.approx(4.0)


class Diary:
    """Sleeps that take no time, and when each ended."""

    def __init__(self) -> None:
        self.entries: list[str] = []
        self.ended: list[float] = []

    def pause(self, seconds: float) -> None:
        self.entries.append("slept")
        self.ended.append(monotonic())

    def send(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """A DDP bucket, whose way ends here."""
        self.entries.append("sent")
        arrived: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        arrived.set_result(bucket.buffer())
        return arrived

    def sleeps_of(self, model: nn.Module, rank: int) -> ComputeSleeper:
        """All in backward: one for each parameter."""
        injection = injected(backward=1.0)
        return ComputeSleeper(injection, rank, model, now=lambda: 0.0, pause=self.pause)


def test_our_buckets_leave_between_the_sleeps() -> None:
    def work(rank: int) -> dict[str, bool]:
        model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(4)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        diary = Diary()
        sleeps = diary.sleeps_of(model, rank)
        run = attach(model, optimizer, plan="ring @ bucket=1KB", timeout=TIMEOUT)
        before = len(run._arrivals)  # attach() shares the model
        sleeps.begin(0)
        model(torch.ones(2, 16)).sum().backward()
        ready = [arrival.ready for arrival in run._arrivals][before:][:4]
        run.close()
        between = zip(diary.ended, ready, [*diary.ended[1:], inf], strict=True)
        return {"between": all(slept <= left <= next_ for slept, left, next_ in between)}

    assert on_ranks(2, work) == [{"between": True}] * 2


def test_ddps_buckets_leave_between_the_sleeps() -> None:
    def work(rank: int) -> dict[str, list[str]]:
        dist.init_process_group("gloo")
        model = nn.Sequential(*(nn.Linear(600, 600, bias=False) for _ in range(4)))  # 1.4 MB each
        diary = Diary()
        sleeps = diary.sleeps_of(model, rank)
        ddp = DistributedDataParallel(model, bucket_cap_mb=1)

        ddp.register_comm_hook(diary, lambda diary, bucket: diary.send(bucket))
        for step in range(2):  # DDP lays its buckets out anew after the first
            diary.entries.clear()
            sleeps.begin(step)
            ddp(torch.ones(2, 600)).sum().backward()
        dist.destroy_process_group()
        return {"entries": diary.entries}

    assert on_ranks(2, work) == [{"entries": ["slept", "sent"] * 4}] * 2
