from __future__ import annotations

from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from thalweg.chaos.exact_job import (
    CHAOS_BATCH_SAMPLES,
    CHAOS_SAMPLE_COUNT,
    Linear,
    checksum,
    digest,
    expected_states,
    optimizer_of,
    samples,
    snap,
    sums,
)
from thalweg.training.data.sampler import BatchSampler

STEPS = 6


def trained_by(size: int, seed: int, steps: int) -> list[str]:
    """Digests of a training whose batches are shared out among so many, as plans do."""
    model = Linear()
    optimizer = optimizer_of(model)
    cut = BatchSampler(samples=CHAOS_SAMPLE_COUNT, batch=CHAOS_BATCH_SAMPLES, size=size, seed=seed)
    found = []
    batch_slices = [list(islice(cut.slices(0, rank), steps)) for rank in range(size)]
    for step in range(steps):
        parts = []
        for rank in range(size):
            batch_slice = batch_slices[rank][step]
            optimizer.zero_grad()
            losses = model(samples().tensors[0][batch_slice.samples])
            torch.dot(losses, batch_slice.weights.float()).backward()  # type: ignore[no-untyped-call]
            parts.append(
                [p.grad.clone() * (1 / size) for p in model.parameters() if p.grad is not None]
            )
        for parameter, *own in zip(model.parameters(), *parts, strict=True):
            parameter.grad = sum(own[1:], own[0])
        snap(model)
        optimizer.step()
        found.append(digest(model))
    return found


@examples(10)
@given(st.integers(1, 9), st.integers(0, 5))
def test_steps_are_as_foretold_however_they_are_shared_out(size: int, seed: int) -> None:
    steps = CHAOS_SAMPLE_COUNT // CHAOS_BATCH_SAMPLES
    assert trained_by(size, seed, steps) == [d for d, _ in islice(expected_states(seed), steps)]


def test_a_sample_that_is_lost_shows() -> None:
    model = Linear()
    optimizer = optimizer_of(model)
    batch_slice = next(
        BatchSampler(samples=CHAOS_SAMPLE_COUNT, batch=CHAOS_BATCH_SAMPLES, size=1, seed=0).slices(
            0, 0
        )
    )
    torch.dot(
        model(samples().tensors[0][batch_slice.samples[1:]]), batch_slice.weights[1:].float()
    ).backward()  # type: ignore[no-untyped-call]
    snap(model)
    optimizer.step()
    assert digest(model) != next(expected_states(0))[0]


def test_checksums_add_up_and_tell_batches_apart() -> None:
    first, second = (told for _, told in islice(expected_states(0), 2))
    share = next(
        BatchSampler(samples=CHAOS_SAMPLE_COUNT, batch=CHAOS_BATCH_SAMPLES, size=1, seed=0).slices(
            0, 0
        )
    ).samples
    assert first == checksum(share[:5]) + checksum(share[5:]) != second
    assert checksum([1, 1]) != checksum([1, 2])


def test_sums_add_up() -> None:
    one, other, mean = Linear(), Linear(), Linear()
    with torch.no_grad():
        for a, b, m in zip(one.parameters(), other.parameters(), mean.parameters(), strict=True):
            b.add_(torch.arange(b.numel()).reshape(b.shape) / 7)
            m.copy_((a + b) / 2)
    pairs = zip(sums(one), sums(other), sums(mean), strict=True)
    assert all((a + b) / 2 == pytest.approx(m, rel=1e-5) for a, b, m in pairs)
