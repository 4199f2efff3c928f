"""The cyclic MDS code over the reals (Raviv, Tamo, Tandon and Dimakis, 2017).

Child i sends blocks i, ..., i+s (modulo n), weighted by the coefficients of the product of x - w^j
over s consecutive powers w^j of the n-th root of unity w, none of them 1. Rows are evaluations of a
Reed-Solomon code, so any n-s of them span the rest, and the ones. The coefficients are real if the
powers lie symmetrically about -1, which takes an odd n-s.

Deterministic, and far gentler on rounding than random weights, except for runs of neighbours.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from thalweg.codes.linear import LinearCode, even_tree
from thalweg.codes.tree import CodeFamily, refuse_what_does_not_fit
from thalweg.errors import LayoutError


@cache
def cyclic_mds(members: int, stragglers: int) -> LinearCode:
    refuse_what_does_not_fit(members, members, stragglers)
    if stragglers and (members - stragglers) % 2 == 0:
        raise LayoutError(
            f"a real cyclic_mds code of {members} can't do without {stragglers}: their difference "
            "must be odd",
            f"use stragglers={stragglers - 1 or stragglers + 1}, code=fractional or code=cyclic",
        )
    first = (members - stragglers + 1) // 2
    powers = np.exp(2j * np.pi * np.arange(first, first + stragglers) / members)
    weights = np.real(np.poly(powers))[::-1] if stragglers else np.ones(1)
    row = np.zeros(members)
    row[: stragglers + 1] = weights
    return LinearCode(members, stragglers, np.array([np.roll(row, i) for i in range(members)]))


CODE = CodeFamily(
    name="cyclic_mds",
    summary="fixed weights on s+1 neighbouring blocks, if n-s is odd",
    make=cyclic_mds,
    build_tree=even_tree(cyclic_mds),
)
