"""`attach()`: an ordinary training script becomes a distributed one."""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from thalweg.catalog import parse_plan
from thalweg.coding import allocation_of, is_relayed
from thalweg.doctor.quick import publish, quick
from thalweg.errors import PlanError, UsageError
from thalweg.facts import Cluster, Duration, format_cluster
from thalweg.plan import Plan
from thalweg.runtime import Engine, World
from thalweg.runtime.launch import RECORDS_VARIABLE, find_cluster
from thalweg.runtime.membership import Membership
from thalweg.schedules import Group
from thalweg.training.asked import is_auto, plan_at_first
from thalweg.training.averager import refuse_what_cannot_run
from thalweg.training.batches import Batches
from thalweg.training.course import Course
from thalweg.training.ending import Ending, errors_in_one_line
from thalweg.training.feed import Feed
from thalweg.training.run import Run
from thalweg.training.sameness import agree, compare, description
from thalweg.training.stateful import Stateful
from thalweg.training.survival import Survival
from thalweg.transports import Transport

log = logging.getLogger("thalweg")


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    sync: str | Plan = "ring",
    data: Dataset[Any] | None = None,
    batch: int | None = None,
    state: Sequence[Stateful] = (),
    resume: str | Path | None = None,
    seed: int = 0,
    cluster: Cluster | str | Path | None = None,
    loader: Mapping[str, Any] | None = None,
    timeout: str | float = "10min",
    records: str | Path | None = None,
    wrap: Callable[[Transport], Transport] = lambda transport: transport,
) -> Run:
    """Synchronise this model's training with all other workers' under the plan `sync`; under
    "auto", or "auto(allow=lossy)", under the one that turns out to be the fastest here.

    data, batch  samples, and how many of them all workers together take at a step; `run.batches`
                 then yields this worker's. Without them, use your own loader.
    state        objects with `state_dict` and `load_state_dict` that go into checkpoints
    resume       a folder that `run.save` wrote into; the newest checkpoint in it is taken up, and
                 if there is none the run starts from the beginning
    seed         of the order of samples
    cluster      what is known of the network (a `Cluster` or its file); by default the file that
                 THALWEG_CLUSTER names, or else all hosts alike
    loader       options for torch's DataLoader, such as num_workers
    timeout      how long to wait for the others before giving up; a number is in seconds
    records      a folder to record every step in, a file for each rank, for `thalweg report`; by
                 default the one that THALWEG_RECORDS names, or else nothing is recorded
    wrap         puts something round the transport: a recorder, or faults for tests

    Parameters and buffers start as rank 0's. Raises Mismatch on all ranks if plan, model,
    optimizer or data differ between them.
    """
    errors_in_one_line()
    seconds = Duration.parse(timeout).seconds if isinstance(timeout, str) else float(timeout)
    world = World.join(seconds)
    alarm = world.alarm()
    ending = Ending(world, alarm)
    with ending.telling_errors():
        plan = sync if isinstance(sync, Plan) else parse_plan(sync)
        group = Group.everybody(find_cluster(cluster, world.size, os.environ))
        refuse_what_cannot_run(plan_at_first(plan), group, has_data=data is not None)
        _refuse_auto_for_ddp(plan, model)
        _refuse_a_stranger(model, optimizer)
        feed = _feed(plan, group, world, data, batch, seed, loader or {})
        settings = {
            "batch": batch,
            "samples": feed and feed.batches.samples,
            "seed": seed,
            "state objects": len(state),
            "resume": "given" if resume else "absent",
            "racks": group.racks,
            "kept apart": str(group.contended) if plan.averages_parameters or is_auto(plan) else "",
            "cluster": _digest(group.cluster),  # rates and names count: schedules depend on them
            "THALWEG_CURVE": world.protection.mode,
            "THALWEG_SECRET": world.protection.fingerprint,
        }
        own = description(str(plan), model, optimizer, settings)
        transport = plan.settings.transport or "zeromq"
        if _may_change(world, model, transport):
            members = Membership(world.store, world.rank, world.size, seconds)
            members.calls_for = lambda rank: False  # until all have begun
            world = replace(world, membership=members)
        publish(world)
        returns = world.restarted and world.membership is not None
        if returns:
            ending.is_spare = True  # the others go on without it
            reference = compare(world, alarm, own, seconds)
        else:
            reference = agree(world, alarm, own, seconds)
        for finding in quick(world):
            log.warning(finding.line)
        engine = Engine(wrap(world.transport(transport)), alarm, seconds, world.membership)
        survival = None
        if world.membership is not None:
            survival = Survival(world, world.membership, engine, reference)
            if returns:
                world = survival.find()
                alarm = world.alarm()
        try:
            run = Run(
                model=model,
                optimizer=optimizer,
                plan=plan,
                group=group,
                world=world,
                engine=engine,
                alarm=alarm,
                ending=ending,
                survival=survival,
                course=Course(feed),
                state=state,
                records=_records(records),
            )
            run.start(None if resume is None else Path(resume), returns=returns)
        except BaseException:
            engine.close()
            raise
    atexit.register(run.close)  # others may still be reading what this rank sent last
    return run


def _records(given: str | Path | None) -> Path | None:
    named = given or os.environ.get(RECORDS_VARIABLE)
    return Path(named) if named else None


def _may_change(world: World, model: nn.Module, transport: str) -> bool:
    """Whether members may leave and come: not where torch's own connections are needed, which
    don't come back."""
    of_torch = transport == "c10d" or isinstance(model, nn.parallel.DistributedDataParallel)
    return world.size > 1 and not of_torch


def _refuse_auto_for_ddp(plan: Plan, model: nn.Module) -> None:
    if is_auto(plan) and isinstance(model, nn.parallel.DistributedDataParallel):
        raise PlanError(
            f"a DDP object keeps its plan, and {plan} changes it",
            "attach the model without DDP round it, or name a plan",
        )


def _refuse_a_stranger(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"{type(optimizer).__name__} is not a torch optimizer", "give attach() one"
        )
    ours = {id(parameter) for parameter in model.parameters()}
    if not all(id(p) in ours for group in optimizer.param_groups for p in group["params"]):
        raise UsageError(
            "the optimizer has parameters that are not the model's, which nobody would average",
            "make it from model.parameters(), after the model is complete, or put the others into "
            "the model",
        )


def _digest(cluster: Cluster) -> str:
    return blake2b(format_cluster(cluster).encode(), digest_size=4).hexdigest()


def _feed(
    plan: Plan,
    group: Group,
    world: World,
    data: Dataset[Any] | None,
    batch: int | None,
    seed: int,
    loader: Mapping[str, Any],
) -> Feed | None:
    if (data is None) != (batch is None):
        raise UsageError("data= and batch= go together", "give attach() both or neither")
    if data is None or batch is None:
        return None
    length = getattr(data, "__len__", None)
    if length is None:
        raise UsageError("the data has no length", "use a map-style dataset, or your own loader")
    batches = Batches(
        samples=length(),
        batch=batch,
        size=world.size,
        seed=seed,
        allocation=allocation_of(plan, group) if is_relayed(plan) else None,
    )
    return Feed(data=data, batches=batches, loader=loader, rank=world.rank)
