"""All that a table of exchanges lets expect, in one place."""

from __future__ import annotations

from dataclasses import dataclass

from thalweg.catalog import Catalog
from thalweg.convergence.contraction import contraction_of, steps_to
from thalweg.convergence.drift import expected_drift
from thalweg.convergence.mixing import Mixing, mixing_of
from thalweg.plan import Plan
from thalweg.schedules import Group

LITTLE = 1e-3  # of the disagreement


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """`looked_at`: so many steps of the period; the figures are those of a table that begins anew
    after them."""

    connected: bool
    gap: float  # 1 - lambda_2 of a period's product
    sigma_gap: float  # 1 - sigma_2
    contraction: float  # a step, in the long run
    steps_to_little: int | None  # until a thousandth is left; None: never
    drift: float  # variance, in units of one step's noise
    drift_before: float  # averaging
    period: int
    looked_at: int
    longest_pause: int | None  # steps from a meeting of a rank to its next; None: never


def outlook(plan: Plan, group: Group, catalog: Catalog) -> Outlook:
    return outlook_of(mixing_of(plan, group, catalog))


def outlook_of(mixing: Mixing) -> Outlook:
    found, apart = contraction_of(mixing), expected_drift(mixing)
    return Outlook(
        connected=mixing.is_connected,
        gap=found.gap,
        sigma_gap=found.sigma_gap,
        contraction=found.per_step,
        steps_to_little=steps_to(mixing, LITTLE, found.per_step),
        drift=apart.after,
        drift_before=apart.before,
        period=mixing.period,
        looked_at=len(mixing.steps),
        longest_pause=mixing.longest_pause,
    )
