"""PowerSGD (Vogels et al., NeurIPS 2019): a matrix M as P Q^T of low rank, by one power iteration.

P = M Q is added over the ranks and orthogonalised, then Q = M^T P is added: two rounds, r (n + m)
elements for a matrix of n x m. The factors of all matrices of a bucket travel together.
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
    factors = [Payload("P", left, 4), Payload("Q", right, 4)] if left else []
    return [*factors, *uncompressed(rest)]


COMPRESSOR = Compressor(
    name="powersgd",
    summary="low-rank factors, added up on the way in two rounds",
    payloads=payloads,
    summable=True,
    biased=True,
    in_step=True,
    parameters={"rank": RANK, "feedback": FEEDBACK},
)
