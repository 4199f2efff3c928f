"""The candidate plans of the advisor, by the weakest promise that the user allows.

    exact     each topology without compression, and gradient codes
    lossy     also ring and hierarchical with every compressor, and plans that wait for no straggler
    eventual  also averages of parameters, alone and with every unbiased compressor

Plans that don't fit the cluster (a tree for two workers, racks where there is one) are left out,
with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from thalweg.catalog import Catalog
from thalweg.declarations import Promise
from thalweg.errors import LayoutError, PlanError
from thalweg.facts import Size, Workload
from thalweg.plan import Plan
from thalweg.presets import BASELINE_PLAN
from thalweg.schedules import Group
from thalweg.steps import refuse_what_cannot_run

# Topologies for every cluster, then those for clusters of several racks.
EXACT_PLANS = (
    BASELINE_PLAN,
    "ring",
    "halving_doubling",
    "double_tree",
    "tree",
    "tuned",
    "ps",
    "umw",
)
EXACT_RACK_PLANS = ("hierarchical", "hierarchical(form=leader)")
# Gradient codes: each worker computes more than its part of the batch, and no rank waits for
# stragglers.
CODED_PLANS = ("gc(stragglers=1)", "gc(stragglers=2)", "codedreduce(stragglers=1)")
# Topologies that are combined with each compressor, the second line for several racks.
COMPRESSED_TOPOLOGIES = ("ring",)
COMPRESSED_RACK_TOPOLOGIES = ("hierarchical", "hierarchical(compress=between)")
# Arguments that reached the accuracy of exact plans: docs/which-compressor-do-i-need.md.
TRAINED_COMPRESSORS = {
    "acpsgd": "acpsgd(rank=8)",
    "dgc": "dgc(ratio=0.05, momentum=0)",
    "mstopk": "mstopk(ratio=0.05)",
    "powersgd": "powersgd(rank=4, warmup=30)",
    "randomblock": "randomblock(ratio=0.5)",
    "randomk": "randomk(ratio=0.5)",
    "topk": "topk(ratio=0.05)",
}
# Lossy plans without compression: gradients of stragglers are applied in a later step.
ASYNC_PLANS = ("lgc", "asp")
# Plans that average parameters instead of gradients, then those for clusters of several racks.
AVERAGING_PLANS = ("dssync", "gossip", "gossip(graph=exponential)", "local_sgd(every=8)")
AVERAGING_RACK_PLANS = (
    "local_sgd(every=8, levels=rack)",
    "local_sgd(every=1, levels=rack, delay=1)",
)
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
    plans: list[Plan] = []
    left_out: dict[str, str] = {}
    for text in dict.fromkeys(_texts(group, allow, catalog)):
        try:
            plan = catalog.plan(text)
            if group.size <= MAX_COMPILED_WORKERS:  # closed forms take every group or refuse it
                refuse_what_cannot_run(plan, group, has_data=has_data)
            refuse(plan)
        except (PlanError, LayoutError) as error:
            left_out[text] = error.problem
            continue
        if catalog.guarantee(plan).promise in as_strong_as(allow):
            plans.append(plan)
    return plans, left_out


def _texts(group: Group, allow: Promise, catalog: Catalog) -> Iterator[str]:
    racks = len(group.racks) > 1
    yield from EXACT_PLANS
    yield from EXACT_RACK_PLANS if racks else ()
    yield from CODED_PLANS
    compressors = [TRAINED_COMPRESSORS.get(name, name) for name in sorted(catalog.compressors)]
    if allow in (Promise.LOSSY, Promise.EVENTUAL):
        for text in (*COMPRESSED_TOPOLOGIES, *(COMPRESSED_RACK_TOPOLOGIES if racks else ())):
            yield from (f"{text}+{compressor}" for compressor in compressors)
        yield from ASYNC_PLANS
    if allow is Promise.EVENTUAL:
        unbiased = [name for name, c in sorted(catalog.compressors.items()) if not c.biased]
        for text in (*AVERAGING_PLANS, *(AVERAGING_RACK_PLANS if racks else ())):
            yield text
            yield from (f"{text}+{name}" for name in unbiased)


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
