"""SignSGD with majority vote (Bernstein et al., ICML 2018): one bit an element, d / 8 bytes.

Bits can't be added on the way, but a shard can be voted on where it is gathered, and the vote is
one bit again: two-shot costs 2 (N-1)/N d / 8 bytes for any N.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from thalweg.compress.compressor import FEEDBACK, Compressor, Payload, packed
from thalweg.facts import Tensor


def payloads(tensors: Sequence[Tensor], step: int, feedback: bool | None) -> list[Payload]:
    return packed("signs", tensors, lambda t: ceil(t.elements / 8))


COMPRESSOR = Compressor(
    name="sign",
    summary="one bit an element, and a majority vote",
    payloads=payloads,
    summable=False,
    biased=True,
    elementwise=True,
    parameters={"feedback": FEEDBACK},
)
