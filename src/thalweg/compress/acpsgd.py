"""ACP-SGD (Zhang et al., ICDCS 2023): PowerSGD's factors, one a step by turns.

P on even steps, Q on odd ones, each against the other's last value: one round a step, half of
PowerSGD's bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from thalweg.compress.compressor import (
    FEEDBACK,
    RANK,
    Compressor,
    Payload,
    low_rank,
    uncompressed,
)
from thalweg.facts import Tensor


def payloads(
    tensors: Sequence[Tensor], step: int, rank: int, feedback: bool | None
) -> list[Payload]:
    left, right, rest = low_rank(tensors, rank)
    factor = Payload("Q", right, 4) if step % 2 else Payload("P", left, 4)
    return [*([factor] if left else []), *uncompressed(rest)]


COMPRESSOR = Compressor(
    name="acpsgd",
    summary="PowerSGD's factors by turns, one round a step",
    payloads=payloads,
    summable=True,
    biased=True,
    in_step=True,
    parameters={"rank": RANK, "feedback": FEEDBACK},
)
