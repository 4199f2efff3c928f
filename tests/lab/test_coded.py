"""Twenty hosts under a code, of which three die one after the other, and one comes back."""

from __future__ import annotations

from typing import Any

import pytest

from thalweg.bench.training import Recipe, train
from thalweg.lab import Lab
from thalweg.launch.worker_process import SendMessage
from thalweg.workloads import parse_job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("needs_lab")]
HOSTS, STEPS, WARMUP = 20, 120, 5
SYNC = "codedreduce(fanout=4, stragglers=1)"
EVENTS = [
    {"action": "kill", "host": "host7", "at_step": 25},  # a leaf below 1
    {"action": "kill", "host": "host2", "at_step": 45},  # one of the first layer
    {"action": "kill", "host": "host14", "at_step": 65},  # a leaf below 3
    {"action": "restart", "host": "host2", "at_step": 80},
]
DEAD = [7, 14]
MOST_TAKEN_OVER = 5  # steps whose results a rank has by another's state


def trained(name: str, nic: str, events: list[dict[str, Any]]) -> list[dict[str, Any] | None]:
    job = parse_job("digits")

    def work(rank: int, report: SendMessage) -> dict[str, Any]:
        recipe = Recipe(steps=STEPS, timeout="60s")
        return train(job, SYNC, recipe, report)[1]

    with Lab(hosts=HOSTS, nic=nic, name=name) as lab:
        results = lab.run(work, events=events, process_group=False, timeout="5min")
        assert len(lab.fired) == len(events)
    return results


def longest(results: list[dict[str, Any] | None]) -> float:
    """Seconds of the longest step of any rank, once things have settled."""
    return max(max(result["seconds"][WARMUP:], default=0.0) for result in results if result)


def mean(results: list[dict[str, Any] | None]) -> float:
    seconds = [s for result in results if result for s in result["seconds"][WARMUP:]]
    return sum(seconds) / len(seconds)


@pytest.mark.parametrize("nic", ["1gbit", "200mbit"])
def test_three_die_and_one_comes_back(nic: str, name: str) -> None:
    calm = trained(name, nic, [])
    troubled = trained(name, nic, EVENTS)
    assert calm[0] is not None
    assert troubled[0] is not None
    for called, results in (("calm", calm), ("troubled", troubled)):
        print(f"{nic} {called}: {mean(results):.3f} s a step, the longest {longest(results):.3f} s")
    assert [rank for rank, result in enumerate(troubled) if not result] == DEAD
    for results in (calm, troubled):
        assert len({result["fingerprint"] for result in results if result}) == 1
    if not any(result["incidents"] for result in troubled if result):
        assert troubled[0]["fingerprint"] == calm[0]["fingerprint"]
    # A new tree, without those that stay away, adds up in another order.
    assert troubled[0]["metric"] == pytest.approx(calm[0]["metric"], abs=0.01)
    for rank, result in enumerate(troubled):
        if result and rank != 2:
            # One that was behind when a new tree was planted takes over another's state.
            assert result["steps"] == sorted(set(result["steps"])), rank
            assert len(result["steps"]) >= STEPS - MOST_TAKEN_OVER, rank
    back = troubled[2]
    assert back is not None
    print(f"{nic} rank 2 was back before step {back['steps'][0]}")
    assert 80 <= back["steps"][0] < STEPS
