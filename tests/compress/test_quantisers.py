"""int8, QSGD, TernGrad and signs: what they promise of an element, of a sum, over many steps."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.compress.simulated import NUMPY_KERNELS
from tests.examples import examples
from thalweg.catalog import default_catalog
from thalweg.compress import GatheredCodec, ShardableCodec, arrange
from thalweg.compress.bit_packing import packed_nbytes, packing
from thalweg.compress.sign import VoteCounter
from thalweg.errors import NotFinite
from thalweg.facts import Tensor

Vector = np.ndarray[Any, Any]
Settings = dict[str, int]

PLANS: list[tuple[str, Settings]] = [
    ("int8", {"block": 256}),
    ("int8", {"block": 7}),
    *(("qsgd", {"bits": bits, "block": 512}) for bits in range(2, 9)),
    ("qsgd", {"bits": 4, "block": 13}),
    ("qsgd", {"bits": 3, "block": 13}),
    ("terngrad", {}),
    ("sign", {}),
    ("efsign", {}),
]
BLOCKWISE = [plan for plan in PLANS if "block" in plan[1]]
SHAPES = [(33, 41), (64, 32), (70_001, 1), (5, 17, 19)]
FEW = [(33, 41), (64, 32)]

seeds = st.integers(0, 2**32 - 1)
magnitudes = st.integers(-44, 37).map(lambda exponent: 10.0**exponent)


def codec_for(
    name: str, shapes: Sequence[tuple[int, ...]] = SHAPES, **arguments: int
) -> GatheredCodec:
    compressor = default_catalog().compressors[name]
    tensors = [Tensor(name=f"t{i}", shape=shape) for i, shape in enumerate(shapes)]
    layout = arrange(tensors, compressor, dict(arguments))
    codec = compressor.codec(layout.compressed, layout.length, NUMPY_KERNELS, **arguments)
    assert isinstance(codec, GatheredCodec)
    return codec


def elementwise(name: str, **arguments: int) -> ShardableCodec:
    codec = codec_for(name, **arguments)
    assert isinstance(codec, ShardableCodec)
    return codec


def gradient(codec: GatheredCodec, seed: int, magnitude: float = 1.0) -> Vector:
    """Normal, of another magnitude in each tensor; some elements are 0, and so is the filling."""
    rng = np.random.default_rng(seed)
    values = np.zeros(codec.length, np.float32)
    for segment in codec.segments:
        drawn = rng.standard_normal(segment.elements) * magnitude * rng.uniform(0.1, 1)
        values[segment.place] = drawn * (rng.random(segment.elements) > 0.1)
    return values


def encoded(codec: GatheredCodec, values: Vector, step: int = 0, rank: int = 0) -> Vector:
    payload = np.empty(codec.nbytes, np.uint8)
    codec.encode(values.copy(), payload, step, rank, keep=False)
    return payload


def decoded(codec: GatheredCodec, payloads: Sequence[Vector]) -> Vector:
    out = np.full(codec.length, np.nan, np.float32)
    codec.add_up(payloads, out)
    return out


def two_shot(codecs: Sequence[ShardableCodec], payloads: Sequence[Vector], step: int = 0) -> Vector:
    """Shards reduced by one rank each, of sizes that differ, and gathered."""
    unit = codecs[0].unit_nbytes
    units = codecs[0].nbytes // unit
    cuts = [units * rank**2 // len(codecs) ** 2 for rank in range(len(codecs) + 1)]
    whole = np.empty(codecs[0].nbytes, np.uint8)
    for rank, (codec, begin, end) in enumerate(zip(codecs, cuts, cuts[1:], strict=False)):
        here = slice(begin * unit, end * unit)
        codec.reduce([payload[here] for payload in payloads], whole[here], begin, step, rank)
    out = np.full(codecs[0].length, np.nan, np.float32)
    codecs[0].decode(whole, out)
    return out


def filling(codec: GatheredCodec) -> Vector:
    """Which elements only fill up."""
    fills = np.ones(codec.length, bool)
    for segment in codec.segments:
        fills[segment.place] = False
    return fills


def steps_of(values: Vector, block: int, levels: int) -> Vector:
    """Each element's distance between two levels."""
    largest = np.abs(values.reshape(-1, block)).max(axis=1).astype(np.float64)
    return np.repeat(largest / levels, block)


@pytest.mark.parametrize(("name", "arguments"), PLANS)
def test_payloads_have_the_declared_bytes(name: str, arguments: Settings) -> None:
    codec = codec_for(name, **arguments)
    tensors = [Tensor(name=s.name, shape=s.shape) for s in codec.segments]
    declared = default_catalog().compressors[name].sizes(tensors, 0, **arguments)
    beside = 0 if codec.scales is None else codec.scales.nbytes
    assert codec.nbytes + beside == sum(payload.nbytes for payload in declared)


@examples(20)
@given(seed=seeds, magnitude=magnitudes, block=st.sampled_from([7, 256, 100_000]))
def test_int8_is_off_by_half_a_step_at_most(seed: int, magnitude: float, block: int) -> None:
    codec = elementwise("int8", block=block)
    values = gradient(codec, seed, magnitude)
    step = steps_of(values, block, 127)
    error = np.abs(decoded(codec, [encoded(codec, values)]).astype(np.float64) - values)
    assert (error <= step / 2 * (1 + 1e-4) + 2.0**-119 * (step < 2.0**-125)).all()


@examples(20)
@given(seed=seeds, magnitude=magnitudes, plan=st.sampled_from(BLOCKWISE[2:]))
def test_qsgd_is_off_by_less_than_a_level(
    seed: int, magnitude: float, plan: tuple[str, Settings]
) -> None:
    codec = codec_for("qsgd", **plan[1])
    values = gradient(codec, seed, magnitude)
    level = steps_of(values, plan[1]["block"], 2 ** (plan[1]["bits"] - 1) - 1)
    error = np.abs(decoded(codec, [encoded(codec, values)]).astype(np.float64) - values)
    assert (error <= level * (1 + 1e-4) + 2.0**-119 * (level < 2.0**-112)).all()


@examples(15)
@given(seed=seeds, ranks=st.integers(1, 5), plan=st.sampled_from(BLOCKWISE))
def test_reduced_shards_are_the_sum_rounded_once_more(
    seed: int, ranks: int, plan: tuple[str, Settings]
) -> None:
    name, arguments = plan
    codec = elementwise(name, **arguments)
    payloads = [encoded(codec, gradient(codec, seed + r), rank=r) for r in range(ranks)]
    total = decoded(codec, payloads)
    assert np.allclose(total, sum(decoded(codec, [p]) for p in payloads), rtol=0, atol=1e-5)
    levels = 2 ** (arguments.get("bits", 8) - 1) - 1
    most = steps_of(total, arguments["block"], levels) / (2 if name == "int8" else 1)
    assert (np.abs(two_shot([codec] * ranks, payloads) - total) <= most * (1 + 1e-4)).all()


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_qsgd_is_right_on_average(bits: int) -> None:
    """Of what is encoded and of what is reduced; a rounding's deviation is half a level at most."""
    codec, times = elementwise("qsgd", bits=bits, block=64), 300
    values = gradient(codec, 1)
    once, twice = np.zeros(codec.length), np.zeros(codec.length)
    for step in range(times):
        payload = encoded(codec, values, step)
        once += decoded(codec, [payload])
        twice += two_shot([codec], [payload], step)
    level = steps_of(values, 64, 2 ** (bits - 1) - 1)
    allowed = 6 * 0.5 * level / np.sqrt(times) + 1e-6
    assert (np.abs(once / times - values) <= allowed).all()
    assert (np.abs(twice / times - values) <= 2 * allowed).all()


def test_terngrad_is_the_clipped_gradient_on_average() -> None:
    codec, times = codec_for("terngrad", FEW), 400
    values = gradient(codec, 2)
    values[3] = 50  # far outside of 2.5 sigma
    total = np.zeros(codec.length)
    for step in range(times):
        result = decoded(codec, [encoded(codec, values, step)])
        total += result
    for segment in codec.segments:
        sigma = np.sqrt(np.mean(values[segment.place].astype(np.float64) ** 2))
        limit = min(2.5 * sigma, np.abs(values[segment.place]).max())
        clipped = np.clip(values[segment.place], -limit, limit)
        assert np.isin(np.unique(np.abs(result[segment.place])), np.float32([0, limit])).all()
        assert np.abs(total[segment.place] / times - clipped).max() < 6 * 0.5 * limit / 20


@pytest.mark.parametrize("ranks", range(1, 18))
def test_votes_are_majorities(ranks: int) -> None:
    rng = np.random.default_rng(ranks)
    votes = [np.frombuffer(rng.bytes(800), np.uint64) for _ in range(ranks)]
    each = [np.unpackbits(vote.view(np.uint8), bitorder="little") for vote in votes]
    count = np.sum(each, axis=0, dtype=int)
    tally, vote = VoteCounter(128), np.empty(100, np.uint64)
    for step in (0, 1):
        tally.majority(votes, vote, step)
        won = np.unpackbits(vote.view(np.uint8), bitorder="little")
        tie = 2 * count == ranks
        assert (won[~tie] == (2 * count > ranks)[~tie]).all()
        assert (won[tie] == (np.flatnonzero(tie) + step + 1) % 2).all()


@examples(15)
@given(seed=seeds, ranks=st.integers(1, 9), magnitude=magnitudes)
def test_signs_stand_for_the_vote_times_the_mean_magnitude(
    seed: int, ranks: int, magnitude: float
) -> None:
    codec = elementwise("sign")
    gradients = [gradient(codec, seed + rank, magnitude / ranks) for rank in range(ranks)]
    payloads, scales = [], np.zeros(len(codec.segments), np.float64)
    for values in gradients:
        payloads.append(encoded(codec, values))
        assert codec.scales is not None
        scales += codec.scales
    codec.scales[:] = scales
    result = decoded(codec, payloads)
    assert (result == two_shot([codec] * ranks, payloads)).all()
    balance = np.sum([np.where(np.signbit(values), -1, 1) for values in gradients], axis=0)
    for segment, scale in zip(codec.segments, codec.scales, strict=True):
        expected = sum(
            np.abs(values[segment.place].astype(np.float64)).mean() for values in gradients
        )
        assert scale == pytest.approx(expected, rel=1e-4, abs=1e-42)
        decided = balance[segment.place] != 0
        assert (result[segment.place] == scale * np.sign(balance[segment.place]))[decided].all()
        assert (np.abs(result[segment.place]) == scale).all()
    assert (result[filling(codec)] == 0).all()


@examples(15)
@given(seed=seeds, ranks=st.integers(1, 5))
def test_efsign_adds_scaled_signs(seed: int, ranks: int) -> None:
    codec = codec_for("efsign")
    gradients = [gradient(codec, seed + rank) for rank in range(ranks)]
    result = decoded(codec, [encoded(codec, values) for values in gradients])
    for segment in codec.segments:
        parts = [values[segment.place] for values in gradients]
        expected = sum(np.abs(p).mean() * np.where(np.signbit(p), -1.0, 1.0) for p in parts)
        assert np.allclose(result[segment.place], expected, rtol=1e-4, atol=1e-5)
    assert (result[filling(codec)] == 0).all()


@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize("way", ["sign gathered", "sign two-shot", "efsign gathered"])
def test_what_is_left_out_is_kept(way: str, ranks: int) -> None:
    """Results, residuals of all ranks and of the vote add up to the gradients; and since residuals
    don't grow, the mean result tends to the mean gradient."""
    name, how = way.split()
    codecs = [codec_for(name, FEW) for _ in range(ranks)]
    residuals = [np.zeros(codecs[0].length, np.float32) for _ in range(ranks)]
    sent, wanted, off = np.zeros(codecs[0].length), np.zeros(codecs[0].length), {}
    for step in range(160):
        payloads = [np.empty(codecs[0].nbytes, np.uint8) for _ in range(ranks)]
        for rank, (codec, values) in enumerate(zip(codecs, residuals, strict=True)):
            new = gradient(codec, rank) / ranks + gradient(codec, step * ranks + rank, 0.3) / ranks
            wanted += new
            codec.accumulate(new, values)
            codec.encode(values, payloads[rank], step, rank, keep=True)
        if codecs[0].scales is not None:
            scales = np.sum([codec.scales for codec in codecs], axis=0)
            for codec, values in zip(codecs, residuals, strict=True):
                assert codec.scales is not None
                codec.scales[:] = scales
                codec.keep_residual(values, ranks)
        if how == "two-shot":
            sent += two_shot([c for c in codecs if isinstance(c, ShardableCodec)], payloads, step)
        else:
            results = [decoded(codec, payloads) for codec in codecs]
            assert all((result == results[0]).all() for result in results)
            sent += results[0]
        off[step] = np.linalg.norm(sent - wanted) / (step + 1)
    left = np.sum(residuals, axis=0, dtype=np.float64)
    for codec in codecs:
        for segment in codec.segments:
            if "vote" in codec.state:
                left[segment.place] += codec.state["vote"].arrays[segment.name]
    assert np.allclose(sent + left, wanted, rtol=0, atol=1e-3)
    assert off[159] < 0.1 * off[0]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("name", "arguments"), PLANS)
def test_what_is_not_finite_is_named_and_nothing_has_changed(
    name: str, arguments: Settings, bad: float
) -> None:
    codec = codec_for(name, **arguments)
    values = gradient(codec, 3)
    values[codec.segments[2].place.stop - 1] = bad
    before, payload = values.copy(), np.empty(codec.nbytes, np.uint8)
    with pytest.raises(NotFinite) as caught:
        codec.encode(values, payload, 0, 0, keep=True)
    assert caught.value.names == ("t2",)
    assert np.array_equal(values, before, equal_nan=True)


@pytest.mark.parametrize("value", [3.4028235e38, -3.0e38, 1e-45, 3e-39, 0.0])
@pytest.mark.parametrize(("name", "arguments"), PLANS)
def test_any_magnitude_is_encoded(name: str, arguments: Settings, value: float) -> None:
    codec = codec_for(name, **arguments)
    values = np.zeros(codec.length, np.float32)
    for segment in codec.segments:
        values[segment.place] = value
    result = decoded(codec, [encoded(codec, values)])
    assert np.allclose(result, values, rtol=1e-5, atol=2.0**-119)
    assert (result[filling(codec)] == 0).all()


@pytest.mark.parametrize(("name", "arguments"), PLANS)
def test_the_result_may_replace_what_was_encoded(name: str, arguments: Settings) -> None:
    codec = codec_for(name, **arguments)
    values, payload = gradient(codec, 4), np.empty(codec.nbytes, np.uint8)
    expected = decoded(codec, [encoded(codec, values)])
    codec.encode(values, payload, 0, 0, keep=False)
    codec.add_up([payload], values)
    assert (values == expected).all()


@pytest.mark.parametrize(("name", "arguments"), PLANS)
def test_same_step_and_rank_same_payload(name: str, arguments: Settings) -> None:
    """On a codec that has done other things, too; and nobody else's generator is used."""
    first, second = codec_for(name, **arguments), codec_for(name, **arguments)
    values = gradient(first, 5)
    states = random.getstate(), np.random.get_state()[1].tobytes()
    payload = encoded(first, values, step=7, rank=2)
    decoded(second, [encoded(second, values[::-1].copy(), step=8)])
    assert (encoded(second, values, step=7, rank=2) == payload).all()
    if name in ("qsgd", "terngrad"):
        assert (encoded(first, values, step=8, rank=2) != payload).any()
        assert (encoded(first, values, step=7, rank=3) != payload).any()
    assert states == (random.getstate(), np.random.get_state()[1].tobytes())


@examples(40)
@given(seed=seeds, bits=st.integers(2, 8), count=st.integers(1, 40), rows=st.integers(1, 5))
def test_packed_integers_come_back(seed: int, bits: int, count: int, rows: int) -> None:
    integers = np.random.default_rng(seed).integers(
        -(2 ** (bits - 1)), 2 ** (bits - 1), (rows, count)
    )
    nbytes = packed_nbytes(bits, count)
    packed, out = np.empty((rows, nbytes), np.uint8), np.empty((rows, count), np.float32)
    way = packing(bits, count, 5)
    way.pack(integers.astype(np.int8), packed)
    way.unpack(packed, out)
    assert (out == integers).all()
    single = (integers[..., None] >> np.arange(bits) & 1).reshape(rows, -1)
    assert (packed == np.packbits(single.astype(bool), axis=1, bitorder="little")).all()


@pytest.mark.parametrize(("name", "arguments"), PLANS)
def test_nothing_the_size_of_a_gradient_is_allocated(name: str, arguments: Settings) -> None:
    codec = codec_for(name, [(1024, 2048)], **arguments)
    values, out = gradient(codec, 6), np.empty(codec.length, np.float32)
    payload, into = np.empty((2, codec.nbytes), np.uint8)
    for keep in (False, True):
        for watched in (False, True):  # at first it may make room for itself
            if watched:
                tracemalloc.start()
            codec.encode(values, payload, 0, 0, keep=keep)
            codec.keep_residual(values, 2)
            if isinstance(codec, ShardableCodec):
                codec.reduce([payload] * 2, into, 0, 0, 0)
                codec.decode(into, out)
            codec.add_up([payload] * 2, out)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < values.nbytes / 8
