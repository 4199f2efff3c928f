"""How many more steps a lossy or eventual plan needs than an exact one for the same loss.

It depends on the optimizer. `extra_steps.toml` has what `scripts/measure-extra-steps` measured; of
other plans and optimizers nothing is known, and nothing is assumed. A compressor's figure, which
comes from a ring, is taken for every topology; other plans are looked up as they are written.

A small share was the same at every target; a large one grew with the target, so what it comes to
in a long run isn't known either.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import Any

from thalweg.declarations import Promise, listed, nearest
from thalweg.errors import UsageError
from thalweg.plan import Cadence, Plan

MEASURED_OPTIMIZERS = {
    "sgd": "sgd",
    "adam": "adamw",
    "adamw": "adamw",
}  # those two differ in weight decay
UNMEASURED_OPTIMIZERS = (
    "adafactor",
    "adagrad",
    "lamb",
    "lars",
    "lion",
    "muon",
    "nadam",
    "radam",
    "rmsprop",
)
MAX_TRUSTED_EXTRA_FRACTION = 0.25  # a larger share is no guide to a long run
ASSUMED_OPTIMIZER = "adamw"  # what most models are trained with, and under which more is lost


def optimizer_named(text: str) -> str:
    """The optimizer's name as the tables have it; UsageError if there is none."""
    name, known = text.strip().lower(), (*MEASURED_OPTIMIZERS, *UNMEASURED_OPTIMIZERS)
    if name not in known:
        raise UsageError(
            f"there is no optimizer {text!r}", f"there are {listed(known)}" + nearest(name, known)
        )
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraSteps:
    """The extra steps under one optimizer; a class of plans in `given` needs that share instead."""

    optimizer: str
    given: Mapping[Promise, float] = field(default_factory=dict)

    def of(self, plan: Plan, promise: Promise) -> float | None:
        """The share of an exact plan's steps that come on top; None if nobody measured it."""
        if promise in self.given or promise is Promise.EXACT:
            return self.given.get(promise, 0.0)
        text = str(replace(plan.text, settings=()))
        if not plan.averages_parameters and plan.redundancy is None and plan.cadence == Cadence():
            text = f"ring+{plan.text.compressor}"
        median, *_ = self._table.get(text, (None,))
        return None if median is None else max(0.0, round(median, 2))

    def is_reliable(self, promise: Promise, share: float | None) -> bool:
        """Whether that share holds in a long run too; one that was given does."""
        return share is not None and (promise in self.given or share <= MAX_TRUSTED_EXTRA_FRACTION)

    @property
    def source(self) -> str:
        """What the figures come from, in words; empty if there are none for this optimizer."""
        if not self._table:
            return ""
        name = MEASURED_OPTIMIZERS[self.optimizer]
        return f"extra steps as measured with {name} on {self._table['job']}"

    @property
    def _table(self) -> Mapping[str, Any]:
        return _tables().get(MEASURED_OPTIMIZERS.get(self.optimizer, ""), {})


@cache
def _tables() -> Mapping[str, Mapping[str, Any]]:
    table = files("thalweg.predict").joinpath("extra_steps.toml")
    return tomllib.loads(table.read_text(encoding="utf-8"))
