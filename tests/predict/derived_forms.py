"""Closed forms that follow from those of the package, for comparison with schedules and tables: a
turn of DS-Sync, a step of local SGD, the best number of chunks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import sqrt

from thalweg.schedules.closed_form import Cost, Symbols
from thalweg.schedules.topologies.ring import ring_cost


def ds_sync(x: Symbols, together: int | None = None) -> Cost:
    """One of each rack meet, all C or `together` = 2 by 2, and the G-1 others of each rack, at the
    same time; both by rings, and the turn takes the longer:

        2(C-1) alpha + 2(C-1)/C S max{beta1, beta2}    representatives, all
        2 alpha      +          S max{beta1, beta2}    representatives in pairs
        2(G-2) alpha + 2(G-2)/(G-1) S beta1            the rest of a rack

    The table has 2 S beta2 for a pair, whose two directions are one link each: S; 2(G-1) alpha
    for a ring of G-1, which has 2(G-2) moves; and no term for the whole group of C, whose bytes on
    an uplink are a hierarchy's."""
    meeting = x.C if together is None else min(together, x.C)
    between = ring_cost(replace(x, N=meeting, C=meeting, G=1))
    if x.G < 2:
        return between
    inside = ring_cost(replace(x, N=x.G - 1, C=1, G=x.G - 1))
    return max(between, inside, key=lambda term: term.seconds)


def per_step(meeting: Cost, every: int, inside: Cost | None = None) -> float:
    """Seconds of a step of local SGD: all meet at every H-th, and racks among themselves at the
    H-1 others if `inside` says what that takes. Not in the table."""
    between = 0.0 if inside is None else inside.seconds
    return (meeting.seconds + (every - 1) * between) / every


def best_chunks(form: Callable[[Symbols], Cost], x: Symbols) -> float:
    """The k for which a form is least.

    transfer is busiest + E/k, and latency grows by `each` with every chunk: k* = sqrt(E / each).
    For the table's double tree, 2(log N + k)(alpha + S beta/k), that is sqrt(log N S beta / alpha),
    at which it takes 2 (sqrt(alpha log N) + sqrt(S beta))^2.
    """
    whole = form(replace(x, k=1))
    exposed = whole.transfer - whole.busiest
    return max(1.0, sqrt(exposed / whole.each)) if whole.each > 0 else float("inf")
