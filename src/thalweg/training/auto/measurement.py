"""What advice is given on, measured by all ranks of a run between two of its steps: the links and
what they cost to use, the compressors, and what a step of this model computes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from thalweg.catalog import default_catalog
from thalweg.declarations import Promise
from thalweg.engine.collectives import Collectives
from thalweg.facts import Cluster, CodecCost, Costs, Machine, StragglerDelay, Workload
from thalweg.launch.rank_assignment import ONE_RACK_ASSUMPTION
from thalweg.plan import Choice, Plan
from thalweg.predict.candidates import candidates
from thalweg.probing.calibration import calibrate
from thalweg.redundancy import waits_for_nobody
from thalweg.schedules import Group
from thalweg.training.auto.profile import Profile, ProfileResult, merged
from thalweg.training.factory import PlanContext

RUN_WORKLOAD_NAME = "this model"
NO_COMPUTE_ASSUMPTION = "computing takes no time"
log = logging.getLogger("thalweg")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSituation:
    """`native`: whether the backend was tried, and so can be relied on."""

    cluster: Cluster
    machine: Machine
    workload: Workload
    native: bool = True


class RunCalibrator:
    """One run's. Compressors are timed once, and only if they are allowed."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        setting: PlanContext,
        allow: Promise,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._setting = setting
        self._codecs = compressors(setting.group, allow)
        self._costs: Mapping[str, CodecCost] = {}
        self._profile: Profile | None = None
        self._profiled: ProfileResult | None = None
        self._surveys = 0
        # Once Gloo hasn't connected, it isn't waited for again.
        self._native = not setting.world.security.encrypted

    def start_profile(self) -> None:
        """From this step to the next survey, what is computed."""
        self.close()
        self._profile = Profile(self._model, self._optimizer)

    def close(self) -> None:
        if self._profile is not None:
            self._profile.close()
            self._profile = None

    def calibrate(self) -> RunSituation:
        """The same on all ranks, at a safe point of all."""
        setting = self._setting
        if self._profile is not None:
            self._profiled = self._merged(self._profile)
            self.close()
        assert self._profiled is not None
        self._log_assumptions()
        number, self._surveys = self._surveys, self._surveys + 1
        found = calibrate(
            setting.world,
            setting.abort_flag,
            setting.engine,
            setting.group.cluster,
            tensors=self._profiled.workload.tensors,
            codecs=() if self._costs else self._codecs,
            native=self._native,
            name=f"calibration/{number}",
            clock=setting.clock,
        )
        self._costs = {**self._costs, **found.machine.codecs}
        self._native = any(trial.kind == "native" for trial in found.trials)
        optimizer = type(self._optimizer).__name__.lower()
        workload = replace(self._profiled.workload, trained_with=optimizer)
        assumed = found.machine.assumed
        if workload.costs == Costs():
            assumed = (*assumed, NO_COMPUTE_ASSUMPTION)
        return RunSituation(
            cluster=replace(self._profiled.placed(found.cluster), assumed=self._assumed),
            machine=replace(found.machine, codecs=self._costs, assumed=assumed),
            workload=workload,
            native=self._native,
        )

    @property
    def _assumed(self) -> tuple[str, ...]:
        """Of the cluster, where the rest is measured."""
        return (
            (ONE_RACK_ASSUMPTION,)
            if ONE_RACK_ASSUMPTION in self._setting.group.cluster.assumed
            else ()
        )

    def _log_assumptions(self) -> None:
        if self._assumed and not self._surveys and self._setting.world.rank == 0:
            log.info(
                "no cluster file: all hosts are taken for one rack; `thalweg probe` finds racks"
            )

    def _merged(self, profile: Profile) -> ProfileResult:
        setting = self._setting
        everybody = Group.everybody(setting.group.cluster)
        collectives = Collectives(everybody, setting.engine, setting.clock)
        steps = int(collectives.all_gather([len(profile)]).min())  # some may have had no gradients
        seconds = profile.seconds()
        figures = len(seconds) // max(1, len(profile))
        table = collectives.all_gather(seconds[len(seconds) - steps * figures :])
        if not steps:
            workload = Workload(name=RUN_WORKLOAD_NAME, tensors=profile.tensors)
            nobody = (StragglerDelay(),) * setting.group.size
            return ProfileResult(workload=workload, straggler_delays=nobody, spread=0.0)
        return merged(RUN_WORKLOAD_NAME, profile.tensors, table)


def profiles_compute_alone(plan: Plan) -> bool:
    """Whether a profile of its steps is of computing alone: not where a step ends with averaging,
    nor where torch sends behind our back, nor where a compressor works during backward."""
    shared = plan.averages_parameters or plan.precision is not None
    return not (shared or waits_for_nobody(plan) or default_catalog().is_native(plan))


def compressors(group: Group, allow: Promise) -> list[Choice]:
    """Those that the advisor will ask about."""
    plans = candidates(group, allow, default_catalog()).plans
    return list(dict.fromkeys(plan.precision for plan in plans if plan.precision is not None))
