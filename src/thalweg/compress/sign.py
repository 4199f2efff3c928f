"""SignSGD with majority vote (Bernstein et al., ICML 2018): one bit an element, d / 8 bytes.

Bits can't be added on the way, but a shard can be voted on where it is gathered, and the vote is
one bit again: two-shot costs 2 (N-1)/N d / 8 bytes for any N.
"""

from __future__ import annotations

from collections.abc import Sequence

from thalweg.compress.codec import not_yet
from thalweg.compress.compressor import FEEDBACK, WARMUP, Compressor, Payload, pays, units
from thalweg.facts import Tensor

UNIT = 64  # elements: one word of bits


def takes(tensor: Tensor) -> bool:
    return pays(tensor, 8 * units(tensor, UNIT) + 4)


def sizes(tensors: Sequence[Tensor], step: int) -> list[Payload]:
    words = sum(units(tensor, UNIT) for tensor in tensors)
    return [Payload("signs", words, 8), Payload("scales", len(tensors), 4, exact=True)]


COMPRESSOR = Compressor(
    name="sign",
    summary="one bit an element, and a majority vote",
    takes=takes,
    unit=lambda: UNIT,
    sizes=sizes,
    codec=not_yet,
    summable=False,
    biased=True,
    elementwise=True,
    parameters={"feedback": FEEDBACK, "warmup": WARMUP},
)
