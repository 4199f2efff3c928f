"""`attach()`: an ordinary training script becomes a distributed one."""

from __future__ import annotations

import atexit
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from thalweg.catalog import default_catalog, parse_plan
from thalweg.errors import PlanError, ThalwegError, UsageError
from thalweg.facts import Cluster, Duration, read_cluster
from thalweg.plan import Plan
from thalweg.runtime import Alarm, Engine, World
from thalweg.schedules import Group
from thalweg.training.averager import refuse_what_does_not_run_yet
from thalweg.training.batches import Batches, Coding
from thalweg.training.run import Run, Stateful
from thalweg.training.sameness import agree, description
from thalweg.transports import Transport


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    sync: str = "ring",
    data: Dataset[Any] | None = None,
    batch: int | None = None,
    state: Sequence[Stateful] = (),
    resume: str | Path | None = None,
    seed: int = 0,
    cluster: Cluster | str | Path | None = None,
    loader: Mapping[str, Any] | None = None,
    timeout: str = "10min",
    wrap: Callable[[Transport], Transport] = lambda transport: transport,
) -> Run:
    """Synchronise this model's training with all other workers' under the plan `sync`.

    data, batch  samples, and how many of them all workers together take at a step; `run.batches`
                 then yields this worker's. Without them, use your own loader.
    state        objects with `state_dict` and `load_state_dict` that go into checkpoints
    resume       a folder that `run.save` wrote into; the newest checkpoint in it is taken up, and
                 if there is none the run starts from the beginning
    seed         of the order of samples
    cluster      what is known of the network (a `Cluster` or its file); by default all hosts alike
    loader       options for torch's DataLoader, such as num_workers
    timeout      how long to wait for the others before giving up
    wrap         puts something round the transport: a recorder, or faults for tests

    Parameters and buffers start as rank 0's. Raises Mismatch on all ranks if plan, model,
    optimizer or data differ between them.
    """
    seconds = Duration.parse(timeout).seconds
    world = World.join(seconds)
    alarm = Alarm(world.store, world.rank)
    try:
        return _attach(
            model,
            optimizer,
            plan=parse_plan(sync),
            world=world,
            alarm=alarm,
            data=data,
            batch=batch,
            state=state,
            resume=None if resume is None else Path(resume),
            seed=seed,
            group=Group.everybody(_cluster(cluster, world.size)),
            loader=loader or {},
            seconds=seconds,
            wrap=wrap,
        )
    except ThalwegError as error:
        alarm.sound(error.problem)
        _ErrorsInOneLine.install(world.rank, alarm)
        raise


def _attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    plan: Plan,
    world: World,
    alarm: Alarm,
    data: Dataset[Any] | None,
    batch: int | None,
    state: Sequence[Stateful],
    resume: Path | None,
    seed: int,
    group: Group,
    loader: Mapping[str, Any],
    seconds: float,
    wrap: Callable[[Transport], Transport],
) -> Run:
    refuse_what_does_not_run_yet(plan)
    batches = _batches(plan, group, world, data, batch, seed)
    own = description(
        str(plan), model, optimizer, {"batch": batch, "samples": batches and batches.samples}
    )
    agree(world, alarm, own, seconds)
    transport = wrap(world.transport(plan.settings.transport or "zeromq"))
    engine = Engine(transport, alarm, seconds)
    run = Run(
        model=model,
        optimizer=optimizer,
        plan=plan,
        group=group,
        world=world,
        engine=engine,
        alarm=alarm,
        data=data,
        batches=batches,
        loader=loader,
        state=state,
    )
    run.start(resume)
    atexit.register(_close, weakref.ref(run))
    _ErrorsInOneLine.install(world.rank, alarm)
    return run


def _batches(
    plan: Plan, group: Group, world: World, data: Dataset[Any] | None, batch: int | None, seed: int
) -> Batches | None:
    if (data is None) != (batch is None):
        raise UsageError("data= and batch= go together", "give attach() both or neither")
    codes = default_catalog().codes
    coded = plan.redundancy is not None and plan.redundancy.name in codes
    if data is None or batch is None:
        if coded:
            raise PlanError(
                f"{plan} gives each worker several blocks of the data, which your loader can't",
                "give data= and batch= to attach()",
            )
        return None
    coding = None
    if coded and plan.redundancy is not None:
        make = codes[plan.redundancy.name].make
        code = make(group.size, stragglers=plan.redundancy.arguments["stragglers"])
        coding = Coding(code=code, member=group.order.index(world.rank))
    length = getattr(data, "__len__", None)
    if length is None:
        raise UsageError("the data has no length", "use a map-style dataset, or your own loader")
    return Batches(samples=length(), batch=batch, size=world.size, seed=seed, coding=coding)


def _cluster(cluster: Cluster | str | Path | None, size: int) -> Cluster:
    if cluster is None:
        return Cluster.flat(size)
    known = cluster if isinstance(cluster, Cluster) else read_cluster(Path(cluster))
    if known.workers != size:
        raise UsageError(
            f"the cluster has {known.workers} workers, and {size} were started",
            "start as many as it has, or describe those that were started",
        )
    return known


def _close(run: weakref.ref[Run]) -> None:
    """At the end of the script: others may still be reading what this rank sent last."""
    still_there = run()
    if still_there is not None:
        still_there.close()


class _ErrorsInOneLine:
    """What Thalweg raises on purpose says all there is to say; other errors keep their traceback,
    and the other ranks are told."""

    def __init__(self, rank: int, alarm: Alarm) -> None:
        self._rank = rank
        self._alarm = alarm
        self._before = sys.excepthook

    def __call__(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, ThalwegError):
            print(f"thalweg: rank {self._rank}: {error}", file=sys.stderr)
        else:
            self._alarm.sound(f"{kind.__name__}: {error}")
            self._before(kind, error, traceback)

    @classmethod
    def install(cls, rank: int, alarm: Alarm) -> None:
        if not isinstance(sys.excepthook, cls):
            sys.excepthook = cls(rank, alarm)
