"""Which plans the advisor looks at: every sound one that people would try, of the classes that are
allowed.

Topologies by themselves; then with every compressor that they carry; then averages of parameters in
groups, or every few steps. What doesn't fit the cluster (a tree for two workers, racks where there
is one) is left out, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from thalweg.catalog import Catalog
from thalweg.declarations import Promise
from thalweg.errors import LayoutError, PlanError
from thalweg.facts import Size, Workload
from thalweg.plan import Plan
from thalweg.presets import BASELINE_PLAN
from thalweg.redundancy import spare_ranks, waits_for_nobody
from thalweg.schedules import Group
from thalweg.steps import compile_rounds

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
CODED_PLANS = ("gc(stragglers=1)", "gc(stragglers=2)", "codedreduce(stragglers=1)")
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
ASYNC_PLANS = ("lgc", "asp")
AVERAGING_PLANS = ("dssync", "gossip", "gossip(graph=exponential)", "local_sgd(every=8)")
AVERAGING_RACK_PLANS = (
    "local_sgd(every=8, levels=rack)",
    "local_sgd(every=1, levels=rack, delay=1)",
)
# Workers; larger groups are never replayed, so nothing is compiled for them.
MAX_COMPILED_WORKERS = 256
MIN_BUCKET_BYTES = 64 * 1024  # bytes
TINY_WORKLOAD = Workload.of_size(Size.parse("4KB"))


@dataclass(slots=True)
class Candidates:
    """`left_out` says why of those that don't fit."""

    plans: list[Plan] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)


def candidates(
    group: Group,
    allow: Promise,
    catalog: Catalog,
    *,
    has_data: bool = True,
    refuse: Callable[[Plan], None] = lambda plan: None,
) -> Candidates:
    """`has_data`: whether workers can be given more samples than their share, as codes need.
    `refuse` raises PlanError for what else can't be run."""
    found = Candidates()
    for text in dict.fromkeys(_texts(group, allow, catalog)):
        try:
            plan = catalog.plan(text)
            _refuse_what_does_not_fit(plan, group, has_data)
            refuse(plan)
        except (PlanError, LayoutError) as error:
            found.left_out[text] = error.problem
            continue
        if catalog.guarantee(plan).promise in as_strong_as(allow):
            found.plans.append(plan)
    return found


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
        for text in (*AVERAGING_PLANS, *(AVERAGING_RACK_PLANS if racks else ())):
            yield text
            yield from (f"{text}+{name}" for name in _unbiased(catalog))


def _unbiased(catalog: Catalog) -> list[str]:
    """Compressors that parameters may be averaged with."""
    return [name for name, one in sorted(catalog.compressors.items()) if not one.biased]


def _refuse_what_does_not_fit(plan: Plan, group: Group, has_data: bool) -> None:
    if group.size > MAX_COMPILED_WORKERS:
        return  # closed forms take every group, or say that there is none
    if waits_for_nobody(plan):
        spare_ranks(plan, group)
    else:
        compile_rounds(plan, group, TINY_WORKLOAD, 0)
    if plan.redundancy is not None and not has_data:
        raise PlanError(f"{plan} needs data= and batch= in attach()", "give them")


def as_strong_as(promise: Promise) -> list[Promise]:
    """This promise and the stronger ones, the strongest first."""
    return list(Promise)[: list(Promise).index(promise) + 1]


def with_buckets(plan: Plan, workload: Workload, catalog: Catalog) -> Iterator[Plan]:
    """The same in smaller buckets: a half to a sixteenth of all, in round numbers."""
    if plan.averages_parameters or plan.cadence.staleness is not None:
        return  # nothing overlaps with backward there
    for parts in (2, 4, 8, 16):
        nbytes = workload.nbytes / parts
        if nbytes >= MIN_BUCKET_BYTES and nbytes < plan.settings.bucket.nbytes:
            size = Size(int(float(f"{nbytes:.2g}")))
            settings = (*(p for p in plan.text.settings if p[0] != "bucket"), ("bucket", str(size)))
            yield catalog.plan(str(replace(plan.text, settings=settings)))
