"""What each worker computes under a code, and how many may be late, in words.

A worker's work is a list of *parts*: a stretch of the batch, from and up to fractions of it or
samples, and the weight that its gradient has in the worker's answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from thalweg.catalog import Catalog
from thalweg.codes import TREE_ROOT, Allocation
from thalweg.codes.tolerance import Quota, Ranks, Tolerance, chance_of_waiting, quotas, tolerance
from thalweg.plan import Plan
from thalweg.redundancy import allocation_of
from thalweg.schedules import Group

LARGEST_DENOMINATOR = 10_000  # of fractions that are written as such
MAX_LISTED_RANKS = 12  # ranks that are listed
BEYOND = {
    "wait": "the root waits for them",
    "raise": "the run gives up",
    "partial": "the root goes on with what is there, scaled up, and says so",
}


@dataclass(frozen=True, slots=True)
class BatchPart:
    """Fractions of the batch, or numbers of samples."""

    start: Fraction
    stop: Fraction
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RootTraffic:
    """What a step's schedules have the root's process send and receive, in bytes."""

    data: int  # S, to compare with
    results: int  # sent down to those who answer the root
    answers: int  # sent up, to another worker
    received: int

    @property
    def sent(self) -> int:
        return self.results + self.answers

    def __str__(self) -> str:
        way = f" ({self._times(self.results)} down, {self._times(self.answers)} up)"
        return (
            f"its process sends {self._times(self.sent)} the data{way if self.answers else ''} "
            f"and receives {self._times(self.received)}"
        )

    def _times(self, nbytes: int) -> str:
        return f"{nbytes / max(self.data, 1):.3g}x"


@dataclass(frozen=True, slots=True, kw_only=True)
class CodedPlanView:
    allocation: Allocation
    tolerance: Tolerance
    beyond: str
    batch: int | None  # samples; None: parts are fractions
    straggler_delay: (
        tuple[float, float] | None
    )  # the least and the largest chance, where somebody measured it
    waiting: float | None  # the chance that a step has to wait
    at_root: RootTraffic | None = None  # None where nothing has been compiled

    @property
    def plain(self) -> bool:
        """All weights are one, and replicas send the same bits."""
        return all(code.teams for code in self.allocation.tree.codes.values())

    @property
    def redundancy(self) -> Fraction:
        """How many times the batch is computed."""
        return sum(self.allocation.loads.values(), start=Fraction(0))

    @property
    def root_answers(self) -> int | None:
        """The worker that the root's process answers, if it has a seat below one."""
        above = self.allocation.tree.parents.get(self.allocation.host, TREE_ROOT)
        return None if above == TREE_ROOT else above

    def quotas(self, node: int) -> list[Quota]:
        return quotas(self.allocation.tree, node)

    def parts(self, rank: int) -> list[BatchPart]:
        """What this rank computes, of the batch as a whole; neighbours of one weight as one."""
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
            return ", ".join(_numbers(part) + _times(part.weight) for part in self.samples(rank))
        return ", ".join(
            f"{fraction_text(part.start)} to {fraction_text(part.stop)}{_times(part.weight)}"
            for part in self.parts(rank)
        )

    def facts(self) -> list[tuple[str, str]]:
        """Cost and tolerance, a line each, and the name of the first of its kind."""
        late, *also_late = self._tolerated_stragglers()
        stops, *also_stops = self._stops()
        lines = [
            ("load", self._load()),
            ("layers", self._layers()),
            ("root", self._root()),
            *([("", str(self.at_root))] if self.at_root is not None else []),
            ("may be late", late),
            *(("", line) for line in also_late),
            ("stops a step", stops),
            *(("", line) for line in also_stops),
            ("then", BEYOND[self.beyond]),
            ("rounding", self._rounding()),
        ]
        if self.straggler_delay is not None and self.waiting is not None:
            least, most = (f"{100 * chance:.3g}" for chance in self.straggler_delay)
            often = f"{most} %" if least == most else f"{least} to {most} %"
            text = f"{100 * self.waiting:.3g} % of the steps, if each worker is late at {often}"
            lines.append(("has to wait", text))
        return lines

    def _load(self) -> str:
        loads, number = self.allocation.loads.values(), len(self.allocation.workers)
        least, most = fraction_text(min(loads)), fraction_text(max(loads))
        share = most if least == most else f"from {least} to {most}"
        factor = float(max(loads) * number)
        times = f"{factor:.3g} times the" if factor > 1 else "the same as the"
        return f"{share} of the batch a worker, {times} 1/{number} that it has without a code"

    def _layers(self) -> str:
        tree = self.allocation.tree
        sizes = [str(len(layer)) for layer in tree.layers()][1:]
        below = sorted({len(tree.children[node]) for node in tree.codes})
        several = f"{below[0]} to {below[-1]}" if len(below) > 1 else str(below[0])
        who = f"{several} children" if below != [1] else "1 child"
        parents = len(tree.codes)
        each = f"{parents} parents of {who} each" if parents > 1 else f"one parent of {who}"
        return f"{len(sizes)}, of {' + '.join(sizes)} workers; {each}"

    def _root(self) -> str:
        host = self.allocation.host
        if host not in self.allocation.weights:
            return f"rank {host}, which computes nothing"
        if self.root_answers is None:
            return f"in the process of rank {host}, which answers it too, without a message"
        return (
            f"in the process of rank {host}, which as a leaf also answers rank {self.root_answers}"
        )

    def _tolerated_stragglers(self) -> list[str]:
        said = self.tolerance
        if not said.anywhere:
            return ["nobody"]
        lines = [f"any {said.anywhere}, whoever they are"]
        if said.parents > 1:
            lines += [
                f"any {said.per_parent} under every parent at once, which makes "
                f"{said.under_every_parent}",
                f"any {said.leaves} of those who have nobody below them",
            ]
        return [
            *lines,
            f"{said.at_best} of {said.workers} at best, if {ranks_text(said.enough)} are on time",
        ]

    def _stops(self) -> list[str]:
        said = self.tolerance
        lines = [f"{_late_text(said.breaking)}"]
        if len(said.breaking_leaves) > len(said.breaking):
            lines.append(f"{_late_text(said.breaking_leaves)}, of those who have nobody below them")
        return [*lines, f"the process of rank {self.allocation.host} alone: it has the root"]

    def _rounding(self) -> str:
        if self.plain:
            return "all weights are one: the same bits, whoever is late"
        worst = self.allocation.amplification
        return f"magnified by the weights, up to {worst:.3g} times if the worst are late"


def coded_plan_view(plan: Plan, group: Group, batch: int | None, catalog: Catalog) -> CodedPlanView:
    """LayoutError if the batch is too small for so many workers."""
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
        straggler_delay=(min(late.values()), max(late.values())) if measured else None,
        waiting=chance_of_waiting(allocation.tree, late) if measured else None,
    )


def _late_text(ranks: Ranks) -> str:
    return f"{len(ranks)} late ones, like {ranks_text(ranks)}" if len(ranks) > 1 else "any late one"


def root_text(view: CodedPlanView) -> str:
    seat = f"root, in the process of rank {view.allocation.host}"
    if view.allocation.host not in view.allocation.weights:
        seat = f"root, rank {view.allocation.host}, which computes nothing"
    return f"{seat}: needs {needs_text(view, TREE_ROOT)}"


def needs_text(view: CodedPlanView, node: int) -> str:
    """Of whom an answer is made."""
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
    return f"{' '.join(map(str, ranks[:4]))} ... {ranks[-1]}"


def fraction_text(value: Fraction) -> str:
    return str(value) if value.denominator <= LARGEST_DENOMINATOR else f"{float(value):.5f}"


def weight_text(weight: float) -> str:
    return f"{weight:.3g}"


def _times(weight: float) -> str:
    text = weight_text(weight)
    return "" if text == "1" else f" x{text}"


def _numbers(part: BatchPart) -> str:
    last = part.stop - 1
    return str(part.start) if last == part.start else f"{part.start}-{last}"


def _joined(parts: Iterable[BatchPart]) -> list[BatchPart]:
    joined: list[BatchPart] = []
    for part in parts:
        before = joined[-1] if joined else None
        if before is not None and (before.stop, before.weight) == (part.start, part.weight):
            joined[-1] = BatchPart(before.start, part.stop, part.weight)
        else:
            joined.append(part)
    return joined
