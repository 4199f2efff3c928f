"""The extra steps that a lossy or eventual plan needs for the same loss as an exact one.

They depend on the optimizer. `extra_steps.toml` has the measurements of
`scripts/measure-extra-steps`; for other plans and optimizers nothing is assumed. A compressor's
value was measured on a ring and holds for every topology; other plans are looked up as written.

A small fraction was the same at every target loss; a large one grew with the target, so its value
in a long run is unknown.
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

# adam and adamw differ in weight decay only.
MEASURED_OPTIMIZERS = {"sgd": "sgd", "adam": "adamw", "adamw": "adamw"}
UNMEASURED_OPTIMIZERS = (
    *("adafactor", "adagrad", "lamb", "lars", "lion", "muon", "nadam", "radam", "rmsprop"),
)
MAX_TRUSTED_EXTRA_FRACTION = 0.25  # a larger fraction isn't reliable in a long run
ASSUMED_OPTIMIZER = "adamw"  # trains most models, and needs more extra steps


def optimizer_named(text: str) -> str:
    """The optimizer's name as in the tables; UsageError if it is unknown."""
    name, known = text.strip().lower(), (*MEASURED_OPTIMIZERS, *UNMEASURED_OPTIMIZERS)
    if name not in known:
        raise UsageError(
            f"there is no optimizer {text!r}", f"there are {listed(known)}" + nearest(name, known)
        )
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraSteps:
    """The extra steps under one optimizer, or the fraction `given` for a class of plans."""

    optimizer: str
    given: Mapping[Promise, float] = field(default_factory=dict)

    def of(self, plan: Plan, promise: Promise) -> float | None:
        """The extra steps as a fraction of an exact plan's steps; None if not measured."""
        if promise in self.given or promise is Promise.EXACT:
            return self.given.get(promise, 0.0)
        text = str(replace(plan.text, settings=()))
        if not plan.averages_parameters and plan.redundancy is None and plan.cadence == Cadence():
            text = f"ring+{plan.text.compressor}"
        median, *_ = self._table.get(text, (None,))
        return None if median is None else max(0.0, round(median, 2))

    def is_reliable(self, promise: Promise, share: float | None) -> bool:
        """True if that fraction holds in a long run too, as given ones do."""
        return share is not None and (promise in self.given or share <= MAX_TRUSTED_EXTRA_FRACTION)

    @property
    def source(self) -> str:
        """The source of the measurements in words; empty if this optimizer has none."""
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
