"""The study: that its set-ups are counted right, and what it finds with the paper's constants."""

from __future__ import annotations

import pytest

from thalweg.facts import CodecCost, FittedValue, Machine, model_named
from thalweg.predict import ddp_step
from thalweg.predict.assumptions import assumed_machine, workload_of
from thalweg.predict.ddp_step import AlphaBetaNetwork
from thalweg.studies.compression import (
    STUDY_JOBS,
    STUDY_MESSAGE_SECONDS,
    STUDY_RATES_GBPS,
    STUDY_WORKER_COUNT,
    CompressionStudy,
    compressed_step,
    constants_of,
    dense_step,
    paper_constants,
    run_compression_study,
    wins,
)


@pytest.fixture(scope="module")
def paper() -> CompressionStudy:
    return run_compression_study(paper_constants())


def test_there_are_more_than_two_hundred_set_ups(paper: CompressionStudy) -> None:
    batches = sum(len(batches) for batches in STUDY_JOBS.values())
    methods = len(paper.constants.methods)
    assert len(paper.cases) == batches * len(STUDY_RATES_GBPS) * methods > 200
    won, of = wins(paper.cases)
    assert (won, of) == (sum(row["vs_ddp"] > 1 for row in paper.cases), len(paper.cases))


def test_in_data_centres_it_rarely_wins(paper: CompressionStudy) -> None:
    """A tenth is what is wanted (the paper: 6 of more than 200). On the grid of its repository it
    is an eighth, 25 of 198: a fifth at 10 Gbit/s, a twentieth at 20."""
    won, of = wins(paper.in_data_centres)
    assert won / of <= 0.13
    won, of = wins(row for row in paper.cases if row["gbps"] > 10)
    assert won / of <= 0.06


def test_break_even_of_powersgd(paper: CompressionStudy) -> None:
    """The paper reports 8.2 Gbit/s for rank 4 on ResNet-50."""
    [found] = [
        row["pays_below_gbps"]
        for row in paper.break_evens
        if (row["model"], row["method"]) == ("resnet50", "powersgd(rank=4)")
    ]
    assert 7 <= found <= 10
    workload = workload_of("resnet50", "v100", 64)
    compressed = compressed_step(paper.constants, "powersgd(rank=4)", workload, STUDY_WORKER_COUNT)
    below = ddp_step.pays_below(
        dense_step(workload, STUDY_WORKER_COUNT), compressed, STUDY_MESSAGE_SECONDS
    )
    assert 8 * below / 1e9 == pytest.approx(found)


def test_a_small_ratio_suffices(paper: CompressionStudy) -> None:
    """At 10 Gbit/s, each model with its middle batch: 2 to 7 times smaller."""
    middle = {model: sorted(batches)[1] for model, batches in STUDY_JOBS.items()}
    found = [row["ratio"] for row in paper.ratios if row["batch"] == middle[row["model"]]]
    assert len(found) == len(STUDY_JOBS)
    assert all(2 <= ratio <= 7 for ratio in found)


def test_a_break_even_is_where_the_winner_changes(paper: CompressionStudy) -> None:
    for row in paper.break_evens:
        workload = workload_of(row["model"], "v100", row["batch"])
        dense = dense_step(workload, row["workers"])
        compressed = compressed_step(paper.constants, row["method"], workload, row["workers"])
        if row["pays"] == "below":
            slower, faster = (
                AlphaBetaNetwork.of_gbps(row["pays_below_gbps"] * by, STUDY_MESSAGE_SECONDS)
                for by in (0.99, 1.01)
            )
            assert compressed.seconds(slower) < dense.seconds(slower)
            assert compressed.seconds(faster) > dense.seconds(faster)


def test_payloads_and_costs_by_hand() -> None:
    """`sign` sends a bit an element; under the paper's constants all payloads go to everybody, and
    under yours shards are reduced, so that T_ed doesn't grow with workers."""
    cost = CodecCost(
        bucket=FittedValue(0.001),
        encode=FittedValue(1e-9),
        decode=FittedValue(2e-9),
        gathered=FittedValue(3e-9),
    )
    workload = workload_of("vgg19", "v100", 32)
    elements = sum(tensor.elements for tensor in model_named("vgg19").tensors)
    machine = Machine(codecs={"sign": cost})
    shards = compressed_step(constants_of(machine), "sign", workload, 16)
    assert shards.codec == pytest.approx(0.001 + (1e-9 + 2e-9) * elements)
    own = [payload for payload in shards.payloads if payload.nbytes > 0.9 * elements / 8]
    assert [payload.collective for payload in own] == [ddp_step.ring]
    gathered = compressed_step(paper_constants(), "sign", workload, 16)
    assert ddp_step.all_gather in [payload.collective for payload in gathered.payloads]
    v100 = paper_constants().machine.codecs["sign"]
    per_element = v100.encode.value + v100.decode.value + 16 * v100.gathered.value
    assert gathered.codec == pytest.approx(per_element * elements)


def test_alternating_factors_count_in_their_mean() -> None:
    constants = constants_of(assumed_machine("cpu"))
    workload = workload_of("resnet50", "v100", 32)

    def sent(method: str) -> float:
        payloads = compressed_step(constants, method, workload, 8).payloads
        return sum(payload.nbytes for payload in payloads)

    exact = sum(4 * t.elements for t in workload.tensors if len(t.shape) == 1)
    assert sent("acpsgd(rank=4)") - exact == pytest.approx((sent("powersgd(rank=4)") - exact) / 2)
