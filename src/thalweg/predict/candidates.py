"""The candidate plans of the advisor, by the weakest promise that the user allows.

    exact     topologies without compression, and gradient codes
    lossy     also topologies with every compressor, and plans that wait for no straggler
    eventual  also averages of parameters, alone and with every unbiased compressor

Topologies, compressors, codes and presets declare the variants of them that are worth trying. Plans
that don't fit the cluster (a tree for two workers, racks where there is one) are left out, with the
reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

from thalweg.catalog import Catalog
from thalweg.declarations import Promise
from thalweg.errors import LayoutError, PlanError
from thalweg.facts import Size, Workload
from thalweg.plan import Plan
from thalweg.schedules import Group
from thalweg.steps import refuse_what_cannot_run

MAX_COMPILED_WORKERS = 256  # larger groups are never simulated, so nothing is compiled for them
MIN_BUCKET_BYTES = 64 * 1024


def candidates(
    group: Group,
    allow: Promise,
    catalog: Catalog,
    *,
    has_data: bool = True,
    refuse: Callable[[Plan], None] = lambda plan: None,
) -> tuple[list[Plan], dict[str, str]]:
    """The plans with at least the promise `allow` that fit the group; and the other plans' texts,
    with the reason why each doesn't fit. Codes need `has_data`: workers can be given more samples
    than their share. `refuse` raises PlanError for other plans to exclude."""
    allowed, plans = as_strong_as(allow), list[Plan]()
    left_out: dict[str, str] = {}
    for text, promise in _texts(group, catalog):
        if promise not in allowed:
            continue
        try:
            plan = catalog.plan(text)
            if group.size <= MAX_COMPILED_WORKERS:  # closed forms take every group or refuse it
                refuse_what_cannot_run(plan, group, has_data=has_data)
            refuse(plan)
        except (PlanError, LayoutError) as error:
            left_out[text] = error.problem
            continue
        if catalog.guarantee(plan).promise in allowed:
            plans.append(plan)
    return plans, left_out


def _texts(group: Group, catalog: Catalog) -> list[tuple[str, Promise]]:
    """The texts of the plans that parts declare for such a group, each with the promise that its
    combination has at best; in the order of promises, and in each as their places are."""
    has_straggler = _has_one_straggler(group)
    found: list[tuple[str, Promise]] = []
    for variant in catalog.variants:
        if variant.several_racks and len(group.racks) == 1:
            continue
        if variant.straggler and not has_straggler:
            continue
        promise, mixes = Promise.EXACT, False
        if variant.alone:
            with suppress(PlanError):  # which `candidates` meets again
                plan = catalog.plan(variant.text)
                promise, mixes = catalog.guarantee(plan).promise, plan.averages_parameters
            found.append((variant.text, promise))
        lossy = Promise.EVENTUAL if mixes else Promise.LOSSY
        for _, compressor in sorted(catalog.compressors.items()) if variant.compressed else ():
            if not (mixes and compressor.biased):
                texts = compressor.variants
                names = (compressor.name,) if texts is None else texts
                found += [(f"{variant.text}+{name}", lossy) for name in names]
    return sorted(dict.fromkeys(found), key=lambda each: list(Promise).index(each[1]))


def _has_one_straggler(group: Group) -> bool:
    """True if one member is late for twice as long, on average, as any other."""
    delays = [group.cluster.host(rank).late for rank in group.ranks]
    *_, second, first = sorted([0.0, *(late.probability * late.delay.seconds for late in delays)])
    return first > 2 * second


def as_strong_as(promise: Promise) -> list[Promise]:
    """The promises at least as strong as this one, the strongest first."""
    return list(Promise)[: list(Promise).index(promise) + 1]


def with_smaller_buckets(plan: Plan, workload: Workload, catalog: Catalog) -> Iterator[Plan]:
    """Variants of the plan whose buckets are a half to a sixteenth of all bytes, rounded."""
    if plan.averages_parameters or plan.cadence.staleness is not None:
        return  # nothing overlaps with backward
    for parts in (2, 4, 8, 16):
        nbytes = workload.nbytes / parts
        if nbytes >= MIN_BUCKET_BYTES and nbytes < plan.settings.bucket.nbytes:
            size = Size(int(float(f"{nbytes:.2g}")))
            settings = (*(p for p in plan.text.settings if p[0] != "bucket"), ("bucket", str(size)))
            yield catalog.plan(str(replace(plan.text, settings=settings)))
