"""What compressors cost: figures made by a formula are found again, and real ones have an order."""

from __future__ import annotations

import numpy as np
import pytest
from torch._C._distributed_c10d import HashStore

from thalweg.catalog import default_catalog, parse_plan
from thalweg.engine.collectives import Collectives, RoundCounter
from thalweg.engine.engine import Engine
from thalweg.facts import Cluster, CodecCost, Tensor
from thalweg.members.abort import AbortFlag
from thalweg.plan import Choice
from thalweg.probing.codec_costs import cost_of, measure_codecs, sample, setups_of
from thalweg.schedules import Group
from thalweg.transports import MemoryNetwork

TENSORS = [Tensor(name=f"t{number}", shape=(256, 256)) for number in range(8)]


def choice_of(text: str) -> Choice:
    choice = parse_plan(f"ring+{text}").precision
    assert choice is not None
    return choice


@pytest.mark.parametrize("text", ["fp16", "int8", "topk(ratio=0.01)"])
def test_figures_are_found_again(text: str) -> None:
    """Summed, in two shots or gathered, and always gathered; ranks differ by a factor that is 1 in
    the middle."""
    choice = choice_of(text)
    compressor = default_catalog().compressors[choice.name]
    setups = list(setups_of(compressor, choice, TENSORS))
    bucket, encode, decode, gathered = 2e-4, 3e-9, 2e-9, 5e-10
    always = not (compressor.summable or compressor.elementwise)
    seconds = [
        [
            bucket / 2 + encode * setup.elements,
            bucket / 2
            + (decode * setup.elements if always or not setup.gathered else 0.0)
            + (gathered * setup.elements * setup.payloads if setup.gathered else 0.0),
        ]
        for setup in setups
    ]
    found = cost_of(setups, np.stack([factor * np.array(seconds) for factor in (0.9, 1, 1.2)]))
    assert found.bucket.value == pytest.approx(bucket)
    assert found.encode.value == pytest.approx(encode)
    assert found.decode.value == pytest.approx(decode)
    assert found.gathered.value == pytest.approx(0.0 if compressor.summable else gathered)
    assert found.encode.spread == pytest.approx(0.1 / 0.6745, rel=1e-3)


def test_real_ones() -> None:
    choices = [choice_of("fp16"), choice_of("powersgd(rank=4)"), choice_of("topk(ratio=0.01)")]
    costs = measured(choices, TENSORS)
    assert list(costs) == [str(choice) for choice in choices]
    for cost in costs.values():
        assert cost.bucket.value + cost.encode.value > 0


def test_what_takes_no_tensor_is_left_out() -> None:
    assert measured([choice_of("powersgd(rank=4)")], [Tensor(name="bias", shape=(64,))]) == {}


def test_samples_are_cut_by_rows_from_the_end() -> None:
    tensors = [Tensor(name="a", shape=(10, 10)), Tensor(name="b", shape=(5, 4, 2))]
    assert [t.shape for t in sample(tensors, 75)] == [(5, 4, 2), (3, 10)]
    assert sample(tensors, 7) == ()
    assert sample([Tensor(name="scalar", shape=())], 7) == ()


def measured(choices: list[Choice], tensors: list[Tensor]) -> dict[str, CodecCost]:
    """By one rank alone."""
    engine = Engine(MemoryNetwork([0]).transport(0), AbortFlag(HashStore(), 0), 10.0)
    try:
        collectives = Collectives(Group.everybody(Cluster.flat(1)), engine, RoundCounter())
        return measure_codecs(collectives, choices, tensors)
    finally:
        engine.close()
