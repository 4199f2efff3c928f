"""What compressing costs: the arithmetic, what is driven how, and rows of a small model."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from math import inf

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st

from tests.compress.simulated import NUMPY_KERNELS
from thalweg import Cluster, Group, Size, Workload, compile_step, parse_plan
from thalweg.bench.compress import CompressBenchResult, bench_compress
from thalweg.bench.compress_costs import (
    SWEPT_BITS_PER_SECOND,
    PayloadPattern,
    at_all_speeds,
    dense_wire,
    derived_metrics,
    exchange_of,
    method_of,
    wire_nbytes,
)
from thalweg.bench.ddp_hooks import single_process_group
from thalweg.catalog import default_catalog
from thalweg.compress import Segment, ShardableCodec, SummableCodec
from thalweg.compress.codec import Array
from thalweg.errors import PlanError
from thalweg.facts import Tensor
from thalweg.predict.ddp_step import (
    OVERLAP_SLOWDOWN_FACTOR,
    AlphaBetaNetwork,
    DdpStep,
    SentPayload,
    pays_below,
)
from thalweg.probing.codec_trials import (
    Gradients,
    TimedGatheredCodec,
    TimedSummedCodec,
    TimedTwoShotCodec,
    least_seconds,
)

SMALL = Workload(
    name="small",
    tensors=(
        Tensor(name="a.weight", shape=(64, 48)),
        Tensor(name="a.bias", shape=(64,)),
        Tensor(name="b.weight", shape=(10, 64, 2)),
    ),
)
PEERS = [
    "torch fp16 hook",
    "torch powersgd hook (rank=4)",
    "bare fp16 casts",
    "torch.topk (1 %)",
    "uint8 signs",
    "signs unpacked to floats",
    "powersgd, straightforward products",
]


def costs(
    exchange: PayloadPattern = PayloadPattern.SUM,
    workers: int = 8,
    seconds: float = 0.05,
    payload: int = 100,
) -> tuple[DdpStep, DdpStep]:
    sent = (exchange.sent(payload), SentPayload(40))
    step = DdpStep(backward=0.2, codec=seconds, exposed=sent, workers=workers)
    return DdpStep.uncompressed(0.2, [6000, 2000], workers), step


def at(speed: float) -> AlphaBetaNetwork:
    """Links of so many bits per second."""
    return AlphaBetaNetwork(0.0, speed / 8)


# Arithmetic


@pytest.mark.parametrize(("workers", "added", "gathered"), [(2, 1, 1), (4, 1.5, 3), (8, 1.75, 7)])
def test_what_each_worker_sends(workers: int, added: float, gathered: float) -> None:
    assert wire_nbytes([PayloadPattern.SUM.sent(100)], workers) == added * 100
    assert wire_nbytes([PayloadPattern.TWO_SHOT.sent(100)], workers) == added * 100
    assert wire_nbytes([PayloadPattern.ALL_GATHER.sent(100)], workers) == gathered * 100
    dense, step = costs(PayloadPattern.ALL_GATHER, workers)
    assert derived_metrics(dense, step)["wire_bytes"] == round(gathered * 100 + added * 40)
    assert wire_nbytes(step.payloads, workers) == gathered * 100 + added * 40
    assert dense_wire(dense) == added * 8000


def test_break_even_is_what_is_saved_over_what_it_takes() -> None:
    found = derived_metrics(*costs())
    assert 1e9 * found["breakeven_gbps"] == pytest.approx(8 * 1.75 * (8000 - 140) / 0.05)
    assert found["ratio"] == 8000 / 140


def test_what_saves_nothing_never_pays() -> None:
    dense, more = costs(PayloadPattern.ALL_GATHER, payload=4000)
    found = derived_metrics(dense, more)
    assert (found["breakeven_gbps"], found["pays"]) == (None, "never")
    steps = zip(SWEPT_BITS_PER_SECOND, at_all_speeds(more), at_all_speeds(dense), strict=True)
    assert all(step > ddp for speed, step, ddp in steps if speed < 1e9)


def test_ddp_hides_all_but_the_last_bucket() -> None:
    dense, _ = costs()
    assert dense.seconds(at(1e12)) == pytest.approx(OVERLAP_SLOWDOWN_FACTOR * 0.2)
    assert dense.seconds(at(1e3)) == pytest.approx(8 * 1.75 * 8000 / 1e3)


@given(
    st.integers(1, 10**9),
    st.integers(1, 10**9),
    st.integers(1, 10**9),
    st.floats(1e-4, 10),
    st.floats(1e-4, 10),
)
@example(50_002, 1, 50_002, 0.5, 8.0)  # shorter on fast links and on slow ones, longer in between
def test_it_beats_ddp_just_below_that_speed(
    hidden: int, last: int, payload: int, seconds: float, backward: float
) -> None:
    dense = DdpStep.uncompressed(backward, [hidden, last], 4)
    sent = [SentPayload(payload)]
    step = DdpStep(backward=backward, codec=seconds, exposed=sent, workers=4)
    speed = 8 * pays_below(dense, step, alpha=0.0)
    if speed == 0:
        assert payload >= hidden + last
    elif speed == inf:
        steps = zip(at_all_speeds(step), at_all_speeds(dense), strict=True)
        assert all(compressed <= ddp * (1 + 1e-9) for compressed, ddp in steps)
    else:
        assert step.seconds(at(speed)) == pytest.approx(dense.seconds(at(speed)), rel=1e-6)
        for slower in (0.9, 0.5, 0.01):
            network = at(slower * speed)
            assert step.seconds(network) <= dense.seconds(network) * (1 + 1e-9)


@pytest.mark.parametrize("workers", [2, 3, 8])
@pytest.mark.parametrize("name", sorted(default_catalog().compressors))
def test_exchanges_are_those_that_are_run(name: str, workers: int) -> None:
    plan, group = parse_plan(f"ring+{name}"), Group.everybody(Cluster.flat(workers))
    chains = compile_step(plan, group, Workload.of_size(Size.parse("40MB")), 0).chains
    compressor = default_catalog().compressors[name]
    exchange = exchange_of(method_of(name), workers)
    shots = {len({r.schedule.name for r in chain.encoded}) for chain in chains if chain.encoded}
    assert shots == {2 if exchange is PayloadPattern.TWO_SHOT else 1}
    assert compressor.summable == (exchange is PayloadPattern.SUM)


# How codecs are driven


class Turns(SummableCodec):
    """Two rounds at even steps, one at odd ones; half of everything is left out."""

    def rounds(self, values: Array, out: Array, step: int, *, keep: bool) -> Iterator[Array]:
        sent = values * np.float32(0.5)
        for _ in range(2 - step % 2):
            yield sent
        if keep:
            values -= sent
        out[:] = sent


class Truncated(ShardableCodec):
    """The upper two bytes of every value."""

    unit_nbytes = 2

    def __init__(self, segments: Sequence[Segment], length: int) -> None:
        super().__init__(segments, length, NUMPY_KERNELS)
        self.reduced: list[tuple[int, int, int]] = []

    @property
    def nbytes(self) -> int:
        return 2 * self.length

    @property
    def scales(self) -> Array:
        return np.ones(3, np.float32)

    def encode(self, values: Array, payload: Array, step: int, rank: int, *, keep: bool) -> None:
        payload[:] = values.view(np.uint8).reshape(-1, 4)[:, 2:].ravel()
        if keep:
            values -= _widened(payload)

    def add_up(self, payloads: Sequence[Array], out: Array) -> None:
        out[:] = sum(map(_widened, payloads))

    def reduce(
        self, shards: Sequence[Array], into: Array, first: int, step: int, rank: int
    ) -> None:
        self.reduced.append((first, len(into), len(shards)))
        total = sum(map(_widened, shards))
        into[:] = np.asarray(total, np.float32).view(np.uint8).reshape(-1, 4)[:, 2:].ravel()

    def decode(self, payload: Array, out: Array) -> None:
        out[:] = _widened(payload)


def _widened(payload: Array) -> Array:
    whole = np.zeros((len(payload) // 2, 4), np.uint8)
    whole[:, 2:] = payload.reshape(-1, 2)
    return whole.view(np.float32).ravel()


SEGMENTS = (Segment("a", (5, 2), 0), Segment("b", (3,), 12))
LENGTH = 16  # with zeros between and behind
MINE, *OTHERS = [Gradients().of(SEGMENTS, LENGTH, rank) for rank in range(4)]


def test_gradients_differ_between_ranks_and_have_zeros_where_filled_up() -> None:
    assert not MINE[[10, 11, 15]].any()
    assert MINE[:10].all()
    assert len({gradient.tobytes() for gradient in (MINE, *OTHERS)}) == 4


def test_vectors_that_are_summed() -> None:
    trial = TimedSummedCodec(Turns(SEGMENTS, LENGTH, NUMPY_KERNELS), MINE, True, period=2)
    assert trial.payload == 4 * LENGTH * 1.5
    assert trial.feedback is not None
    trial.refill()
    before = trial.feedback.residual + MINE
    trial.encode(2)
    assert np.array_equal(trial.gradient, MINE)
    trial.decode(2)
    assert np.allclose(trial.gradient, before / 2)
    assert np.allclose(trial.feedback.residual, before / 2)
    assert min(least_seconds(trial, 2)) >= 0


def test_payloads_that_are_gathered() -> None:
    trial = TimedGatheredCodec(Truncated(SEGMENTS, LENGTH), MINE, False, OTHERS)
    assert (trial.payload, trial.exact) == (2 * LENGTH, 12)
    trial.encode(0)
    trial.decode(0)
    assert np.allclose(trial.gradient, sum([MINE, *OTHERS]), atol=1e-4)


def test_shards_that_are_reduced() -> None:
    """Its own only: the others' are there before."""
    codec = Truncated(SEGMENTS, LENGTH)
    trial = TimedTwoShotCodec(codec, MINE, False, OTHERS)
    assert codec.reduced == [(0, 8, 4), (4, 8, 4), (8, 8, 4), (12, 8, 4)]
    trial.encode(1)
    trial.decode(1)
    assert codec.reduced[4:] == [(0, 8, 4)]
    assert np.allclose(trial.gradient, sum([MINE, *OTHERS]), atol=1e-4)


# Rows


def run(*methods: str) -> CompressBenchResult:
    return bench_compress(
        SMALL,
        {text: method_of(text) for text in methods},
        workers=4,
        repeats=1,
        backward=0.1,
        progress=lambda done, total, name: None,
    )


def test_rows_of_a_small_model() -> None:
    threads = torch.get_num_threads()
    found = run("fp16", "bf16(warmup=2)")
    assert (torch.get_num_threads(), dist.is_initialized()) == (threads, False)
    assert [row["method"] for row in found.rows] == ["fp16", "bf16(warmup=2)", *PEERS]
    assert [row["peer"] for row in found.rows] == [False] * 2 + [True] * len(PEERS)
    elements = 64 * 48 + 64 + 10 * 128
    assert dense_wire(found.dense) == 1.5 * 4 * elements
    for row in found.rows[:3]:
        assert (row["exchange"], row["payload_bytes"]) == ("sum", 2 * elements)
        assert (row["wire_bytes"], row["ratio"]) == (3 * elements, 2)
    for row in found.rows:
        assert row["total_ms"] == pytest.approx(row["encode_ms"] + (row["decode_ms"] or 0))
        saved = 8 * (dense_wire(found.dense) - row["wire_bytes"]) / (1e-3 * row["total_ms"])
        if row["breakeven_gbps"] is not None:
            assert row["breakeven_gbps"] == pytest.approx(saved / 1e9, rel=1e-3)
        assert len(row["step_seconds"]) == len(SWEPT_BITS_PER_SECOND)
    hook, casts, topk, signs = found.rows[3:7]
    assert casts["payload_bytes"] == 2 * elements
    assert hook["decode_ms"] is None
    factors = 4 * (64 + 48) + 4 * (10 + 128)
    assert hook["payload_bytes"] == 4 * (factors + 64)
    assert topk["payload_bytes"] == 8 * (31 + 13) + 4 * 64
    assert signs["payload_bytes"] == 64 * 48 + 10 * 128 + 4 * 64
    assert signs["wire_bytes"] == 3 * (64 * 48 + 10 * 128) + 1.5 * 4 * 64


def test_all_methods_that_compress() -> None:
    texts = list(default_catalog().compressors)
    assert {"fp16", "bf16"} <= set(texts)
    assert [row["method"] for row in run(*texts).rows] == [*texts, *PEERS]


def test_errors_are_told_as_before_afterwards() -> None:
    before = sys.excepthook
    with single_process_group():
        pass
    assert sys.excepthook is before


def test_without_a_process_group_hooks_are_left_out() -> None:
    with single_process_group():  # there can't be a second
        found = run("fp16")
    assert [row["method"] for row in found.rows] == ["fp16", *PEERS[2:]]
    assert "torch's hooks are left out" in found.notes[0]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("fp15", "there is no compressor 'fp15'"),
        ("fp16 @ bucket=1MB", "is more than a compressor"),
        ("", "can't read"),
    ],
)
def test_methods_that_are_none(text: str, line: str) -> None:
    with pytest.raises(PlanError, match=line):
        method_of(text)
