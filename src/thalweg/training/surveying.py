"""What advice is given on, measured by all ranks of a run between two of its steps: the links and
what they cost to use, the compressors, and what a step of this model computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import nn

from thalweg.catalog import default_catalog
from thalweg.declarations import Promise
from thalweg.facts import Cluster, CodecCost, Machine, Tensor, Workload
from thalweg.plan import Choice
from thalweg.predict.candidates import candidates
from thalweg.probing.calibration import calibrate
from thalweg.schedules import Group
from thalweg.training.averager import Setting, trainable


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    cluster: Cluster
    machine: Machine
    workload: Workload


class Surveyor:
    """One run's. Compressors are timed once, and only if they are allowed."""

    def __init__(
        self, model: nn.Module, setting: Setting, allow: Promise, transport: str | None
    ) -> None:
        self._setting = setting
        self._transport = transport or "zeromq"
        self._tensors = tuple(
            Tensor(name=name, shape=tuple(p.shape), dtype=str(p.dtype).removeprefix("torch."))
            for name, p in trainable(model).items()
        )
        self._codecs = compressors(setting.group, allow)
        self._costs: Mapping[str, CodecCost] = {}
        self._surveys = 0

    def survey(self) -> Findings:
        """The same on all ranks, at a safe point of all."""
        setting = self._setting
        found = calibrate(
            setting.world,
            setting.alarm,
            setting.engine,
            setting.group.cluster,
            tensors=self._tensors,
            codecs=() if self._surveys else self._codecs,
            native=True,
            name=f"calibration/{self._surveys}",
            transport=self._transport,
            step=setting.clock.step,
            claim=setting.clock.claim_between,
        )
        self._surveys += 1
        self._costs = {**self._costs, **found.machine.codecs}
        return Findings(
            cluster=found.cluster,
            machine=replace(found.machine, codecs=self._costs),
            workload=Workload(name="this model", tensors=self._tensors),
        )


def compressors(group: Group, allow: Promise) -> list[Choice]:
    """Those that the advisor will ask about."""
    plans = candidates(group, allow, default_catalog()).plans
    return list(dict.fromkeys(plan.precision for plan in plans if plan.precision is not None))
