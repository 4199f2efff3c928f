"""Every job that comes with Thalweg: it trains, it is the same each time, it disturbs nobody."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader

from thalweg.errors import WorkloadError
from thalweg.facts import Size
from thalweg.workloads import Batch, Job, all_jobs, describe, parse_job, tinygpt

SMALL = [
    "digits",
    "logistic(features=200, classes=10, samples=1000)",
    "synthetic(params=100k)",
    "tinygpt",
]
LENGTH = {"digits": 60, "tinygpt": 15}  # steps; 10 for the others


def batches(job: Job) -> Iterator[Batch]:
    """Passes over the samples in random order, without end."""
    generator = torch.Generator().manual_seed(1)
    while True:
        yield from DataLoader(
            job.data, batch_size=job.batch, shuffle=True, generator=generator, drop_last=True
        )


def train(job: Job, model: nn.Module, steps: int) -> list[float]:
    """The mean loss of each step."""
    optimizer = job.optimizer(model.parameters())
    history = []
    for batch in islice(batches(job), steps):
        losses = job.losses(model, batch)
        assert losses.shape == (job.batch,)
        optimizer.zero_grad()
        losses.mean().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
        history.append(losses.mean().item())
    return history


@pytest.mark.parametrize("text", SMALL)
def test_a_job_trains_and_gets_better_on_what_it_has_not_seen(text: str) -> None:
    job = parse_job(text)
    assert job.name == text
    model = job.model()
    before = job.evaluate(model)
    history = train(job, model, LENGTH.get(text, 10))
    after = job.evaluate(model)
    assert sum(history[-3:]) < 0.8 * sum(history[:3])
    assert after < 0.8 * before if job.metric == "loss" else after > before + 0.2
    if text == "digits":
        assert after > 0.95


@pytest.mark.parametrize("text", SMALL)
def test_a_job_is_the_same_each_time_and_leaves_the_random_state_alone(text: str) -> None:
    torch.manual_seed(7)
    state = torch.get_rng_state()
    first, second = parse_job(text), parse_job(text)
    models = [first.model(), first.model(), second.model()]
    scores = [job.evaluate(models[0]) for job in (first, second)]
    assert torch.equal(torch.get_rng_state(), state)
    assert scores[0] == scores[1]
    for model in models[1:]:
        for mine, other in zip(models[0].parameters(), model.parameters(), strict=True):
            assert mine is not other
            assert torch.equal(mine, other)
    for index in (0, len(first.data) - 1):
        for mine, other in zip(first.data[index], second.data[index], strict=True):
            assert torch.equal(mine, other)


@pytest.mark.parametrize("text", SMALL)
def test_the_loss_of_a_sample_does_not_depend_on_its_batch(text: str) -> None:
    job = parse_job(text)
    model = job.model()
    batch = next(batches(job))
    together = job.losses(model, batch)
    half = job.batch // 2
    parts = [
        job.losses(model, tuple(column[cut] for column in batch))
        for cut in (slice(None, half), slice(half, None))
    ]
    torch.testing.assert_close(torch.cat(parts), together)


def test_there_are_four_and_each_says_what_it_is() -> None:
    kinds = all_jobs()
    assert list(kinds) == ["digits", "logistic", "synthetic", "tinygpt"]
    assert all(kind.summary and len(kind.summary) < 80 for kind in kinds.values())


@pytest.mark.parametrize(
    ("text", "parameters", "batch"),
    [
        ("digits", 563_722, 128),
        ("tinygpt", 626_688, 32),
        ("logistic(features=5000, samples=10)", 10_002, 10),
        ("logistic(features=30, classes=10, samples=20)", 310, 20),
        ("synthetic", 2_500_000, 32),
    ],
)
def test_parameters_and_batches(text: str, parameters: int, batch: int) -> None:
    job = parse_job(text)
    assert sum(parameter.numel() for parameter in job.model().parameters()) == parameters
    assert job.batch == batch


@given(st.integers(1, 3 * 10**6))
@example(1000)
@example(1024**2)
def test_synthetic_has_as_many_parameters_as_asked_for(count: int) -> None:
    job = parse_job(f"synthetic(params={count})")
    with torch.device("meta"):
        workload = describe(job.name, job.model())
    assert workload.nbytes == 4 * count
    heights = [tensor.shape[0] for tensor in workload.tensors if len(tensor.shape) == 2]
    assert max(heights) <= min(1024, min(heights) + 1)
    assert len(heights) >= min(4, sum(heights))


def test_synthetic_gradients_are_ready_last_layer_first() -> None:
    job = parse_job("synthetic(params=100k, layers=7)")
    model = job.model()
    ready: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: ready.append(name))
    job.losses(model, next(batches(job))).mean().backward()
    workload = describe(job.name, model)
    assert len(workload.tensors) == 7 + 1
    assert ready == [tensor.name for tensor in reversed(workload.tensors)]
    assert len(workload.buckets(Size.parse("50kB"))) == 7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("synthetic(params=0)", "params of synthetic(params=0) is 0; give"),
        ("synthetic(params=5G)", "params of synthetic(params=5G) is 5G; give 1 to 4G"),
        ("synthetic(params=4, layers=3)", "2 rows can't be split into 3 layers; give at most 2"),
        ("logistic(features=1000000)", "take 26.2 GB; reduce features or samples to"),
    ],
)
def test_sizes_that_cannot_be(text: str, message: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        parse_job(text)
    assert message in str(caught.value)


def test_logistic_gets_better_after_its_first_step() -> None:
    job = parse_job("logistic(features=500)")
    model = job.model()
    train(job, model, 1)
    first = job.evaluate(model)
    train(job, model, 20)
    assert job.evaluate(model) > first + 0.01


def test_tinygpt_reads_the_characters_that_come_next() -> None:
    job = parse_job("tinygpt")
    characters, following = job.data[0]
    source = "".join(tinygpt.ALPHABET[place] for place in characters)
    assert Path(argparse.__file__).read_text(encoding="utf-8").startswith(source)
    assert torch.equal(characters[1:], following[:-1])
    shifted, _ = job.data[1]
    assert torch.equal(characters[tinygpt.STRIDE :], shifted[: -tinygpt.STRIDE])


def test_tinygpt_sees_no_future() -> None:
    model = parse_job("tinygpt").model()
    characters = torch.arange(tinygpt.CONTEXT)[None]
    changed = characters.clone()
    changed[0, 40:] = 0
    with torch.no_grad():
        one, other = model(characters), model(changed)
    torch.testing.assert_close(one[:, :40], other[:, :40])
    assert not torch.allclose(one[:, 40:], other[:, 40:])


def test_tinygpt_keeps_one_copy_of_the_text() -> None:
    data = parse_job("tinygpt").data
    characters, following = data[:]
    assert characters.untyped_storage().data_ptr() == following.untyped_storage().data_ptr()
    assert characters.untyped_storage().nbytes() < characters.numel() * characters.itemsize


def test_tinygpt_says_so_if_python_comes_without_its_source(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda _: "nowhere")
    with pytest.raises(
        WorkloadError, match=r"can't read Python's own source: No such file .*; use a Python with"
    ):
        parse_job("tinygpt")
