"""What `advise` and `simulate` both ask for: where a job would run, what it is, what its machines
cost, and what if it were otherwise."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from thalweg.cli.model import workload_of
from thalweg.errors import UsageError
from thalweg.facts import (
    Cluster,
    Duration,
    Lateness,
    Machine,
    Rate,
    Workload,
    about,
    machine_path,
    read_machine,
)
from thalweg.predict import WhatIf

NOTHING_MEASURED = Machine(assumed=("messages and codecs cost nothing",))
NO_COMPUTING = "computing takes no time: give a workload file with [costs]"

ModelOption = Annotated[
    str, typer.Option("--model", metavar="NAME", help="A model, a job or a workload file (TOML).")
]
MachineOption = Annotated[
    Path | None,
    typer.Option(
        "--machine",
        metavar="FILE",
        help="What messages and codecs cost (TOML); the one beside the cluster file if absent.",
    ),
]
MeasuredOption = Annotated[
    bool, typer.Option("--measured-only", help="Refuse if anything would have to be assumed.")
]
BandwidthOption = Annotated[
    str | None,
    typer.Option(
        "--bandwidth",
        metavar="RATE",
        help="What if the slowest NIC had this rate, and all other links changed as much.",
    ),
]
MembersOption = Annotated[
    int | None, typer.Option("--members", metavar="N", help="What if there were so many workers.")
]
FasterOption = Annotated[
    float, typer.Option("--faster", metavar="X", help="What if computing were X times as fast.")
]
LateOption = Annotated[
    float | None,
    typer.Option("--late", metavar="P", help="What if every host were late at a step with P ..."),
]
DelayOption = Annotated[
    str | None, typer.Option("--delay", metavar="DURATION", help="... by so much.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """A job on a cluster."""

    cluster: Cluster
    workload: Workload
    machine: Machine

    @property
    def heading(self) -> str:
        racks = len(self.cluster.racks)
        spread = f" in {racks} racks" if racks > 1 else ""
        return (
            f"{self.workload.name}: {about(self.workload.nbytes, 'B')} of gradients, "
            f"{self.cluster.workers} workers{spread}"
        )


def situation_of(
    *,
    place: Cluster,
    cluster_file: Path | None,
    model: str,
    machine: Path | None,
    what_if: WhatIf,
    measured_only: bool,
) -> Situation:
    known = _machine(cluster_file, machine)
    workload = workload_of(model)
    costs = workload.costs
    if not costs.forward.seconds + costs.backward.seconds + costs.optimizer.seconds:
        known = _assuming(known, NO_COMPUTING)
    cluster = what_if.cluster(place)
    if measured_only and (cluster.assumed or known.assumed):
        raise UsageError(
            f"not measured: {'; '.join((*cluster.assumed, *known.assumed))}",
            "measure with `thalweg probe`, or leave out --measured-only",
        )
    return Situation(cluster=cluster, workload=what_if.workload(workload), machine=known)


def what_if_of(
    bandwidth: str | None,
    members: int | None,
    faster: float,
    late: float | None,
    delay: str | None,
) -> WhatIf:
    if (late is None) != (delay is None):
        raise UsageError(
            "--late says how often and --delay by how much", "give both: --late 0.05 --delay 2s"
        )
    lateness = None
    if late is not None and delay is not None:
        if not 0 <= late <= 1:
            raise UsageError(f"a host can't be late with probability {late:g}", "give 0 to 1")
        lateness = Lateness(probability=late, delay=Duration.parse(delay))
    if members is not None and members < 1:
        raise UsageError(f"{members} workers train nothing", "give --members 1 or more")
    return WhatIf(
        bandwidth=None if bandwidth is None else Rate.parse(bandwidth),
        workers=members,
        compute=faster,
        late=lateness,
    )


def asked(what_if: WhatIf) -> dict[str, object]:
    """For the settings in JSON: what was supposed, and nothing that wasn't."""
    found: dict[str, object] = {}
    if what_if.bandwidth is not None:
        found["bandwidth"] = str(what_if.bandwidth)
    if what_if.workers is not None:
        found["members"] = what_if.workers
    if what_if.compute != 1:
        found["faster"] = what_if.compute
    if what_if.late is not None:
        found |= {"late": what_if.late.probability, "delay": str(what_if.late.delay)}
    return found


def _machine(cluster_file: Path | None, machine: Path | None) -> Machine:
    if machine is not None:
        return read_machine(machine)
    beside = None if cluster_file is None else machine_path(cluster_file)
    return read_machine(beside) if beside is not None and beside.exists() else NOTHING_MEASURED


def _assuming(machine: Machine, what: str) -> Machine:
    return replace(machine, assumed=(*machine.assumed, what))
