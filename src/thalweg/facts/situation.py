"""The input of every prediction: a workload on a cluster, whose machines have their costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from thalweg.facts.cluster import Cluster
from thalweg.facts.cluster_file import format_cluster, parse_cluster
from thalweg.facts.machine import Machine
from thalweg.facts.machine_file import format_machine, parse_machine
from thalweg.facts.workload import Workload
from thalweg.facts.workload_file import format_workload, parse_workload

FREE_MACHINE = Machine(assumed=("per-message overhead: 0 (not measured)",))


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """A workload on a cluster, and the costs of its machines: those of messages, bytes and codecs
    are 0 by default. `declared` is the cluster that the run lays its schedules out for, if that
    isn't the measured one."""

    cluster: Cluster
    workload: Workload
    machine: Machine = FREE_MACHINE
    declared: Cluster | None = None

    @property
    def laid_out_for(self) -> Cluster:
        """The cluster that the run lays its schedules out for."""
        return self.declared or self.cluster

    @property
    def assumed(self) -> tuple[str, ...]:
        """The assumptions that stand in for measurements of the cluster and of its machines."""
        return (*self.cluster.assumed, *self.machine.assumed)


def format_situation(situation: Situation, remarks: Sequence[str] = ()) -> dict[str, str]:
    """The texts of the situation's files by field, the cluster's with remarks at its head."""
    texts = {
        "cluster": format_cluster(situation.cluster, remarks),
        "machine": format_machine(situation.machine),
        "workload": format_workload(situation.workload),
    }
    declared = situation.declared
    return texts if declared is None else {**texts, "declared": format_cluster(declared)}


def parse_situation(texts: Mapping[str, str]) -> Situation:
    """The situation from the texts of its files by field."""
    return Situation(
        cluster=parse_cluster(texts["cluster"]),
        machine=parse_machine(texts["machine"]),
        workload=parse_workload(texts["workload"]),
        declared=parse_cluster(texts["declared"]) if "declared" in texts else None,
    )
