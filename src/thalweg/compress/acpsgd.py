"""ACP-SGD (Zhang et al., ICDCS 2023): PowerSGD's factors, one a step by turns.

P on even steps, Q on odd ones, each against the other's last value: one round a step, half of
PowerSGD's bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from thalweg.compress.codec import not_yet
from thalweg.compress.compressor import FEEDBACK, RANK, WARMUP, Compressor, Payload
from thalweg.compress.low_rank import factors, takes
from thalweg.facts import Tensor


def sizes(tensors: Sequence[Tensor], step: int, rank: int) -> list[Payload]:
    left, right = factors([tensor.shape for tensor in tensors], rank)
    return [Payload("Q", right, 4) if step % 2 else Payload("P", left, 4)]


COMPRESSOR = Compressor(
    name="acpsgd",
    summary="PowerSGD's factors by turns, one round a step",
    takes=takes,
    sizes=sizes,
    codec=not_yet,
    summable=True,
    biased=True,
    in_step=True,
    period=2,
    parameters={"rank": RANK, "feedback": FEEDBACK, "warmup": WARMUP},
)
