"""One synchronisation of so many bytes, under several plans and by torch's own all_reduce.

The plans take turns, so that all see the same noise; a repetition takes as long as its slowest
rank. Every result is compared with the right one; what a compressor makes of random values, which
it encodes and decodes within that time, must be the same on all ranks. Where torch has a hook for
the same compressor, it is timed too.

Where the links' rates are known, so is a bound that no way of summing S bytes over N hosts in R
racks can beat. Of every cut through the network, the sum of what is on one side must cross it, and
the result must come back: S over the rate of each link. And each of the S bytes must be sent 2(N-1)
times in all, N-1 to be summed and N-1 to be told: 2(N-1) S over the rate of all NICs together, and
likewise 2(R-1) S over that of all uplinks.

Beside what each row took stands what its plan's closed form predicts (`thalweg.predict`).
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from thalweg.bench.ddp_hooks import DdpHook, OneBucket, ddp_hook_text
from thalweg.bench.run_everywhere import Deployment, Report, run_everywhere
from thalweg.catalog import parse_plan
from thalweg.engine.engine import Engine
from thalweg.errors import ScheduleError
from thalweg.facts import Cluster, Size, Workload
from thalweg.launch.rank_assignment import find_cluster
from thalweg.members.world import World
from thalweg.plan import TRANSPORT, Choice, Plan
from thalweg.predict import synchronisation_seconds
from thalweg.schedules import Content, Group
from thalweg.steps import travelling, warm_up
from thalweg.training.buckets import DTYPES, Layout
from thalweg.training.compiled_steps import CompiledSteps, RankRound
from thalweg.training.exchanges.compressed import CompressedBucket, Compression
from thalweg.training.factory import is_native
from thalweg.transports import Transport

ENCRYPTED, PLAIN = f"{TRANSPORT}, encrypted", f"{TRANSPORT}, plain"
GLOO = "gloo"
COLLECTIVE_WARMUP_COUNT = 2  # repetitions that don't count
COLLECTIVE_TIMEOUT_SECONDS = 300.0  # seconds for one synchronisation

Progress = Callable[[int, int], None]
"""Called with how many synchronisations are done, and of how many."""


@dataclass(frozen=True, slots=True)
class CollectiveCase:
    """One row: a plan on our transport, or what torch has for its compressor."""

    sync: str
    transport: str
    hook: Choice | None = None


def entries(syncs: Sequence[str], *, both_ways: bool = False) -> list[CollectiveCase]:
    """A row for each plan, and torch's own; for each plan of ours one with encryption and one
    without, if both ways are asked for."""
    ways = (ENCRYPTED, PLAIN) if both_ways else (TRANSPORT,)
    rows = [CollectiveCase(GLOO, GLOO)]
    for text in syncs:
        plan = parse_plan(text)
        if is_native(plan):
            rows.append(CollectiveCase(text, GLOO))
        else:
            rows += [CollectiveCase(text, way) for way in ways]
        peer = plan.precision and ddp_hook_text(plan.precision)
        if peer and all(row.sync != peer for row in rows):
            rows.append(CollectiveCase(peer, GLOO, plan.precision))
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
    least = None if deployment.cluster is None else bound(deployment.cluster, workload.nbytes)
    forms = [predicted(entry, deployment.cluster, workload) for entry in rows]
    return _rows(rows, [result["seconds"] for result in results], least, forms)


def predicted(entry: CollectiveCase, cluster: Cluster | None, workload: Workload) -> float | None:
    """Seconds by the closed form of what this row runs; None where the rates aren't known."""
    if cluster is None:
        return None
    if entry.hook is not None:
        return None
    plan = parse_plan("ddp" if entry.sync == GLOO else entry.sync)
    if entry.transport == GLOO:  # all bytes at once, as `_GlooCase` does
        whole = replace(plan.settings, bucket=Size(workload.nbytes))
        plan = replace(plan, settings=whole)
    return synchronisation_seconds(plan, Group.everybody(cluster), workload)


def bound(cluster: Cluster, nbytes: int) -> float | None:
    """Seconds that an all-reduce of so many bytes takes at least; None where nothing limits it."""
    rates = {link: rate.bits_per_second / 8 for link, rate in cluster.rates().items()}
    least = [0.0]
    for kind, owners in (("nic", len(cluster.hosts)), ("uplink", len(cluster.racks))):
        for direction in ("out", "in"):
            ways = [r for link, r in rates.items() if link[0] == kind and link[2] == direction]
            if owners > 1 and ways:
                least.append(nbytes / min(ways))
            if owners > 1 and len(ways) == owners:
                least.append(2 * (owners - 1) * nbytes / sum(ways))
    return max(least) or None


def _rows(
    entries: list[CollectiveCase],
    by_rank: list[list[list[float]]],
    least: float | None,
    forms: list[float | None],
) -> list[dict[str, Any]]:
    rows = []
    for index, (entry, form) in enumerate(zip(entries, forms, strict=True)):
        seconds = [max(times) for times in zip(*(rank[index] for rank in by_rank), strict=True)]
        rows.append(
            {
                "sync": entry.sync,
                "transport": entry.transport,
                "seconds": seconds,
                "median": median(seconds),
                "bound": least,
                "fraction_of_bound": None if least is None else least / median(seconds),
                "predicted": form,
                "predicted_over_measured": None if form is None else form / median(seconds),
            }
        )
    torchs_own = rows[0]["median"]
    return [{**row, "vs_gloo": torchs_own / row["median"]} for row in rows]


def _measure(
    entries: list[CollectiveCase], workload: Workload, repeats: int, done: Callable[[int], None]
) -> dict[str, Any]:
    """In a worker: seconds by entry and repetition."""
    world = World.join(COLLECTIVE_TIMEOUT_SECONDS)
    world.join_process_group()
    abort_flag = world.abort_flag()
    engines = {
        name: Engine(_transport(world, name), abort_flag, COLLECTIVE_TIMEOUT_SECONDS)
        for name in (TRANSPORT, ENCRYPTED, PLAIN)
        if any(entry.transport == name for entry in entries)
    }
    group = Group.everybody(find_cluster(None, world.size, os.environ))
    subjects = [_subject(entry, workload, group, engines) for entry in entries]
    seconds: list[list[float]] = [[] for _ in entries]
    for repeat in range(repeats + COLLECTIVE_WARMUP_COUNT):
        for index, subject in enumerate(subjects):
            subject.fill(repeat)
            dist.barrier()
            start = perf_counter()
            subject.run(repeat * len(subjects) + index, repeat)
            elapsed = perf_counter() - start
            subject.check(repeat)
            if repeat >= COLLECTIVE_WARMUP_COUNT:
                seconds[index].append(elapsed)
            done(repeat * len(subjects) + index + 1)
    world.leave(COLLECTIVE_TIMEOUT_SECONDS, abort_flag)
    for engine in engines.values():
        engine.close()
    return {"seconds": seconds}


def _transport(world: World, name: str) -> Transport:
    if name == TRANSPORT:
        return world.transport()
    way = replace(world.security, encrypted=name == ENCRYPTED)
    return replace(world.namespace(name), security=way).transport()


def _subject(
    entry: CollectiveCase, workload: Workload, group: Group, engines: dict[str, Engine]
) -> _PlanCase | _CompressedCase | _DdpHookCase | _GlooCase:
    if entry.hook is not None:
        return _DdpHookCase(entry.hook, workload)
    if entry.transport == GLOO:
        return _GlooCase(workload, group)
    plan, engine = parse_plan(entry.sync), engines[entry.transport]
    compression = Compression.of(plan)
    if compression is not None:
        return _CompressedCase(plan, compression, workload, group, engine)
    return _PlanCase(plan, workload, group, engine)


class _PlanCase:
    """A plan on our transport."""

    def __init__(self, plan: Plan, workload: Workload, group: Group, engine: Engine) -> None:
        self.plan = plan
        self.rank = engine.rank
        self.engine = engine
        self.layout = Layout.of(_tensors(travelling(plan, workload)), plan.settings.bucket)
        self.compiled_steps = CompiledSteps(plan, group, self.layout.workload, engine.rank)

    def fill(self, repeat: int) -> None:
        for rank_round in self.compiled_steps.at(_meeting(self.plan, repeat)).rounds:
            for view in self._views(rank_round):
                view.fill_(_value(rank_round.program.schedule.before.holds(self.rank, 0)))

    def run(self, number: int, repeat: int) -> None:
        tasks = [
            rank_round.task(self.layout.buckets[rank_round.round.bucket], number, 0)
            for rank_round in self.compiled_steps.at(_meeting(self.plan, repeat)).rounds
        ]
        self.engine.run(tasks)

    def check(self, repeat: int) -> None:
        for rank_round in self.compiled_steps.at(_meeting(self.plan, repeat)).rounds:
            expected = _value(rank_round.program.schedule.after.holds(self.rank, 0))
            if not all(bool((view == expected).all()) for view in self._views(rank_round)):
                raise ScheduleError(
                    f"{self.plan} gave rank {self.rank} a wrong sum", "please report this"
                )

    def _views(self, rank_round: RankRound) -> Iterable[torch.Tensor]:
        return self.layout.buckets[rank_round.round.bucket].views.values()


class _CompressedCase:
    """A plan with a compressor, from values to values."""

    def __init__(
        self,
        plan: Plan,
        compression: Compression,
        workload: Workload,
        group: Group,
        engine: Engine,
    ) -> None:
        self.plan = plan
        self.engine = engine
        tensors = _tensors(travelling(plan, workload))
        self.layout = Layout.of(tensors, plan.settings.bucket, compression.arrange)
        self.compiled_steps = CompiledSteps(plan, group, self.layout.workload, engine.rank)
        self.buckets = [
            CompressedBucket(bucket, compression, engine.rank) for bucket in self.layout.buckets
        ]
        self.random = torch.Generator().manual_seed(engine.rank)

    def fill(self, repeat: int) -> None:
        for bucket in self.layout.buckets:
            for view in bucket.views.values():
                view.normal_(generator=self.random)

    def run(self, number: int, repeat: int) -> None:
        step = _meeting(self.plan, repeat)
        rank_step = self.compiled_steps.at(step)
        first = number * rank_step.numbers
        chains = [
            compressed.chain(rank_rounds, step, first)
            for compressed, bucket in zip(self.buckets, self.layout.buckets, strict=True)
            if (rank_rounds := rank_step.of(bucket.index))
        ]
        self.engine.run(chains)

    def check(self, repeat: int) -> None:
        if self.plan.averages_parameters:
            return  # replicas differ
        digests = [zlib.crc32(bucket.vector.tobytes()) for bucket in self.layout.buckets]
        least, most = torch.tensor(digests), torch.tensor(digests)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        if not torch.equal(least, most):
            raise ScheduleError(f"{self.plan} gave ranks different results", "please report this")


class _DdpHookCase:
    """Torch's own, on one bucket."""

    def __init__(self, choice: Choice, workload: Workload) -> None:
        self.bucket = OneBucket(workload.tensors)
        self.hook = DdpHook(choice)
        self.random = torch.Generator().manual_seed(dist.get_rank())

    def fill(self, repeat: int) -> None:
        self.bucket.buffer().normal_(generator=self.random)

    def run(self, number: int, repeat: int) -> None:
        self.hook.run(self.bucket)

    def check(self, repeat: int) -> None:
        """That is torch's business."""


def _meeting(plan: Plan, repeat: int) -> int:
    """The repeat-th step at which all meet, and something is compressed."""
    every = plan.cadence.every
    first = -(-warm_up(plan) // every)
    return (first + repeat) * every + every - 1


def _tensors(workload: Workload) -> dict[str, torch.Tensor]:
    dtypes = {name: dtype for dtype, name in DTYPES.items()}
    return {
        t.name: torch.empty(t.shape, dtype=dtypes[t.dtype], device="meta") for t in workload.tensors
    }


def _value(content: Content | None) -> float:
    """A number for what a schedule says a rank holds: rank r contributes r + 1, and so does block
    r of a code. Whole numbers, so that sums have no rounding."""
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
            raise ScheduleError("torch's all_reduce gave a wrong sum", "please report this")
