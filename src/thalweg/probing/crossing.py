"""What crossing each rack's uplink adds to a message's way.

A way from rack i to rack j takes w + l_i + l_j, where w is the way within a rack: least squares
over the round trips between racks, none below 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np

LEAST_RATIO = 1.1  # below which it is noise


def added_by_uplinks(
    racks: Sequence[frozenset[int]], trips: Mapping[tuple[int, int], float]
) -> tuple[float, list[float]]:
    """Seconds of the way within a rack, and what each uplink adds."""
    rack_of = {host: number for number, rack in enumerate(racks) for host in rack}
    within = [t / 2 for (one, other), t in trips.items() if rack_of[one] == rack_of[other]]
    across: dict[tuple[int, int], list[float]] = {}
    for (one, other), seconds in trips.items():
        if rack_of[one] != rack_of[other]:
            across.setdefault((rack_of[one], rack_of[other]), []).append(seconds / 2)
    usual = median(within) if within else min(min(times) for times in across.values())
    ways = {pair: median(times) for pair, times in across.items()}
    if not ways or median(ways.values()) < LEAST_RATIO * usual:
        return usual, [0.0 for _ in racks]
    matrix = np.zeros((len(ways), len(racks)))
    for row, pair in enumerate(ways):
        matrix[row, list(pair)] = 1.0
    excess = np.array([way - usual for way in ways.values()])
    solution = np.linalg.lstsq(matrix, excess, rcond=None)[0]
    return usual, [max(0.0, float(value)) for value in solution]
