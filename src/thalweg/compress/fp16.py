"""Half precision: 2 bytes an element, 11 bits of it, at most 65,504.

Gradients are divided by the number of ranks before the cast, since the sum of large ones would
overflow, and rounded to nearest: the error of an element is at most 2^-11 of it, or 2^-25 below
2^-14.
"""

from __future__ import annotations

from functools import partial

from thalweg.compress.half import Half, half_precision, sizes

COMPRESSOR = half_precision(
    name="fp16",
    summary="half precision, summed in the all-reduce",
    sizes=partial(sizes, "fp16"),
    codec=partial(Half, kind="float16", infinity=0x7C00),
    carries="float16",
    largest=65504.0,
)
