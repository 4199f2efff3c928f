"""The work of each worker under a code, and the number of stragglers that it tolerates, in words.

A worker's work is a list of *parts*: an interval of the batch, in fractions of it or in samples,
and the weight of its gradient in the worker's answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from thalweg.catalog import Catalog
from thalweg.codes import TREE_ROOT, Allocation
from thalweg.codes.tolerance import Quota, Ranks, Tolerance, chance_of_waiting, quotas, tolerance
from thalweg.facts import counted
from thalweg.plan import Plan
from thalweg.redundancy import allocation_of
from thalweg.report.tables import fact_lines, range_text
from thalweg.schedules import Group

LARGEST_DENOMINATOR = 10_000  # of fractions that are written as such
MAX_LISTED_RANKS = 16
BEYOND = {
    "wait": "the root waits for them",
    "raise": "the run fails",
    "partial": "the root continues with the answers that it has, scaled up, and logs it",
}


@dataclass(frozen=True, slots=True)
class BatchPart:
    """A part of the batch, from and up to fractions of it or numbers of samples."""

    start: Fraction
    stop: Fraction
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RootTraffic:
    """The bytes that the root's process sends and receives in a step."""

    data: int  # the model size
    results: int  # sent down to the children of the root
    answers: int  # sent up, to another worker
    received: int

    @property
    def sent(self) -> int:
        return self.results + self.answers

    def __str__(self) -> str:
        both = f" ({self._times(self.results)} down, {self._times(self.answers)} up)"
        return (
            f"its process sends {self._times(self.sent)} the model size"
            f"{both if self.answers else ''} and receives {self._times(self.received)}"
        )

    def _times(self, nbytes: int) -> str:
        return f"{nbytes / max(self.data, 1):.3g}x"


@dataclass(frozen=True, slots=True, kw_only=True)
class CodedPlanView:
    allocation: Allocation
    tolerance: Tolerance
    beyond: str
    batch: int | None  # samples; None: parts are fractions
    straggling: tuple[float, float] | None  # least and largest probability, if measured
    waiting: float | None  # probability that a step has to wait
    at_root: RootTraffic | None = None  # None where nothing has been compiled

    @property
    def plain(self) -> bool:
        """True if all weights are one, so that replicas send the same bits."""
        return all(code.teams for code in self.allocation.tree.codes.values())

    @property
    def redundancy(self) -> Fraction:
        """The number of times that the batch is computed."""
        return sum(self.allocation.loads.values(), start=Fraction(0))

    @property
    def root_answers(self) -> int | None:
        """The worker that the root's process answers, if it is also a child of one."""
        above = self.allocation.tree.parents.get(self.allocation.host, TREE_ROOT)
        return None if above == TREE_ROOT else above

    def below(self, node: int) -> int:
        """The number of workers below a node, at any depth."""
        return sum(1 + self.below(child) for child in self.allocation.tree.children[node])

    def quotas(self, node: int) -> list[Quota]:
        return quotas(self.allocation.tree, node)

    def parts(self, rank: int) -> list[BatchPart]:
        """The parts of the batch that a rank computes; neighbours of one weight are one part."""
        cuts, own = self.allocation.cuts, self.allocation.weights.get(rank, {})
        return _joined(
            BatchPart(cuts[cell], cuts[cell + 1], weight) for cell, weight in sorted(own.items())
        )

    def samples(self, rank: int) -> list[BatchPart]:
        assert self.batch is not None
        return _joined(
            BatchPart(Fraction(start), Fraction(stop), weight)
            for start, stop, weight in sorted(self.allocation.samples(rank, self.batch))
        )

    def work(self, rank: int) -> str:
        if rank not in self.allocation.weights:
            return "computes nothing"
        if self.batch is not None:
            return ", ".join(
                range_text(int(part.start), int(part.stop)) + _times(part.weight)
                for part in self.samples(rank)
            )
        return ", ".join(
            f"{fraction_text(part.start)} to {fraction_text(part.stop)}{_times(part.weight)}"
            for part in self.parts(rank)
        )

    def facts(self) -> list[tuple[str, str]]:
        """Lines on cost and tolerance, each with the name of its kind where a new kind begins."""
        kinds = {
            "load": [self._load()],
            "layers": [self._layers()],
            "root": [self._root(), *([] if self.at_root is None else [str(self.at_root)])],
            "tolerated stragglers": self._tolerated_stragglers(),
            "smallest blocking set": self._stops(),
            "beyond tolerance": [BEYOND[self.beyond]],
            "rounding": [self._rounding()],
        }
        if self.straggling is not None and self.waiting is not None:
            least, most = (f"{100 * chance:.3g}" for chance in self.straggling)
            often = f"{most} %" if least == most else f"{least} to {most} %"
            text = f"{100 * self.waiting:.3g} % of the steps, if each worker straggles at {often}"
            kinds["steps that wait"] = [text]
        return fact_lines(kinds)

    def _load(self) -> str:
        loads, number = self.allocation.loads.values(), len(self.allocation.workers)
        least, most = fraction_text(min(loads)), fraction_text(max(loads))
        share = most if least == most else f"from {least} to {most}"
        factor = float(max(loads) * number)
        times = f"{factor:.3g} times the" if factor > 1 else "the same as the"
        return f"{share} of the batch per worker, {times} 1/{number} without a code"

    def _layers(self) -> str:
        tree = self.allocation.tree
        sizes = [str(len(layer)) for layer in tree.layers()][1:]
        below = sorted({len(tree.children[node]) for node in tree.codes})
        several = f"{below[0]} to {below[-1]}" if len(below) > 1 else str(below[0])
        parents = counted(len(tree.codes), "parent")
        return f"{len(sizes)}, of {' + '.join(sizes)} workers; {parents} of {several} children each"

    def _root(self) -> str:
        host = self.allocation.host
        if host not in self.allocation.weights:
            return f"rank {host}, which computes nothing"
        if self.root_answers is None:
            return f"in the process of rank {host}, which answers it too, without a message"
        above = self.root_answers
        return f"in the process of rank {host}, which as a leaf also answers rank {above}"

    def _tolerated_stragglers(self) -> list[str]:
        tolerance = self.tolerance
        if not tolerance.anywhere:
            return ["none"]
        lines = [f"any {tolerance.anywhere}"]
        if tolerance.parents > 1:
            lines += [
                f"any {tolerance.per_parent} under every parent, "
                f"{tolerance.under_every_parent} in all",
                f"any {tolerance.leaves} of the leaves",
            ]
        best = f"{tolerance.at_best} of {tolerance.workers} at best"
        return [*lines, f"{best}, if {ranks_text(tolerance.enough)} are on time"]

    def _stops(self) -> list[str]:
        tolerance = self.tolerance
        lines = [_late_text(tolerance.breaking)]
        if len(tolerance.breaking_leaves) > len(tolerance.breaking):
            lines.append(f"{_late_text(tolerance.breaking_leaves)}, of the leaves")
        return [*lines, f"the process of rank {self.allocation.host} alone: it has the root"]

    def _rounding(self) -> str:
        if self.plain:
            return "all weights are one: the same bits, whichever workers straggle"
        worst = self.allocation.amplification
        return f"magnified by the weights, at worst {worst:.3g} times"


def coded_plan_view(plan: Plan, group: Group, batch: int | None, catalog: Catalog) -> CodedPlanView:
    """The view of a coded plan; raises LayoutError if the batch is too small for the workers."""
    assert plan.redundancy is not None
    allocation = allocation_of(plan, group, catalog)
    if batch is not None:
        allocation.refuse_batch(batch)
    late = {rank: group.cluster.host(rank).late.probability for rank in allocation.workers}
    measured = any(late.values())
    return CodedPlanView(
        allocation=allocation,
        tolerance=tolerance(allocation.tree),
        beyond=str(plan.redundancy.arguments["beyond"]),
        batch=batch,
        straggling=(min(late.values()), max(late.values())) if measured else None,
        waiting=chance_of_waiting(allocation.tree, late) if measured else None,
    )


def _late_text(ranks: Ranks) -> str:
    many = f"{len(ranks)} stragglers, like {ranks_text(ranks)}"
    return many if len(ranks) > 1 else "any straggler"


def root_text(view: CodedPlanView) -> str:
    place = f"root, in the process of rank {view.allocation.host}"
    if view.allocation.host not in view.allocation.weights:
        place = f"root, rank {view.allocation.host}, which computes nothing"
    return f"{place}: needs {needs_text(view, TREE_ROOT)}"


def needs_text(view: CodedPlanView, node: int) -> str:
    """The answers that a node needs from its children."""
    own = view.quotas(node)
    if len(own) == 1:
        [quota] = own
        size = len(quota.members)
        return f"any {size - quota.spare} of {size}" if quota.spare else f"all {size}"
    largest = max(len(quota.members) for quota in own)
    return f"one of each of {len(own)} teams" if largest > 1 else f"all {len(own)}"


def ranks_text(ranks: Ranks) -> str:
    if len(ranks) <= MAX_LISTED_RANKS:
        return " ".join(map(str, ranks))
    return f"{ranks[0]} {ranks[1]} ... {ranks[-1]}"


def fraction_text(value: Fraction) -> str:
    return str(value) if value.denominator <= LARGEST_DENOMINATOR else f"{float(value):.5f}"


def weight_text(weight: float) -> str:
    return f"{weight:.3g}"


def _times(weight: float) -> str:
    text = weight_text(weight)
    return "" if text == "1" else f" x{text}"


def _joined(parts: Iterable[BatchPart]) -> list[BatchPart]:
    joined: list[BatchPart] = []
    for part in parts:
        before = joined[-1] if joined else None
        if before is not None and (before.stop, before.weight) == (part.start, part.weight):
            joined[-1] = BatchPart(before.start, part.stop, part.weight)
        else:
            joined.append(part)
    return joined
