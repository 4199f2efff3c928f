"""ACP-SGD (Zhang et al., ICDCS 2023): PowerSGD's two factors at alternate steps.

P on even steps, Q on odd ones, each against the other's last value: one round a step, half of
PowerSGD's bytes:

    even steps: Q = orth(Q), P = M Q;  odd steps: P = orth(P), Q = M^T P;  the result is P Q^T

A rank keeps what its own factor left out, M_i - M_i Q Q^T or M_i - P P^T M_i.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from thalweg.compress.codec import Array, Layout
from thalweg.compress.compressor import Payload
from thalweg.compress.kept import Combine, Kept
from thalweg.compress.powersgd import LowRank, factorizer, factors, orthonormalise
from thalweg.facts import Tensor


def sizes(tensors: Sequence[Tensor], step: int, rank: int) -> list[Payload]:
    left, right = factors([tensor.shape for tensor in tensors], rank)
    return [Payload("Q", right, 4) if step % 2 else Payload("P", left, 4)]


class ACPSGD(LowRank):
    def __init__(self, *layout: *Layout, rank: int) -> None:
        super().__init__(*layout, rank=rank)
        self.state = {
            "left": Kept(combine=Combine.EQUAL, arrays=self.left.by_name),
            "right": Kept(combine=Combine.EQUAL, arrays=self.right.by_name),
        }

    def rounds(self, values: Array, out: Array, step: int, *, keep: bool) -> Iterator[Array]:
        odd = step % 2 == 1
        turn, other = (self.right, self.left) if odd else (self.left, self.right)
        other.normalise(step)
        orthonormalise(other.matrices)
        if odd:
            self.project_right(values)
        else:
            self.project_left(values)
        own = turn.copy()
        yield turn.vector
        self.refuse_not_finite(values, turn)
        self.multiply(self.left, self.right, out)
        if keep:
            left, right = (other, own) if odd else (own, other)
            self.multiply(left, right, values, subtract=True)


COMPRESSOR = factorizer(
    name="acpsgd",
    summary="PowerSGD's factors by turns, one round a step",
    sizes=sizes,
    codec=ACPSGD,
    variants=("acpsgd(rank=8)",),
    period=2,
)
