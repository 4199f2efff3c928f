"""The time of one all-reduce under several plans, and by torch's own all_reduce.

The plans take turns, so that all see the same noise; a repetition takes as long as its slowest
rank. Every result is checked: an exact sum against the expected one, a compressed sum of random
values, encoded and decoded within the measured time, for equality on all ranks. If DDP has a hook
for the same compressor, the hook is timed too.

If the rates of the links are known, an all-reduce of S bytes over N hosts in R racks has a lower
bound. Across every cut of the network one side's sum must be sent and the result must come back: S
over the rate of each link. And each of the S bytes must be sent 2(N-1) times in all, N-1 to be
summed and N-1 to be distributed: 2(N-1) S over the total rate of all NICs, and likewise 2(R-1) S
over that of all uplinks.

Each row also has the prediction of its plan's closed form (`thalweg.predict`).
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from thalweg.bench.ddp_hooks import DdpHook, ddp_hook_text
from thalweg.bench.run_everywhere import Deployment, Progress, Report, run_everywhere
from thalweg.catalog import default_catalog, parse_plan
from thalweg.engine.engine import Engine
from thalweg.errors import ScheduleError
from thalweg.facts import Cluster, Size, Workload
from thalweg.launch.launcher_variables import find_cluster
from thalweg.members.world import World
from thalweg.plan import TRANSPORT, Choice, Plan
from thalweg.predict import synchronisation_seconds
from thalweg.schedules import Content, Group, Schedule
from thalweg.steps import travelling, warm_up
from thalweg.training.buckets import DTYPES, Layout
from thalweg.training.compiled_steps import RankStep
from thalweg.training.exchanges.compressed import Compression
from thalweg.training.exchanges.rounds import BucketRounds
from thalweg.transports import Transport

ENCRYPTED, PLAIN = f"{TRANSPORT}, encrypted", f"{TRANSPORT}, plain"
GLOO = "gloo"
COLLECTIVE_WARMUP_COUNT = 2  # repetitions that aren't counted
COLLECTIVE_TIMEOUT_SECONDS = 300.0  # for one repetition of one plan


@dataclass(frozen=True, slots=True)
class CollectiveCase:
    """One row: a plan on our transport, torch's all_reduce, or the DDP hook for a compressor."""

    sync: str
    transport: str
    hook: Choice | None = None


def entries(syncs: Sequence[str], *, both_ways: bool = False) -> list[CollectiveCase]:
    """A row for torch's all_reduce, for each plan, and for the DDP hooks of their compressors.

    With `both_ways` each plan on our transport has a row with encryption and one without.
    """
    transports = (ENCRYPTED, PLAIN) if both_ways else (TRANSPORT,)
    rows = [CollectiveCase(GLOO, GLOO)]
    for text in syncs:
        plan = parse_plan(text)
        used = (GLOO,) if default_catalog().is_native(plan) else transports
        rows += [CollectiveCase(text, transport) for transport in used]
        hook = plan.precision and ddp_hook_text(plan.precision)
        if hook and all(row.sync != hook for row in rows):
            rows.append(CollectiveCase(hook, GLOO, plan.precision))
    return rows


def bench_collectives(
    deployment: Deployment,
    workload: Workload,
    syncs: Sequence[str],
    repeats: int,
    progress: Progress,
    *,
    both_ways: bool = False,
) -> list[dict[str, Any]]:
    rows = entries(syncs, both_ways=both_ways)
    total = len(rows) * (repeats + COLLECTIVE_WARMUP_COUNT)

    def work(rank: int, report: Report) -> dict[str, Any]:
        return _measure(rows, workload, repeats, lambda done: report(done, total))

    timeout = 60.0 + total * COLLECTIVE_TIMEOUT_SECONDS
    results = run_everywhere(deployment, work, progress, timeout=timeout)
    return _rows(rows, [result["seconds"] for result in results], deployment.cluster, workload)


def predicted(entry: CollectiveCase, cluster: Cluster | None, workload: Workload) -> float | None:
    """The closed-form prediction in seconds; None for DDP hooks and where rates are unknown."""
    if cluster is None or entry.hook is not None:
        return None
    plan = parse_plan("ddp" if entry.sync == GLOO else entry.sync)
    if entry.transport == GLOO:  # `_GlooCase` sends all bytes at once
        plan = replace(plan, settings=replace(plan.settings, bucket=Size(workload.nbytes)))
    return synchronisation_seconds(plan, Group.everybody(cluster), workload)


def bound(cluster: Cluster, nbytes: int) -> float | None:
    """The minimum time of an all-reduce in seconds; None if no link has a rate."""
    rates = {link: rate.bits_per_second / 8 for link, rate in cluster.rates().items()}
    least = [0.0]
    for kind, owners in (("nic", len(cluster.hosts)), ("uplink", len(cluster.racks))):
        for direction in ("out", "in"):
            found = [r for link, r in rates.items() if link[0] == kind and link[2] == direction]
            if owners > 1 and found:
                least.append(nbytes / min(found))
            if owners > 1 and len(found) == owners:
                least.append(2 * (owners - 1) * nbytes / sum(found))
    return max(least) or None


def _rows(
    entries: list[CollectiveCase],
    by_rank: list[list[list[float]]],
    cluster: Cluster | None,
    workload: Workload,
) -> list[dict[str, Any]]:
    least = None if cluster is None else bound(cluster, workload.nbytes)
    rows: list[dict[str, Any]] = []
    for index, entry in enumerate(entries):
        seconds = [max(times) for times in zip(*(rank[index] for rank in by_rank), strict=True)]
        middle = median(seconds)
        form = predicted(entry, cluster, workload)
        rows.append(
            {
                "sync": entry.sync,
                "transport": entry.transport,
                "seconds": seconds,
                "median": middle,
                "bound": least,
                "fraction_of_bound": None if least is None else least / middle,
                "predicted": form,
                "predicted_over_measured": None if form is None else form / middle,
                "vs_gloo": (rows[0]["median"] if rows else middle) / middle,
            }
        )
    return rows


def _measure(
    entries: list[CollectiveCase], workload: Workload, repeats: int, done: Callable[[int], None]
) -> dict[str, Any]:
    """The seconds of this rank by entry and repetition."""
    world = World.join(COLLECTIVE_TIMEOUT_SECONDS)
    world.join_process_group()
    abort_flag = world.abort_flag()
    engines = {
        name: Engine(_transport(world, name), abort_flag, COLLECTIVE_TIMEOUT_SECONDS)
        for name in (TRANSPORT, ENCRYPTED, PLAIN)
        if any(entry.transport == name for entry in entries)
    }
    group = Group.everybody(find_cluster(None, world.size, os.environ))
    cases = [_case(entry, workload, group, engines) for entry in entries]
    seconds: list[list[float]] = [[] for _ in entries]
    for repeat in range(repeats + COLLECTIVE_WARMUP_COUNT):
        for index, case in enumerate(cases):
            number = repeat * len(cases) + index
            case.fill(repeat)
            dist.barrier()
            start = perf_counter()
            case.run(number, repeat)
            elapsed = perf_counter() - start
            case.check(repeat)
            if repeat >= COLLECTIVE_WARMUP_COUNT:
                seconds[index].append(elapsed)
            done(number + 1)
    world.leave(COLLECTIVE_TIMEOUT_SECONDS, abort_flag)
    for engine in engines.values():
        engine.close()
    return {"seconds": seconds}


def _transport(world: World, name: str) -> Transport:
    if name == TRANSPORT:
        return world.transport()
    security = replace(world.security, encrypted=name == ENCRYPTED)
    return replace(world.namespace(name), security=security).transport()


def _case(
    entry: CollectiveCase, workload: Workload, group: Group, engines: dict[str, Engine]
) -> _PlanCase | _CompressedCase | _DdpHookCase | _GlooCase:
    if entry.hook is not None:
        return _DdpHookCase(entry.hook, workload)
    if entry.transport == GLOO:
        return _GlooCase(workload, group)
    plan = parse_plan(entry.sync)
    kind = _PlanCase if plan.precision is None else _CompressedCase
    return kind(plan, workload, group, engines[entry.transport])


class _PlanCase:
    """An uncompressed plan on our transport."""

    def __init__(self, plan: Plan, workload: Workload, group: Group, engine: Engine) -> None:
        self.plan = plan
        self.engine = engine
        tensors = _tensors(travelling(plan, workload))
        arranged = Compression.of(plan).arrange
        self.layout = Layout.of(tensors, plan.settings.bucket, arranged)
        self.rounds = BucketRounds(plan, group, self.layout, engine.rank)

    def fill(self, repeat: int) -> None:
        for view, schedule in self._views(repeat):
            view.fill_(_value(schedule.before.content(self.engine.rank, 0)))

    def run(self, number: int, repeat: int) -> None:
        rank_step = self._step(repeat)
        step = _synchronised_step(self.plan, repeat)
        rank_step = replace(rank_step, step=step, first=number * rank_step.numbers)
        self.engine.run([self.rounds.work(rank_step, chain) for chain in rank_step.chains])

    def check(self, repeat: int) -> None:
        rank = self.engine.rank
        for view, schedule in self._views(repeat):
            if not bool((view == _value(schedule.after.content(rank, 0))).all()):
                raise ScheduleError(
                    f"{self.plan}: the sum on rank {rank} is wrong", "please report this"
                )

    def _step(self, repeat: int) -> RankStep:
        return self.rounds.steps.at(_synchronised_step(self.plan, repeat))

    def _views(self, repeat: int) -> Iterator[tuple[torch.Tensor, Schedule]]:
        """The tensors of each bucket, and the schedule that adds it up."""
        for chain in self._step(repeat).chains:
            for view in self.layout.buckets[chain.bucket].views.values():
                yield view, next(chain.rounds).schedule


class _CompressedCase(_PlanCase):
    """A compressed plan on our transport, including encoding and decoding."""

    def __init__(self, plan: Plan, workload: Workload, group: Group, engine: Engine) -> None:
        super().__init__(plan, workload, group, engine)
        self.random = torch.Generator().manual_seed(engine.rank)

    def fill(self, repeat: int) -> None:
        for bucket in self.layout.buckets:
            for view in bucket.views.values():
                view.normal_(generator=self.random)

    def check(self, repeat: int) -> None:
        if self.plan.averages_parameters:
            return  # replicas may differ
        digests = torch.tensor(
            [zlib.crc32(bucket.vector.tobytes()) for bucket in self.layout.buckets]
        )
        least, most = digests.clone(), digests.clone()
        dist.all_reduce(least, dist.ReduceOp.MIN)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        if not torch.equal(least, most):
            raise ScheduleError(f"{self.plan}: results differ by rank", "please report this")


class _DdpHookCase:
    """A DDP hook on a single bucket."""

    def __init__(self, choice: Choice, workload: Workload) -> None:
        self.hook = DdpHook(choice, workload.tensors)
        self.random = torch.Generator().manual_seed(dist.get_rank())

    def fill(self, repeat: int) -> None:
        self.hook.buffer().normal_(generator=self.random)

    def run(self, number: int, repeat: int) -> None:
        self.hook.run()

    def check(self, repeat: int) -> None:
        """Do nothing: torch's results aren't checked."""


def _synchronised_step(plan: Plan, repeat: int) -> int:
    """The `repeat`-th step after the warm-up in which all ranks synchronise."""
    every = plan.cadence.every
    first = -(-warm_up(plan) // every)
    return (first + repeat) * every + every - 1


def _tensors(workload: Workload) -> dict[str, torch.Tensor]:
    dtypes = {name: dtype for dtype, name in DTYPES.items()}
    return {
        t.name: torch.empty(t.shape, dtype=dtypes[t.dtype], device="meta") for t in workload.tensors
    }


def _value(content: Content | None) -> float:
    """The value of a chunk's content, if rank r, or block r of a code, contributes r + 1.

    Whole numbers have exact sums.
    """
    if content is None:
        return 0.0
    if isinstance(content, int):
        return float(sum(r + 1 for r in range(content.bit_length()) if content >> r & 1))
    return float(sum(weight * (block + 1) for block, weight in enumerate(content)))


class _GlooCase:
    """`torch.distributed.all_reduce` of all bytes at once."""

    def __init__(self, workload: Workload, group: Group) -> None:
        self.size = group.size
        self.tensor = torch.empty(workload.nbytes // 4)
        self.expected = self.size * (self.size + 1) / 2

    def fill(self, repeat: int) -> None:
        self.tensor.fill_(dist.get_rank() + 1)

    def run(self, number: int, repeat: int) -> None:
        dist.all_reduce(self.tensor)

    def check(self, repeat: int) -> None:
        if not bool((self.tensor == self.expected).all()):
            raise ScheduleError("torch's all_reduce: the sum is wrong", "please report this")
