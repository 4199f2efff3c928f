"""EF-SignSGD (Karimireddy et al., ICML 2019): sign(g + e) times its mean magnitude, error fed back.

d / 8 bytes and one scale a tensor. The feedback is the method, so there is no switch for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from thalweg.compress.codec import not_yet
from thalweg.compress.compressor import WARMUP, Compressor, Payload, pays, units
from thalweg.facts import Tensor

UNIT = 64  # elements: one word of bits


def takes(tensor: Tensor) -> bool:
    return pays(tensor, 8 * units(tensor, UNIT) + 4)


def sizes(tensors: Sequence[Tensor], step: int) -> list[Payload]:
    return [Payload("signs and scales", sum(8 * units(t, UNIT) + 4 for t in tensors), 1)]


COMPRESSOR = Compressor(
    name="efsign",
    summary="one bit an element and a scale, with error feedback",
    takes=takes,
    unit=lambda: UNIT,
    sizes=sizes,
    codec=not_yet,
    summable=False,
    biased=True,
    parameters={"warmup": WARMUP},
)
