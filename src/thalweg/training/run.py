"""A training run under a plan: what `attach()` returns."""

from __future__ import annotations

import atexit
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import tee
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from thalweg.catalog import parse_plan
from thalweg.errors import PlanError, RunError, ThalwegError, UsageError
from thalweg.plan import Plan, What
from thalweg.runtime import Agreement, Alarm, Arrivals, Engine, World
from thalweg.schedules import Group
from thalweg.training.averager import (
    Averager,
    averager_for,
    refuse_what_cannot_run,
    trainable,
)
from thalweg.training.batches import Batches, Share, coding_of
from thalweg.training.ending import Ending
from thalweg.training.hook import Hook
from thalweg.training.itinerary import Clock
from thalweg.training.resume import Position, load, save
from thalweg.training.sharing import Sharing
from thalweg.training.slots import slots_of_all

NOW_AND_THEN = 8  # steps between two looks at which parameters are trained


class Stateful(Protocol):
    """A scheduler, a scaler, or anything else that has to travel with the training."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


class Run:
    """Made by `attach()`."""

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        plan: Plan,
        group: Group,
        world: World,
        engine: Engine,
        alarm: Alarm,
        ending: Ending,
        data: Dataset[Any] | None,
        batches: Batches | None,
        loader: Mapping[str, Any],
        state: Sequence[Stateful],
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._plan = plan
        self._group = group
        self._world = world
        self._engine = engine
        self._alarm = alarm
        self._ending = ending
        self._data = data
        self._batches = batches
        self._loader = dict(loader)
        self._state = tuple(state)
        self._clock = Clock()
        self._sharing = Sharing(group, engine, self._clock)
        self._agreement = Agreement(world.store, rank=world.rank, size=world.size)
        self._averager: Averager | None = None
        self._averaged: set[int] = set()  # parameters, by identity
        self._share: Share | None = None  # of the batch that is being computed
        self._reached = Position()  # what the samples taken so far lead to
        self._position = Position()  # what the last step of the optimizer has used
        self._stopping = False
        self._passed_safe_point = False
        self._closed = False
        self._in_consensus = False
        self._steps_in_epoch = 0
        self._hooks: list[Any] = []
        self._meetings = 0  # at the store: saves and transitions

    # What the script reads

    @property
    def rank(self) -> int:
        return self._world.rank

    @property
    def size(self) -> int:
        """How many workers there are."""
        return self._world.size

    @property
    def step(self) -> int:
        """How many steps the optimizer has taken."""
        return self._clock.step

    @property
    def sync(self) -> str:
        """The plan that is run now."""
        return str(self._plan)

    @property
    def stopping(self) -> bool:
        """Whether all ranks have agreed to stop here."""
        return self._stopping

    @property
    def arrivals(self) -> Arrivals:
        """When this rank and its peers arrived at each bucket of the last steps."""
        return self._engine.arrivals

    # Data

    def epochs(self, number: int) -> Iterator[int]:
        """0, 1, ..., number - 1; a resumed run begins with the epoch it had reached."""
        while self._reached.epoch < number and not self._stopping:
            epoch = self._reached.epoch
            self._steps_in_epoch = 0
            yield epoch
            self._share = None
            left_early = self._reached.epoch == epoch  # its batches weren't asked for, or not all
            if left_early and not self._stopping:
                self._reached = self._position = Position(epoch=epoch + 1)

    def batches(self, epoch: int) -> Iterator[Any]:
        """This rank's share of each batch; between two of them is the safe point, where plans
        change and runs stop."""
        if self._batches is None or self._data is None:
            raise UsageError("run.batches needs the data", "give data= and batch= to attach()")
        first = self._reached.batch if epoch == self._reached.epoch else 0
        cut: Batches | None = None
        loaded: Iterator[tuple[Share, Any]] = iter(())
        for number in range(first, len(self._batches)):
            self.safe_point()
            if self._stopping:
                break
            if cut is not self._batches:  # another plan may have other shares
                cut, loaded = self._batches, self._load(self._batches, epoch, number)
            self._share, batch = next(loaded)
            self._reached = Position(epoch=epoch, batch=number + 1)
            yield batch
        else:
            self._reached = self._position = Position(epoch=epoch + 1)
        self._share = None

    def _load(self, batches: Batches, epoch: int, first: int) -> Iterator[tuple[Share, Any]]:
        assert self._data is not None
        shares, ahead = tee(batches.shares(epoch, self.rank, first))
        try:
            loader: DataLoader[Any] = DataLoader(
                self._data,
                batch_sampler=(share.samples for share in ahead),
                generator=batches.generator(epoch, first, self.rank),  # not the script's
                **self._loader,
            )
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"loader= doesn't suit a DataLoader: {error}", "leave it out"
            ) from None
        return zip(shares, loader, strict=True)

    def mean(self, losses: torch.Tensor) -> torch.Tensor:
        """The loss to call backward on, from one loss a sample: such that what the plan aggregates
        is the mean over the whole batch of all ranks, whatever this rank's share of it is."""
        if self._share is None:
            return losses.mean()
        if losses.shape != self._share.weights.shape:
            raise UsageError(
                f"run.mean got {list(losses.shape)} losses for {len(self._share.weights)} samples",
                'give it one loss a sample (reduction="none")',
            )
        exact = losses.to(torch.promote_types(losses.dtype, torch.float32))
        return torch.dot(exact, self._share.weights.to(exact))

    # Synchronising

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """For gradient accumulation: backward adds up here, and averages with the next backward
        outside."""
        with self._attached.no_sync():
            yield

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Inside, all replicas are equal: parameters (under plans that let them differ) and
        statistics such as batch norm's are the mean over all ranks. Afterwards the parameters are
        this rank's own again."""
        self._attached.settle()
        parameters = trainable(self._model).values() if self._replicas_differ else ()
        own = [parameter.detach().clone() for parameter in parameters]
        self._in_consensus = True
        try:
            self._sharing.average(parameter.detach() for parameter in parameters)
            self._sharing.average_what_differs(_statistics(self._model))
            yield
        finally:
            self._in_consensus = False
            with torch.no_grad():
                for parameter, values in zip(parameters, own, strict=True):
                    parameter.copy_(values)

    @property
    def _replicas_differ(self) -> bool:
        return self._plan.what is What.PARAMETERS

    def switch(self, sync: str) -> None:
        """Propose another plan, on any rank: all ranks take it up at the same safe point."""
        plan = parse_plan(sync)
        refuse_what_cannot_run(plan, self._group, has_data=self._data is not None)
        if isinstance(self._model, nn.parallel.DistributedDataParallel):
            raise PlanError("a DDP object keeps its plan", "attach the model without DDP round it")
        if plan.settings.transport != self._plan.settings.transport:
            raise PlanError(
                f"{plan} has another transport than {self._plan}",
                "keep it, or start with the other",
            )
        self._agreement.propose("sync", sync)

    def stop(self) -> None:
        """Propose to stop, on any rank: `run.batches` and `run.epochs` end at the same step on
        all."""
        self._agreement.propose("stop", True)

    def safe_point(self) -> None:
        """Take up what was agreed for this step. `run.batches` does so; with one's own loader the
        model's forward does."""
        if self._passed_safe_point:
            return
        self._passed_safe_point = True
        self._refuse_new_parameters()
        for change in self._agreement.settle(self.step):
            if change.name == "stop":
                self._stopping = True
            elif change.name == "sync":
                self._take_up(parse_plan(str(change.value)))

    # Checkpoints

    def save(self, directory: str | Path, *, keep: int = 2) -> None:
        """Write a checkpoint, which `attach(resume=directory)` goes on from; to be called on every
        rank. The newest `keep` are kept."""
        self._meetings += 1
        with self.consensus():
            save(
                Path(directory),
                world=self._world,
                alarm=self._alarm,
                timeout=self._engine.timeout,
                number=self._meetings,
                step=self.step,
                plan=str(self._plan),
                position=self._next_position(),
                sampling=self._sampling(),
                model=_inner(self._model),
                optimizer=self._optimizer,
                state=self._state,
                keep=keep,
            )

    def close(self) -> None:
        """End this rank's part. Waits a moment for the others: what one has sent last, another
        may still have to read."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        for hook in self._hooks:
            hook.remove()
        if self._averager is not None and not self._ending.failed:
            with suppress(ThalwegError):  # who has failed says so elsewhere
                self._averager.detach()
        self._ending.leave(self.step)
        self._engine.close()

    # What attach() does

    def start(self, resume: Path | None) -> None:
        """Begin from a checkpoint if there is one, else from rank 0's model."""
        loaded = None
        if resume is not None:
            loaded = load(
                resume,
                world=self._world,
                alarm=self._alarm,
                timeout=self._engine.timeout,
                sharing=self._sharing,
                sampling=self._sampling(),
                model=_inner(self._model),
                optimizer=self._optimizer,
                state=self._state,
            )
        if loaded is None:
            self._sharing.take_from(0, _tensors(self._model))
        else:
            self._clock.step = loaded.step
            self._reached = self._position = loaded.position
        self._averager = averager_for(
            self._model, self._plan, self._group, self._engine, self._clock, self._world
        )
        self._averaged = {id(parameter) for parameter in trainable(self._model).values()}
        self._hooks = [
            self._optimizer.register_step_post_hook(Hook(lambda *_: self._stepped())),
            self._model.register_forward_pre_hook(Hook(lambda *_: self._forward())),
        ]

    @property
    def _attached(self) -> Averager:
        if self._averager is None or self._closed:
            raise RunError("the run is closed", "attach the model again")
        return self._averager

    def _stepped(self) -> None:
        self._attached.after_step()
        self._clock.tick()
        self._steps_in_epoch += 1
        self._position = self._reached
        self._passed_safe_point = False

    def _forward(self) -> None:
        """With one's own loader this is the safe point, if it is a step that begins."""
        steps = self._model.training and torch.is_grad_enabled() and not self._in_consensus
        if steps and self._batches is None:
            self.safe_point()

    def _refuse_new_parameters(self) -> None:
        """Looked at now and then: nobody would average them, and replicas would differ."""
        if self.step % NOW_AND_THEN:
            return
        for name, parameter in trainable(self._model).items():
            if id(parameter) not in self._averaged:
                raise RunError(
                    f"parameter {name} was added or unfrozen after attach(), and isn't averaged",
                    "attach the model when it is complete",
                )

    def _sampling(self) -> dict[str, int]:
        """What the place in the data depends on."""
        if self._batches is None:
            return {}
        cut = self._batches
        return {"samples": cut.samples, "batch size": cut.batch, "seed": cut.seed}

    def _next_position(self) -> Position:
        """Where a resumed run begins. The place in one's own loader isn't known: an epoch in which
        steps were taken counts as done."""
        if self._batches is None and self._steps_in_epoch:
            return Position(epoch=self._position.epoch + 1)
        return self._position

    def _take_up(self, plan: Plan) -> None:
        """Leaving a plan under which replicas differ makes them equal once more."""
        self._attached.detach()
        if self._replicas_differ and plan.what is not What.PARAMETERS:
            self._meetings += 1
            slots = slots_of_all(
                self._optimizer, self._world, self._alarm, self._meetings, self._engine.timeout
            )
            self._sharing.average(p.detach() for p in trainable(self._model).values())
            self._sharing.average_what_differs([*_statistics(self._model), *slots])
        self._plan = plan
        if self._batches is not None:
            coding = coding_of(plan, self._group, self.rank)
            if coding != self._batches.coding:
                self._batches = replace(self._batches, coding=coding)
        self._averager = averager_for(
            self._model, plan, self._group, self._engine, self._clock, self._world
        )


def _tensors(model: nn.Module) -> list[torch.Tensor]:
    return [*(p.detach() for p in model.parameters()), *model.buffers()]


def _statistics(model: nn.Module) -> list[torch.Tensor]:
    return [buffer for buffer in model.buffers() if buffer.is_floating_point()]


def _inner(model: nn.Module) -> nn.Module:
    """Without DDP round it: checkpoints don't know it."""
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    assert isinstance(inner, nn.Module)
    return inner
