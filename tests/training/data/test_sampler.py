from __future__ import annotations

from collections import Counter
from random import Random

import pytest
import torch
from hypothesis import given, reject
from hypothesis import strategies as st

from tests.codes.trees import planted, within_tolerance
from tests.running import SimulatedTree, tree_schedule
from thalweg.catalog import default_catalog
from thalweg.codes import allocate
from thalweg.errors import LayoutError, UsageError
from thalweg.training.data.sampler import BatchSampler


@st.composite
def cuts(draw: st.DrawFn) -> BatchSampler:
    size = draw(st.integers(1, 9))
    batch = draw(st.integers(size, 40))
    samples = draw(st.integers(batch, 300))
    return BatchSampler(samples=samples, batch=batch, size=size, seed=draw(st.integers(-5, 2**64)))


@given(cuts(), st.integers(0, 5))
def test_every_sample_of_an_epoch_once(sampler: BatchSampler, epoch: int) -> None:
    batch_slices = [list(sampler.slices(epoch, rank)) for rank in range(sampler.size)]
    seen = Counter(s for rank in batch_slices for batch_slice in rank for s in batch_slice.samples)
    assert seen == Counter(range(sampler.samples))
    assert {len(rank) for rank in batch_slices} == {len(sampler)}


@given(cuts())
def test_shares_are_near_equal_and_batches_whole(sampler: BatchSampler) -> None:
    ranks = [list(sampler.slices(0, rank)) for rank in range(sampler.size)]
    for index, shares in enumerate(zip(*ranks, strict=True)):
        lengths = [len(share.samples) for share in shares]
        assert max(lengths) - min(lengths) <= 1
        assert min(lengths) >= 1
        last = index == len(sampler) - 1
        assert sum(lengths) == sampler.batch or last
        assert sum(lengths) < sampler.batch + sampler.size


@given(cuts())
def test_the_weights_make_a_mean(sampler: BatchSampler) -> None:
    """Whatever the shares: the mean over ranks of the weighted sums is the batch's mean."""
    of_sample = torch.arange(1.0, sampler.samples + 1, dtype=torch.float64).sqrt()
    ranks = [list(sampler.slices(0, rank)) for rank in range(sampler.size)]
    for shares in zip(*ranks, strict=True):
        together = [s for share in shares for s in share.samples]
        sums = [float(of_sample[share.samples] @ share.weights) for share in shares]
        mean = sum(sums) / sampler.size
        assert mean == pytest.approx(float(of_sample[together].mean()), rel=1e-12)


@given(
    code=st.sampled_from(sorted(default_catalog().codes)),
    workers=st.integers(2, 14),
    fanout=st.integers(2, 5),
    stragglers=st.integers(0, 2),
    extra=st.integers(0, 20),
    draw=st.randoms(use_true_random=False),
)
def test_a_code_makes_the_same_mean(
    code: str, workers: int, fanout: int, stragglers: int, extra: int, draw: Random
) -> None:
    """From any quorum, in stars and in trees, an uneven last batch included."""
    try:
        allocation = planted(code, workers, fanout, stragglers)
    except LayoutError:
        reject()
    batch, samples = workers + extra, 3 * (workers + extra) + 1
    sampler = BatchSampler(
        samples=samples, batch=batch, size=workers, seed=0, allocation=allocation
    )
    of_sample = torch.arange(1.0, samples + 1, dtype=torch.float64).sqrt()
    simulated = SimulatedTree(allocation, tree_schedule(allocation, 1))
    by_rank = [list(sampler.slices(2, rank)) for rank in range(workers)]
    seen = set()
    for shares in zip(*by_rank, strict=True):
        whole = sorted({s for share in shares for s in share.samples})
        sums = {r: of_sample[s.samples] @ s.weights for r, s in enumerate(shares)}
        inputs = {rank: one.reshape(1).numpy() for rank, one in sums.items()}
        late = within_tolerance(allocation, draw)
        for results in simulated.run(inputs, late=late).values():
            assert results is not None
            [[mean]] = results.arrays
            assert mean == pytest.approx(float(of_sample[whole].mean()), rel=1e-9)
        seen.update(whole)
    assert seen == set(range(samples))


def test_who_only_goes_through_a_step_needs_few_samples() -> None:
    allocation = planted("fractional", 7, 4, 1)
    sampler = BatchSampler(samples=70, batch=70, size=7, seed=0, allocation=allocation)
    (batch_slice,) = sampler.slices(0, 3)
    brief = batch_slice.in_brief()
    assert batch_slice.counts
    assert not brief.counts
    assert brief.samples == batch_slice.samples[:2]
    assert brief.weights.tolist() == batch_slice.weights[:2].tolist()


def test_a_root_beside_the_workers_goes_along_on_few_samples() -> None:
    plant = default_catalog().codes["fractional"].build_tree
    allocation = allocate(plant(range(1, 5), 4, 1), 0)
    sampler = BatchSampler(samples=40, batch=20, size=5, seed=0, allocation=allocation)
    for batch_slice in sampler.slices(0, 0):
        assert not batch_slice.counts
        assert batch_slice.weights.tolist() == [0.0, 0.0]


@given(cuts(), st.data())
def test_it_can_be_taken_up_at_any_batch(sampler: BatchSampler, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, len(sampler)))
    whole = [batch_slice.samples for batch_slice in sampler.slices(1, 0)]
    assert [batch_slice.samples for batch_slice in sampler.slices(1, 0, first)] == whole[first:]


def test_seeds_and_epochs_have_orders_of_their_own() -> None:
    orders = set()
    for seed in range(20):
        sampler = BatchSampler(samples=50, batch=50, size=1, seed=seed)
        for epoch in range(20):
            (batch_slice,) = sampler.slices(epoch, 0)
            orders.add(tuple(batch_slice.samples))
    assert len(orders) == 400


def test_the_random_numbers_of_the_script_are_left_alone() -> None:
    before = torch.get_rng_state()
    sampler = BatchSampler(samples=50, batch=10, size=2, seed=3)
    list(sampler.slices(0, 1))
    sampler.generator(1, 2)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_batch_smaller_than_the_crew() -> None:
    with pytest.raises(UsageError, match=r"a batch of 3 has no sample for each of 4 workers"):
        BatchSampler(samples=50, batch=3, size=4, seed=0)


def test_a_batch_larger_than_the_data() -> None:
    with pytest.raises(UsageError, match=r"the data has 5 samples, and a batch 8"):
        BatchSampler(samples=5, batch=8, size=4, seed=0)
