"""Steps replayed message by message, by hand, and constants found again from what they gave."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from tests.predict.wfbp import (
    Job,
    Measured,
    Message,
    Way,
    at_the_end,
    each,
    fit,
    merged,
    messages_of,
    replay,
)
from thalweg.facts import Tensor, Workload, model_named
from thalweg.predict.ddp_step import AlphaBetaNetwork

PAIR = AlphaBetaNetwork(0.5, 1.0)  # among two: a second a message, and one a byte
MESSAGES = (Message(1, 0.0), Message(1, 0.5), Message(2, 5.0))


def test_messages_follow_backward() -> None:
    tensors = (Tensor(name="first", shape=(3,)), Tensor(name="last", shape=(1,)))
    found = messages_of(Workload(name="two", tensors=tensors), backward=8.0)
    assert found == (Message(4, 2.0), Message(12, 8.0))


def test_a_message_waits_for_the_link_and_for_backward() -> None:
    """0 to 2, 2 to 4, and 5 to 8."""
    assert replay(MESSAGES, PAIR, 2) == 8


def test_all_at_the_end() -> None:
    assert replay(at_the_end(MESSAGES, PAIR, 2), PAIR, 2) == 5 + 1 + 4


def test_merging_saves_a_message() -> None:
    """The second is ready within a message's second of the first, the third isn't."""
    assert merged(MESSAGES, PAIR, 2) == [Message(2, 0.5), Message(2, 5.0)]
    assert replay(merged(MESSAGES, PAIR, 2), PAIR, 2) == 8
    at_once = tuple(Message(1, 0.0) for _ in range(4))
    assert replay(merged(at_once, PAIR, 2), PAIR, 2) == 5
    assert replay(at_once, PAIR, 2) == 8


def test_a_busy_link_gathers_what_becomes_ready() -> None:
    """While the first is under way, until 11, the others become ready and go together."""
    messages = (Message(10, 0.0), Message(1, 2.0), Message(1, 4.0))
    assert merged(messages, PAIR, 2) == [Message(10, 0.0), Message(2, 4.0)]


def test_a_step_is_forward_and_what_follows() -> None:
    workload = Workload(name="one", tensors=(Tensor(name="w", shape=(5,)),))
    job = Job.of(workload, alone=3.0)
    assert job.seconds(each, PAIR, 2, overhead=0.25) == pytest.approx(1 + 2 + (1 + 20) + 0.25)


@pytest.mark.parametrize("ways", [[each], [at_the_end], [each, at_the_end]])
def test_constants_are_found_again(ways: list[Way]) -> None:
    """From steps that they made, one of which is wrong; on 32 workers, where nobody measured."""
    true = {"slow": AlphaBetaNetwork(1e-4, 1e8), "fast": AlphaBetaNetwork(2e-5, 1e9)}
    jobs = [Job.of(model_named("resnet50"), 0.25), Job.of(model_named("bert-base"), 0.3)]
    overheads = {"resnet50": 0.004, "bert-base": 0.05}
    steps = [
        Measured(
            way=way,
            job=job,
            network=name,
            workers=workers,
            seconds=job.seconds(way, network, workers, overheads[job.name]),
        )
        for way in ways
        for job in jobs
        for name, network in true.items()
        for workers in (4, 8, 16)
    ]
    wrong = replace(steps[4], seconds=2 * steps[4].seconds)
    found = fit([*steps, wrong])
    for way, job, name in product(ways, jobs, true):
        expected = job.seconds(way, true[name], 32, overheads[job.name])
        assert found.seconds(way, job, name, 32) == pytest.approx(expected, rel=0.03)
