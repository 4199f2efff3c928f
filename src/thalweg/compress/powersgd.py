"""PowerSGD (Vogels et al., NeurIPS 2019): a matrix M as P Q^T of low rank, by one power iteration.

P = M Q is added over the ranks and orthogonalised, then Q = M^T P is added: two rounds, r (n + m)
elements for a matrix of n x m. The factors of all matrices of a bucket travel together. Each step
starts from the last step's Q, so the iteration goes on from step to step.

With P orthonormal, the result P P^T M is a projection of the mean M: never longer than it. A rank
keeps its own projection's remainder, M_i - P P^T M_i, and not M_i - P Q^T as in the paper: over all
ranks these add up to the same, and its own doesn't grow where ranks' gradients differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from thalweg.compress.codec import Array, Layout
from thalweg.compress.compressor import Payload
from thalweg.compress.low_rank import LowRank, factorizer, factors, orthonormalise
from thalweg.facts import Tensor


def sizes(tensors: Sequence[Tensor], step: int, rank: int) -> list[Payload]:
    left, right = factors([tensor.shape for tensor in tensors], rank)
    return [Payload("P", left, 4), Payload("Q", right, 4)]


class PowerSGD(LowRank):
    def __init__(self, *layout: *Layout, rank: int) -> None:
        super().__init__(*layout, rank=rank)
        self.state = {"factor": self.right.by_name}
        self._new: Array | None = None

    def accumulate(self, gradient: Array, residual: Array) -> None:
        """Keep the gradient until P is computed from it."""
        self._new = gradient

    def rounds(self, values: Array, out: Array, step: int, *, keep: bool) -> Iterator[Array]:
        self.right.normalise(step)
        new, self._new = self._new, None
        self.project_left(values, new)
        yield self.left.vector
        self.refuse_not_finite(values, self.left)
        orthonormalise(self.left.matrices)
        self.project_right(values)
        own = self.right.copy()
        yield self.right.vector
        self.refuse_not_finite(values, self.right)
        self.multiply(self.left, self.right, out)
        if keep:
            self.multiply(self.left, own, values, subtract=True)


COMPRESSOR = factorizer(
    name="powersgd",
    summary="low-rank factors, summed in two all-reduce rounds",
    sizes=sizes,
    codec=PowerSGD,
)
