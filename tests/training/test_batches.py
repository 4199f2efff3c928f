from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thalweg.codes.fractional import FractionalRepetition
from thalweg.errors import UsageError
from thalweg.training.batches import Batches, Coding


@st.composite
def cuts(draw: st.DrawFn) -> Batches:
    size = draw(st.integers(1, 9))
    batch = draw(st.integers(size, 40))
    samples = draw(st.integers(batch, 300))
    return Batches(samples=samples, batch=batch, size=size, seed=draw(st.integers(-5, 2**64)))


def coded(stragglers: int, teams: int, samples: int, batch: int) -> list[Batches]:
    """Each rank's."""
    size = (stragglers + 1) * teams
    code = FractionalRepetition(size, stragglers)
    return [
        Batches(
            samples=samples,
            batch=batch,
            size=size,
            seed=0,
            coding=Coding(code=code, member=member),
        )
        for member in range(size)
    ]


@given(cuts(), st.integers(0, 5))
def test_every_sample_of_an_epoch_once(batches: Batches, epoch: int) -> None:
    shares = [list(batches.shares(epoch, rank)) for rank in range(batches.size)]
    seen = Counter(s for rank in shares for share in rank for s in share.samples)
    assert seen == Counter(range(batches.samples))
    assert {len(rank) for rank in shares} == {len(batches)}


@given(cuts())
def test_shares_are_near_equal_and_batches_whole(batches: Batches) -> None:
    ranks = [list(batches.shares(0, rank)) for rank in range(batches.size)]
    for index, shares in enumerate(zip(*ranks, strict=True)):
        lengths = [len(share.samples) for share in shares]
        assert max(lengths) - min(lengths) <= 1
        assert min(lengths) >= 1
        last = index == len(batches) - 1
        assert sum(lengths) == batches.batch or last
        assert sum(lengths) < batches.batch + batches.size


@given(cuts())
def test_the_weights_make_a_mean(batches: Batches) -> None:
    """Whatever the shares: the mean over ranks of the weighted sums is the batch's mean."""
    of_sample = torch.arange(1.0, batches.samples + 1, dtype=torch.float64).sqrt()
    ranks = [list(batches.shares(0, rank)) for rank in range(batches.size)]
    for shares in zip(*ranks, strict=True):
        together = [s for share in shares for s in share.samples]
        sums = [float(of_sample[share.samples] @ share.weights) for share in shares]
        mean = sum(sums) / batches.size
        assert mean == pytest.approx(float(of_sample[together].mean()), rel=1e-12)


@given(
    stragglers=st.integers(1, 3),
    teams=st.integers(1, 3),
    extra=st.integers(0, 20),
    data=st.data(),
)
def test_a_code_makes_the_same_mean(
    stragglers: int, teams: int, extra: int, data: st.DataObject
) -> None:
    """From any quorum, an uneven last batch included."""
    size = (stragglers + 1) * teams
    ranks = coded(stragglers, teams, samples=3 * (size + extra) + 1, batch=size + extra)
    of_sample = torch.arange(1.0, ranks[0].samples + 1, dtype=torch.float64).sqrt()
    late = data.draw(st.sets(st.integers(0, size - 1), max_size=stragglers))
    coding = ranks[0].coding
    assert coding is not None
    decoding = coding.code.decode(frozenset(range(size)) - late)
    assert decoding is not None
    by_rank = [list(batches.shares(2, rank)) for rank, batches in enumerate(ranks)]
    for shares in zip(*by_rank, strict=True):
        whole = sorted({s for share in shares for s in share.samples})
        sums = [float(of_sample[share.samples] @ share.weights) for share in shares]
        mean = sum(weight * sums[member] for member, weight in decoding.items())
        assert mean == pytest.approx(float(of_sample[whole].mean()), rel=1e-12)


@given(cuts(), st.data())
def test_it_can_be_taken_up_at_any_batch(batches: Batches, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, len(batches)))
    whole = [share.samples for share in batches.shares(1, 0)]
    assert [share.samples for share in batches.shares(1, 0, first)] == whole[first:]


def test_seeds_and_epochs_have_orders_of_their_own() -> None:
    orders = set()
    for seed in range(20):
        batches = Batches(samples=50, batch=50, size=1, seed=seed)
        for epoch in range(20):
            (share,) = batches.shares(epoch, 0)
            orders.add(tuple(share.samples))
    assert len(orders) == 400


def test_the_random_numbers_of_the_script_are_left_alone() -> None:
    before = torch.get_rng_state()
    batches = Batches(samples=50, batch=10, size=2, seed=3)
    list(batches.shares(0, 1))
    batches.generator(1, 2)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_batch_smaller_than_the_crew() -> None:
    with pytest.raises(UsageError, match=r"a batch of 3 has no sample for each of 4 workers"):
        Batches(samples=50, batch=3, size=4, seed=0)


def test_a_batch_larger_than_the_data() -> None:
    with pytest.raises(UsageError, match=r"the data has 5 samples, and a batch 8"):
        Batches(samples=5, batch=8, size=4, seed=0)
