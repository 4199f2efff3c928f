"""The compressors that are to be measured, as they are written."""

from __future__ import annotations

from dataclasses import dataclass

from thalweg.bench.compress_costs import Exchange
from thalweg.catalog import default_catalog, parse_plan
from thalweg.compress import Compressor
from thalweg.declarations import Value
from thalweg.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A compressor with its arguments, as it was written."""

    text: str
    compressor: Compressor
    arguments: dict[str, Value]

    def exchange(self, workers: int) -> Exchange:
        """As rounds are compiled where all links are alike: among two, two shots send as much as
        gathering, later."""
        if self.compressor.summable:
            return Exchange.SUM
        shards = self.compressor.elementwise and workers > 2
        return Exchange.TWO_SHOT if shards else Exchange.ALL_GATHER


def method_of(text: str) -> Method:
    """PlanError if it can't be read, or there is none of this name."""
    plan = parse_plan(f"ring+{text}")
    precision = plan.precision
    if precision is None or plan.text.settings:
        raise PlanError(f"{text!r} is more than a compressor", "write it like powersgd(rank=2)")
    compressor = default_catalog().compressors[precision.name]
    return Method(text=text.strip(), compressor=compressor, arguments=dict(precision.arguments))


def all_methods() -> list[Method]:
    """Every compressor, as it is without arguments."""
    return [method_of(name) for name in default_catalog().compressors]
