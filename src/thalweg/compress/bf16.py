"""bfloat16: 2 bytes an element, float32's range and 8 bits of it. Never overflows.

Rounded to nearest: the error of an element is at most 2^-8 of it.
"""

from __future__ import annotations

from functools import partial

from thalweg.compress.compressor import WARMUP, Compressor
from thalweg.compress.half import Half, sizes, takes

COMPRESSOR = Compressor(
    name="bf16",
    summary="bfloat16, added up on the way",
    takes=takes,
    sizes=lambda tensors, step: sizes("bf16", tensors),
    codec=partial(Half, kind="int16", infinity=0x7F80),
    summable=True,
    linear=True,
    carries="bfloat16",
    parameters={"warmup": WARMUP},
)
