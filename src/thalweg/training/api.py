"""`attach()` turns an ordinary training script into a distributed one."""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import replace
from hashlib import blake2b
from numbers import Integral, Real
from pathlib import Path
from textwrap import shorten
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.data import Dataset, IterableDataset

from thalweg.catalog import default_catalog, parse_plan
from thalweg.doctor.local_checks import preflight, publish
from thalweg.engine.engine import Engine
from thalweg.errors import PlanError, UsageError
from thalweg.facts import Cluster, Duration, counted, format_cluster
from thalweg.launch.launcher_variables import RECORDS_VARIABLE, find_cluster
from thalweg.members.membership import Membership
from thalweg.members.world import World
from thalweg.plan import Plan
from thalweg.probing.coordinator import host_description
from thalweg.redundancy import allocation_of, is_relayed
from thalweg.schedules import Group
from thalweg.steps import refuse_what_cannot_run, without_groups
from thalweg.training.auto.request import is_auto, plan_at_first
from thalweg.training.consistency_check import agree, compare, description, host_names, hosts_of_all
from thalweg.training.data.loader import RankLoader
from thalweg.training.data.position import DataPosition
from thalweg.training.data.sampler import BatchSampler
from thalweg.training.events import Events, RunEvent
from thalweg.training.lifecycle import RankSession
from thalweg.training.recovery import Recovery
from thalweg.training.run import Run
from thalweg.training.shutdown import Shutdown, errors_in_one_line, show_log_lines
from thalweg.training.snapshot import Stateful
from thalweg.transports.wrapping import wrapped

SHOWN_VALUE_CHARACTERS = 60  # of an argument that is refused
OPTIMIZER_NAMESPACE = "optimizer"  # in the store: the check of one that is set after attach()
ARGUMENTS: Mapping[str, tuple[Any, str]] = {  # of attach(): the types, and their description
    "model": (nn.Module, "torch module"),
    "plan": (str | Plan | None, "plan, or text of one"),
    "sync": (str | Plan | None, "plan, or text of one"),
    "batch": (Integral | None, "whole number of samples"),
    "seed": (Integral, "whole number"),
    "state": (Sequence, "list of objects"),
    "loader": (Mapping | None, "mapping of options for a DataLoader"),
    "resume": (str | os.PathLike | None, "folder"),
    "records": (str | os.PathLike | None, "folder"),
    "cluster": (str | os.PathLike | Cluster | None, "cluster, or file of one"),
    "timeout": (str | Real, "duration"),
    "on_event": (Callable | None, "function"),
}
log = logging.getLogger("thalweg")


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    plan: str | Plan | None = None,
    data: Dataset[Any] | None = None,
    batch: int | None = None,
    state: Sequence[Stateful] = (),
    resume: str | Path | None = None,
    seed: int = 0,
    cluster: Cluster | str | Path | None = None,
    loader: Mapping[str, Any] | None = None,
    timeout: str | float = "10min",
    records: str | Path | None = None,
    nonfinite: str = "raise",
    on_event: Callable[[RunEvent], object] | None = None,
    sync: str | Plan | None = None,
) -> Run:
    """Synchronise the training of this model with all other workers.

    optimizer    one for parameters of the model. Without it nothing is synchronised until the
                 script sets `run.optimizer`, on every rank and before the first step
    plan         the plan. By default "auto(allow=exact)": the fastest exact plan here is measured
                 and chosen while training; "auto(allow=lossy)" considers more. For a
                 DistributedDataParallel object, which can't change its plan, the default is "ddp"
    data, batch  the samples, and the size of the global batch, over all workers; `run.batches`
                 then yields this worker's slice. Without them, use your own loader.
    state        objects with `state_dict` and `load_state_dict` that go into checkpoints
    resume       a folder that `run.save` wrote into; the run resumes from its newest checkpoint,
                 and starts from the beginning if there is none
    seed         the seed of the order of samples
    cluster      a description of the network (a `Cluster` or its file); by default the file that
                 THALWEG_CLUSTER names, or else all hosts are taken as equal
    loader       options for torch's DataLoader, such as num_workers
    timeout      the longest time to wait for another rank; a number is in seconds
    records      a folder to record every step in, a file for each rank, for `thalweg report`; by
                 default the one that THALWEG_RECORDS names, or else nothing is recorded
    nonfinite    the treatment of a step whose gradients have inf or nan in them: "raise" an error
                 that names parameter, rank and step, or "skip" it, as a GradScaler expects: on all
                 ranks, or on this one alone if the plan averages parameters
    on_event     called with each event of `run.events`, in the training thread: at the next safe
                 point, between two steps, or at the end of the run. Events differ between ranks, so
                 it must not call anything that all ranks take part in. An error in it is raised
                 where the script trains
    sync         another name of `plan`

    Parameters and buffers start as rank 0's. Raises Mismatch on all ranks if plan, model,
    optimizer or data differ between them.
    """
    errors_in_one_line()
    show_log_lines()
    given = locals()
    for name, (kinds, wanted) in ARGUMENTS.items():
        value = given[name]
        if not isinstance(value, kinds) or isinstance(value, bool):
            shown = shorten(repr(value), SHOWN_VALUE_CHARACTERS, placeholder=" ...")
            raise UsageError(f"{name}={shown} is no {wanted}", "see help(thalweg.attach)")
    _refuse_what_is_incomplete(model, data, state)
    seconds = Duration.parse(timeout).seconds if isinstance(timeout, str) else float(timeout)
    if not seconds > 0:
        raise UsageError(f"timeout={timeout} leaves no time", 'allow more, such as "10min"')
    world = World.join(seconds)
    abort_flag = world.abort_flag()
    shutdown = Shutdown(world, abort_flag)
    with shutdown.publishing_errors():
        requested = _requested(plan, sync, model)
        places: dict[str, str] = {}  # the ranks' hosts by store key, if there is no cluster file

        def hosts() -> list[str]:
            own = [str(host_description()[key]) for key in ("name", "machine", "stack")]
            places.update(hosts_of_all(world, abort_flag, own))
            return host_names(places.values())

        group = Group.everybody(find_cluster(cluster, world.size, os.environ, hosts))
        refuse_what_cannot_run(plan_at_first(requested), group, has_data=data is not None)
        if is_auto(requested) and isinstance(model, nn.parallel.DistributedDataParallel):
            raise PlanError(
                f"a DDP object can't change its plan, and {requested} does",
                "attach the model without DDP, or name a plan",
            )
        _refuse_what_does_not_fit(nonfinite, requested, model)
        if optimizer is not None:
            optimizer = _suiting(optimizer, nonfinite, model)
        rank_loader = _make_loader(requested, group, world, data, batch, seed, loader or {})
        averages = requested.averages_parameters or is_auto(requested)
        settings = {
            "batch": batch,
            "samples": rank_loader and rank_loader.sampler.samples,
            "seed": seed,
            "state objects": len(state),
            "resume": "given" if resume else "absent",
            "nonfinite": nonfinite,
            "racks": group.racks,
            "kept apart": str(group.contended) if averages else "",
            # schedules depend on rates and names
            "cluster": blake2b(format_cluster(group.cluster).encode(), digest_size=4).hexdigest(),
            "packages of the plan": default_catalog().packages(requested),
            "THALWEG_ENCRYPTION": world.security.mode,
            "THALWEG_SECRET": world.security.fingerprint,
        }
        own = description(str(requested), model, optimizer, settings)
        if _may_change(world, model):
            members = Membership(world.store, world.rank, world.size, seconds)
            members.triggers_rendezvous = lambda rank: False  # until all ranks have begun
            world = replace(world, membership=members)
        publish(world)
        returns = world.restarted and world.membership is not None
        if returns:
            shutdown.is_spare = True  # the others continue without this rank
        check = compare if returns else agree
        reference = check(world, abort_flag, own)
        for finding in preflight(world):
            log.warning(finding.line)
        if world.rank == 0 and world.security.encrypted and not _is_protected(requested):
            log.warning(
                "%s sends over torch's own connections: unlike the other connections of this run "
                "they are neither authenticated nor encrypted",
                requested,
            )
        first_world, first_abort_flag = world, abort_flag
        checkpoint = None if resume is None else Path(resume)
        engine = Engine(wrapped(world.transport()), abort_flag, seconds, world.membership)
        try:
            events = Events(on_event)
            session = RankSession(
                world,
                model=model,
                optimizer=optimizer,
                plan=plan_at_first(requested),
                group=group,
                engine=engine,
                shutdown=shutdown,
                data_position=DataPosition(rank_loader),
                state=state,
                notify=events.add,
            )
            recovery = Recovery(session, {**reference, **places})
            session.world = recovery.find_world()
            shutdown.abort_flag = session.world.abort_flag()
            named = records or os.environ.get(RECORDS_VARIABLE)
            folder = Path(named) if named else None

            def begin(given: Any) -> None:
                """Begin with an optimizer that the script has made after `attach()`."""
                with shutdown.publishing_errors():
                    suiting = _suiting(given, nonfinite, model)
                    place = first_world.namespace(OPTIMIZER_NAMESPACE)
                    own = description(str(requested), model, suiting, settings)
                    agreed = check(place, first_abort_flag, own)
                    recovery.publish(
                        {f"{OPTIMIZER_NAMESPACE}/{key}": text for key, text in agreed.items()}
                    )
                    session.optimizer = suiting
                    run._start(checkpoint, returns=returns)

            run = Run(
                session, recovery, requested, folder, events, begin, skips=nonfinite == "skip"
            )
            if optimizer is not None:
                run._start(checkpoint, returns=returns)
        except BaseException:
            engine.close()
            raise
    if world.rank == 0:
        log.info("%s", _start_line(requested, group, world, named=plan or sync))
        if remark := without_groups(plan_at_first(requested), group):
            log.warning("%s", remark)
    atexit.register(run._close_at_exit)  # others may still be reading this rank's last messages
    return run


def _requested(plan: str | Plan | None, sync: str | Plan | None, model: nn.Module) -> Plan:
    """The plan that the script names, or the default for this model."""
    if plan is not None and sync is not None:
        raise UsageError("plan= and sync= are two names of one argument", "give plan= alone")
    named = plan if plan is not None else sync
    if named is None:
        named = "ddp" if isinstance(model, nn.parallel.DistributedDataParallel) else "auto"
    return named if isinstance(named, Plan) else parse_plan(named)


def _start_line(plan: Plan, group: Group, world: World, named: str | Plan | None) -> str:
    """The line that is logged at the start: plan, workers, transport, and what happens if one
    dies."""
    if group.size == 1:
        return f"plan {plan}: one worker, nothing to synchronise"
    hosts = {group.cluster.host(rank).name for rank in group.ranks}
    if not _is_protected(plan):
        carried = "torch's own connections, neither authenticated nor encrypted"
    elif world.security.encrypted:
        joins = "authenticated and" if world.security.secret else "not authenticated, but"
        carried = f"TCP, {joins} encrypted"
    else:
        carried = "TCP, not encrypted"
    dead = "the run ends"
    if world.membership is not None:
        promised = default_catalog().guarantee(plan).dead
        dead = "it depends on the chosen plan" if is_auto(plan) else promised
    text = (
        str(plan)
        if named
        else f"{plan} ({'' if is_auto(plan) else 'DDP object, and '}no plan is named)"
    )
    return (
        f"plan {text}: {counted(group.size, 'worker')} on {counted(len(hosts), 'host')}, over "
        f"{carried}; if a worker dies: {dead}"
    )


def _may_change(world: World, model: nn.Module) -> bool:
    """True if members may leave and join. Torch's own connections don't recover, so not under
    DDP."""
    return world.size > 1 and not isinstance(model, nn.parallel.DistributedDataParallel)


def _is_protected(plan: Plan) -> bool:
    return default_catalog().guarantee(plan_at_first(plan)).protected


def _of_torch(optimizer: Any) -> torch.optim.Optimizer:
    """The torch optimizer: the given one, or the one inside it if it has no step hooks of its own,
    as with trainers' wrappers, which may forward what they lack."""
    wrapped = optimizer
    while not _has_step_hooks(wrapped) and hasattr(wrapped, "optimizer"):
        wrapped = wrapped.optimizer
    if not _has_step_hooks(wrapped):
        raise UsageError(
            f"{type(optimizer).__name__} is not a torch optimizer, and wraps none as .optimizer",
            "give the torch optimizer",
        )
    assert isinstance(wrapped, torch.optim.Optimizer)
    return wrapped


def _has_step_hooks(optimizer: Any) -> bool:
    return isinstance(optimizer, torch.optim.Optimizer) and hasattr(
        optimizer, "_optimizer_step_pre_hooks"
    )


def _suiting(given: Any, nonfinite: str, model: nn.Module) -> torch.optim.Optimizer:
    """The torch optimizer in the given one, which must suit the model."""
    optimizer = _of_torch(given)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not held <= {id(parameter) for parameter in model.parameters()}:
        raise UsageError(
            "the optimizer has parameters that are not the model's, so no rank would average them",
            "make it from model.parameters(), after the model is complete, or put the others into "
            "the model",
        )
    others = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in held]
    if nonfinite == "skip" and others:
        raise UsageError(
            f'nonfinite="skip" can\'t keep another optimizer from stepping {others[0]}',
            "give attach() one optimizer for all trained parameters, or leave nonfinite out",
        )
    return optimizer


def _refuse_what_is_incomplete(
    model: nn.Module, data: Dataset[Any] | None, state: Sequence[Stateful]
) -> None:
    """Raise UsageError for data, state objects or a model that can't be used as they are."""
    is_map = all(hasattr(data, method) for method in ("__getitem__", "__len__"))
    holds_columns = isinstance(data, str | bytes | Mapping | tuple)
    if data is not None and (not is_map or holds_columns or isinstance(data, IterableDataset)):
        raise UsageError(
            f"data= is {type(data).__name__}, and samples are loaded by their index",
            "give the dataset itself, which has a length, such as TensorDataset(x, y); or leave "
            "out data= and batch=, and use your own loader",
        )
    for part in state:
        if not all(callable(getattr(part, m, None)) for m in ("state_dict", "load_state_dict")):
            raise UsageError(
                f"state= has {type(part).__name__}, which has no state_dict and load_state_dict",
                "give schedulers, scalers and other objects that have both",
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise UsageError(
                f"{name} has no shape yet, as its layer is lazy",
                "run the model once, with the same input on all ranks, before attach()",
            )
        if tensor.is_meta:
            raise UsageError(
                f"{name} has no values, as it is on the meta device",
                "call model.to_empty(device=...) and initialise it before attach()",
            )


def _refuse_what_does_not_fit(nonfinite: str, plan: Plan, model: nn.Module) -> None:
    if nonfinite not in ("raise", "skip"):
        raise UsageError(f"nonfinite={nonfinite!r} is unknown", 'use "raise" or "skip"')
    is_ddp = isinstance(model, nn.parallel.DistributedDataParallel)
    if nonfinite == "skip" and is_ddp and plan.precision is not None:
        raise PlanError(
            f"under a DDP object {plan} can't make the other ranks skip a step",
            "attach the model without DDP",
        )


def _make_loader(
    plan: Plan,
    group: Group,
    world: World,
    data: Dataset[Any] | None,
    batch: int | None,
    seed: int,
    loader: Mapping[str, Any],
) -> RankLoader | None:
    if (data is None) != (batch is None):
        raise UsageError("data= and batch= go together", "give attach() both or neither")
    if data is None or batch is None:
        return None
    sampler = BatchSampler(
        samples=len(cast(Sized, data)),
        batch=batch,
        size=world.size,
        seed=seed,
        allocation=allocation_of(plan, group) if is_relayed(plan) else None,
    )
    return RankLoader(data=data, sampler=sampler, loader=loader, rank=world.rank)
