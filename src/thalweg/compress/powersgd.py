"""PowerSGD (Vogels et al., NeurIPS 2019): a matrix M as P Q^T of low rank, by one power iteration.

P = M Q is added over the ranks and orthogonalised, then Q = M^T P is added: two rounds, r (n + m)
elements for a matrix of n x m. The factors of all matrices of a bucket travel together.
"""

from __future__ import annotations

from collections.abc import Sequence

from thalweg.compress.codec import not_yet
from thalweg.compress.compressor import FEEDBACK, RANK, WARMUP, Compressor, Payload
from thalweg.compress.low_rank import factors, takes
from thalweg.facts import Tensor


def sizes(tensors: Sequence[Tensor], step: int, rank: int) -> list[Payload]:
    left, right = factors([tensor.shape for tensor in tensors], rank)
    return [Payload("P", left, 4), Payload("Q", right, 4)]


COMPRESSOR = Compressor(
    name="powersgd",
    summary="low-rank factors, added up on the way in two rounds",
    takes=takes,
    sizes=sizes,
    codec=not_yet,
    summable=True,
    biased=True,
    in_step=True,
    parameters={"rank": RANK, "feedback": FEEDBACK, "warmup": WARMUP},
)
