"""The random cyclic code of Tandon et al. (ICML 2017, Algorithm 2): any s of any n.

Child i sends blocks i, i+1, ..., i+s (modulo n), weighted such that H b_i = 0 for a random s x n
matrix H with H 1 = 0. Any n-s rows then span the null space of H, and so the ones.

It serves as the reference: weights of both signs amplify the rounding of answers, by thousands for
more than a dozen children. The matrix is the best of a few draws; its seed is part of the code.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from thalweg.codes.linear import LinearCode, Matrix, amplification, even_tree
from thalweg.codes.tree import CodeFamily, refuse_what_does_not_fit

CODE_DRAW_COUNT = 50
MAX_CODE_DRAW_CHILDREN = 16  # above this all draws are bad: take the first


def matrix(members: int, stragglers: int, seed: int) -> Matrix:
    weights = np.eye(members)
    if not stragglers:
        return weights
    checks = np.random.default_rng(seed).standard_normal((stragglers, members))
    checks[:, -1] = -checks[:, :-1].sum(axis=1)
    for child in range(members):
        others = [(child + offset) % members for offset in range(1, stragglers + 1)]
        weights[child, others] = -np.linalg.solve(checks[:, others], checks[:, child])
    return weights


@cache
def cyclic(members: int, stragglers: int) -> LinearCode:
    """The code that amplifies rounding errors least, of those that are drawn."""
    refuse_what_does_not_fit(members, members, stragglers)
    draws = CODE_DRAW_COUNT if stragglers and members <= MAX_CODE_DRAW_CHILDREN else 1
    matrices = (matrix(members, stragglers, seed) for seed in range(draws))
    codes = [LinearCode(members, stragglers, drawn) for drawn in matrices]
    return min(codes, key=amplification) if draws > 1 else codes[0]


CODE = CodeFamily(
    name="cyclic",
    summary="random weights on s+1 neighbouring blocks: any n and s, for few children",
    make=cyclic,
    build_tree=even_tree(cyclic),
)
