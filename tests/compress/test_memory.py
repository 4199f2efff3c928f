"""No codec allocates anything near the size of a gradient at each step."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from thalweg.catalog import default_catalog
from thalweg.compress import Feedback, GatheredCodec, ShardableCodec, SummableCodec, arrange
from thalweg.compress.compressor import own_arguments
from thalweg.engine.arithmetic import TORCH_KERNELS
from thalweg.facts import Tensor

SHAPES = [(1024, 1024), (512, 256, 3, 3), (1000, 512)]
RANKS = 4


@pytest.mark.parametrize("name", sorted(default_catalog().compressors))
def test_a_step_allocates_a_small_part_of_the_gradient(name: str) -> None:
    compressor = default_catalog().compressors[name]
    arguments = {key: parameter.default for key, parameter in compressor.parameters.items()}
    tensors = [Tensor(name=f"t{i}", shape=shape) for i, shape in enumerate(SHAPES)]
    arranged = arrange(tensors, compressor, arguments)
    codec = compressor.codec(
        arranged.compressed, arranged.length, TORCH_KERNELS, **own_arguments(arguments)
    )
    keep = compressor.keeps(arguments)
    feedback = Feedback(codec) if keep else None
    out = np.random.default_rng(0).standard_normal(arranged.length, dtype=np.float32)
    payloads: list[np.ndarray] = []
    if isinstance(codec, GatheredCodec):
        payloads = [np.empty(codec.nbytes, np.uint8) for _ in range(RANKS)]

    def step(number: int) -> None:
        values = out if feedback is None else feedback.add(out)
        if isinstance(codec, SummableCodec):
            for _ in codec.rounds(values, out, number, keep=keep):
                pass
            return
        assert isinstance(codec, GatheredCodec)
        for payload in payloads:
            codec.encode(values, payload, number, 0, keep=keep)
        if isinstance(codec, ShardableCodec):
            codec.reduce(payloads, payloads[0], 0, number, 0)
            codec.decode(payloads[0], out)
        else:
            codec.add_up(payloads, out)

    step(0)
    tracemalloc.start()
    try:
        step(1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 0.2 * out.nbytes
