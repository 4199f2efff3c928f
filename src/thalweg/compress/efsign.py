"""EF-SignSGD (Karimireddy et al., ICML 2019): sign(g + e) times its mean magnitude, error fed back.

d / 8 bytes and one scale per tensor. The feedback is the method, so there is no option for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from thalweg.compress.codec import Array, Layout, ScaledCodec
from thalweg.compress.compressor import WARMUP, Compressor, Payload, units
from thalweg.compress.sign import SIGN_WORD_ELEMENTS, Signs
from thalweg.facts import Tensor


def sizes(tensors: Sequence[Tensor], step: int) -> list[Payload]:
    nbytes = sum(8 * units(t, SIGN_WORD_ELEMENTS) + 4 for t in tensors)
    return [Payload("signs and scales", nbytes, 1)]


class EFSign(ScaledCodec):
    per_byte = 8

    def __init__(self, *layout: *Layout) -> None:
        super().__init__(*layout)
        self._signs = Signs(self.segments, self.extents)

    def encode(self, values: Array, payload: Array, step: int, rank: int, *, keep: bool) -> None:
        bits, scales = self.parts(payload)
        self._signs.encode(values, bits, scales)
        if keep:
            for segment, scale in zip(self.segments, scales, strict=True):
                self._signs.subtract(values[segment.place], scale)

    def unpack(self, packed: Array, scale: float, out: Array) -> None:
        self._signs.unpack(packed, scale, out)


COMPRESSOR = Compressor(
    name="efsign",
    summary="one bit an element and a scale, with error feedback",
    unit=lambda: SIGN_WORD_ELEMENTS,
    sizes=sizes,
    codec=EFSign,
    summable=False,
    biased=True,
    parameters={"warmup": WARMUP},
)
