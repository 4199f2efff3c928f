"""What compressors declare: payload bytes are the formula's."""

from __future__ import annotations

from math import ceil

import pytest

from thalweg.catalog import default_catalog, parse_plan
from thalweg.compress import Payload
from thalweg.facts import Tensor

SHAPES = [(64, 3, 7, 7), (64,), (256, 64, 1, 1), (1000, 2048), (1000,), (8, 8)]
TENSORS = [Tensor(name=f"t{i}", shape=shape) for i, shape in enumerate(SHAPES)]
LARGE = [64 * 3 * 49, 256 * 64, 1000 * 2048]  # the others are vectors, or small
REST = 64 + 1000 + 64
ALL = sum(LARGE) + REST


def payloads(text: str, step: int = 0) -> list[Payload]:
    choice = parse_plan(f"ring+{text}").precision
    assert choice is not None
    compressor = default_catalog().compressors[choice.name]
    return compressor.payloads(TENSORS, step, **choice.arguments)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("int8", sum(260 * ceil(d / 256) for d in LARGE)),
        ("int8(block=64)", sum(68 * ceil(d / 64) for d in LARGE)),
        ("qsgd(bits=4)", sum(260 * ceil(d / 512) for d in LARGE)),
        ("terngrad", sum(d // 4 + 4 for d in LARGE)),
        ("efsign", sum(d // 8 + 4 for d in LARGE)),
        ("topk", 8 * sum(ceil(d * 0.01) for d in LARGE)),
        ("mstopk(ratio=0.001)", 8 * sum(ceil(d * 0.001) for d in LARGE)),
        ("dgc", 8 * sum(ceil(d * 0.01) for d in LARGE)),
        ("randomk", 4 * sum(ceil(d * 0.01) for d in LARGE)),
        ("randomblock", 4 * sum(ceil(d * 0.01) for d in LARGE)),
    ],
)
def test_one_payload_and_the_rest_exact(text: str, nbytes: int) -> None:
    compressed, exact = payloads(text)
    assert compressed.nbytes == nbytes
    assert exact == Payload("exact", REST, 4, exact=True)


def test_signs_and_their_scales() -> None:
    signs, scales, exact = payloads("sign")
    assert signs.nbytes == sum(8 * ceil(d / 64) for d in LARGE)
    assert (scales.nbytes, scales.exact) == (4 * len(LARGE), True)
    assert exact.elements == REST


@pytest.mark.parametrize("text", ["fp16", "bf16"])
def test_casts_take_everything(text: str) -> None:
    assert [p.nbytes for p in payloads(text)] == [2 * ALL]


def test_low_rank_factors() -> None:
    left = 64 + 256 + 1000
    right = 147 + 64 + 2048
    p, q, exact = payloads("powersgd(rank=2)")
    assert (p.nbytes, q.nbytes, exact.elements) == (8 * left, 8 * right, REST)
    assert [x.nbytes for x in payloads("acpsgd(rank=2)", step=0)] == [8 * left, 4 * REST]
    assert [x.nbytes for x in payloads("acpsgd(rank=2)", step=1)] == [8 * right, 4 * REST]


def test_factors_that_save_nothing_are_not_made() -> None:
    """Rank 64 of 256 x 64 is the matrix itself."""
    _, _, exact = payloads("powersgd(rank=64)")
    assert exact.elements == REST + 256 * 64 + 64 * 147


def test_what_would_not_save_bytes_is_not_compressed() -> None:
    assert [p.name for p in payloads("topk(ratio=0.6)")] == ["exact"]
    halves = [Tensor(name="h", shape=(64, 64), dtype="bfloat16")]
    powersgd = default_catalog().compressors["powersgd"]
    [exact] = powersgd.payloads(halves, 0, rank=31, feedback=None)
    assert exact.exact


def test_what_they_declare() -> None:
    parts = default_catalog().compressors
    quantisers = {"fp16", "bf16", "int8", "qsgd", "terngrad", "sign", "efsign"}
    sparsifiers = {"topk", "mstopk", "dgc", "randomk", "randomblock"}
    assert set(parts) == quantisers | sparsifiers | {"powersgd", "acpsgd"}
    summable = {name for name, part in parts.items() if part.summable}
    assert summable == {"fp16", "bf16", "randomk", "randomblock", "powersgd", "acpsgd"}
    linear = {name for name, part in parts.items() if part.linear}
    assert linear == {"fp16", "bf16", "randomk", "randomblock"}
    in_step = {name for name, part in parts.items() if part.in_step}
    assert in_step == {"randomk", "randomblock", "powersgd", "acpsgd"}
