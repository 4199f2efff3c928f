"""bfloat16: 2 bytes per element, with a significand of 8 bits and float32's range.

Values are rounded to the nearest, so the relative error of an element is at most 2^-8. Only values
near float32's maximum overflow.
"""

from __future__ import annotations

from functools import partial

from thalweg.compress.fp16 import Half, half_precision, half_sizes

COMPRESSOR = half_precision(
    name="bf16",
    summary="bfloat16, summed in the all-reduce",
    sizes=partial(half_sizes, "bf16"),
    codec=partial(Half, kind="int16", infinity=0x7F80),
    carries="bfloat16",
)
