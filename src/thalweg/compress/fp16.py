"""Half precision: 2 bytes an element, 11 bits of it, at most 65,504.

Divided by the number of ranks before it is cast, since the sum of large gradients would overflow.
Rounded to nearest: the error of an element is at most 2^-11 of it, or 2^-25 below 2^-14.
"""

from __future__ import annotations

from functools import partial

from thalweg.compress.compressor import WARMUP, Compressor
from thalweg.compress.half import Half, sizes, takes

COMPRESSOR = Compressor(
    name="fp16",
    summary="half precision, added up on the way",
    takes=takes,
    sizes=lambda tensors, step: sizes("fp16", tensors),
    codec=partial(Half, kind="float16", infinity=0x7C00),
    summable=True,
    linear=True,
    carries="float16",
    largest=65504.0,
    parameters={"warmup": WARMUP},
)
