"""The check of a gradient code: whoever is late, what it decodes is the sum of all blocks."""

from __future__ import annotations

from functools import lru_cache
from itertools import chain, combinations
from math import comb
from random import Random

import numpy as np

from thalweg.declarations import Code
from thalweg.errors import ScheduleError
from thalweg.schedules.schedule import same_content

PATTERNS = 5000  # sets of arrivals that are tried; drawn from a fixed seed if there are more


@lru_cache(maxsize=256)
def check_code(code: Code) -> None:
    """Raise ScheduleError unless every arrival that the code decodes gives the sum of all blocks,
    and it decodes whenever no more than its stragglers are missing. A tree's parents have equal
    codes: each is looked at once."""
    members, most = range(code.members), code.stragglers
    if not 0 <= most < code.members:
        raise ScheduleError(
            f"a code for {code.members} can't do without {most}", "allow fewer stragglers"
        )
    rows = np.array([code.row(member) for member in members])
    ones = np.ones(rows.shape[1])
    for arrived in _arrivals(code):
        weights = code.decode(arrived)
        missing = sorted(set(members) - arrived)
        if weights is None:
            if len(missing) <= most:
                raise ScheduleError(
                    f"the code promises to do without {most}, and waits for {missing}",
                    "the code is wrong",
                )
            continue
        total = np.array([*weights.values()]) @ rows[[*weights]]
        if not weights.keys() <= arrived or not same_content(total, ones):
            raise ScheduleError(
                f"the code decodes a wrong sum without {missing}", "the code is wrong"
            )


def _arrivals(code: Code) -> list[frozenset[int]]:
    """All sets of members, or the largest promised ones and a sample of all, the same each time."""
    members = range(code.members)
    if 2**code.members <= PATTERNS:
        every = chain.from_iterable(combinations(members, n) for n in range(code.members + 1))
        return [frozenset(arrived) for arrived in every]
    draw = Random(0)
    if comb(code.members, code.stragglers) <= PATTERNS:
        late = [set(some) for some in combinations(members, code.stragglers)]
    else:
        late = [set(draw.sample(members, code.stragglers)) for _ in range(PATTERNS)]
    drawn = [set(draw.sample(members, draw.randint(0, code.members))) for _ in range(PATTERNS)]
    return [frozenset(members) - absent for absent in (*late, *drawn)]
