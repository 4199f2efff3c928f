"""The closed form of a data-parallel step against sums made by hand."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from thalweg.facts import Size, model_named
from thalweg.predict import ddp_step
from thalweg.predict.ddp_step import AlphaBetaNetwork, DdpStep, SentPayload

SLOW = AlphaBetaNetwork(0.001, 1000.0)  # 1 ms a message, 1 ms a byte


def test_collectives_by_hand() -> None:
    assert ddp_step.ring(SLOW, 100, 4) == pytest.approx(6 * 0.001 + 6 / 4 * 0.1)
    assert ddp_step.all_gather(SLOW, 100, 4) == pytest.approx(3 * (0.001 + 0.1))


@pytest.mark.parametrize("collective", [ddp_step.ring, ddp_step.all_gather])
def test_alone_nothing_is_sent(collective: ddp_step.Collective) -> None:
    assert collective(SLOW, 100, 1) == 0


def step(backward: float) -> DdpStep:
    """On SLOW among 2, buckets take 102, 102 and 12 ms."""
    return DdpStep.uncompressed(backward, [100, 100, 10], 2)


def test_the_last_bucket_is_never_hidden() -> None:
    assert step(1.0).seconds(SLOW) == pytest.approx(1.07 + 0.012)
    assert step(0.1).seconds(SLOW) == pytest.approx(0.204 + 0.012)


def test_as_printed_all_buckets_overlap() -> None:
    for backward, seconds in ((1.0, 1.07), (0.1, 0.216)):
        dense = step(backward)
        printed = replace(dense, overlapped=dense.payloads, exposed=())
        assert printed.seconds(SLOW) == pytest.approx(seconds)


def test_one_bucket_is_all_exposed() -> None:
    dense = DdpStep.uncompressed(0.1, [100], 2)
    assert dense.seconds(SLOW) == pytest.approx(0.107 + 0.102)


def test_alone_backward_is_not_slowed_down() -> None:
    assert DdpStep.uncompressed(1.0, [100], 1).seconds(SLOW) == 1.0


def test_real_last_buckets_come_from_shapes() -> None:
    """BERT's holds its embedding: 30522 rows of 768 floats, and what lies around it."""
    buckets = model_named("bert-base").buckets(Size.parse("25MiB"))
    assert buckets[-1].nbytes > 4 * 30522 * 768 > 3 * 25 * 2**20


def test_compressed_steps_add_up() -> None:
    compressed = DdpStep(
        backward=1.0,
        codec=0.2,
        exposed=[SentPayload(10, ddp_step.all_gather), SentPayload(20)],
        workers=4,
    )
    gathered, summed = 3 * (0.001 + 0.01), 6 * 0.001 + 1.5 * 0.02
    assert compressed.seconds(SLOW) == pytest.approx(1 + 0.2 + gathered + summed)


def halved(codec: float) -> DdpStep:
    return DdpStep(
        backward=1.0,
        codec=codec,
        exposed=[SentPayload(105)],
        workers=2,
    )


def test_break_even_on_the_steep_piece() -> None:
    """Without latency: 210 x = 1 + 1 + 105 x, and backward is long over by then."""
    assert ddp_step.pays_below(step(1.0), halved(1.0), 0.0) == pytest.approx(105 / 2)


def test_break_even_on_the_flat_piece() -> None:
    """1.07 + 10 x = 1 + 0.08 + 5 x, at x = 0.002, where 200 x is still hidden."""
    compressed = DdpStep(backward=1.0, codec=0.08, exposed=[SentPayload(5)], workers=2)
    assert ddp_step.pays_below(step(1.0), compressed, 0.0) == pytest.approx(500)


def test_never_and_always() -> None:
    larger = DdpStep(
        backward=1.0,
        codec=1.0,
        exposed=[SentPayload(211)],
        workers=2,
    )
    assert ddp_step.pays_below(step(1.0), larger, 0.0) == 0
    sooner = replace(halved(0.0), backward=0.5)
    assert ddp_step.pays_below(step(1.0), sooner, 0.0) == inf


def test_it_has_to_pay_on_all_slower_links() -> None:
    """On the fastest, too, since DDP slows backward down, but not in between; below that, DDP takes
    210 bytes, and half of them take 1 s more."""
    assert ddp_step.pays_below(step(1.0), halved(0.0), 0.0) == pytest.approx(105)


def test_the_ratio_that_suffices() -> None:
    """210 bytes take 0.21 s besides 6 ms of messages; 50 ms of backward leave 47.5 for them."""
    dense = step(0.05)
    assert ddp_step.sufficient_ratio(dense, SLOW) == pytest.approx(0.21 / (0.0535 - 0.006))
    assert ddp_step.sufficient_ratio(step(1.0), SLOW) == 1
    assert ddp_step.sufficient_ratio(step(0.005), SLOW) == inf
