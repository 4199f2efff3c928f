"""What `advise` and `simulate` both ask for: where a job would run, what it is, what its machines
cost, and what if it were otherwise."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from thalweg.cli.model import workload_of
from thalweg.cli.place import cluster_at
from thalweg.declarations import listed
from thalweg.errors import UsageError
from thalweg.facts import (
    MODELS,
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
from thalweg.predict.assumptions import (
    GPUS,
    NETWORKS,
    STEPS,
    assumed_machine,
    costs_of,
    network_named,
)

NO_COMPUTING = "computing takes no time: nobody said what it takes"
MESSAGES = "messages cost nothing but their way"
CODECS = "codecs as on one core of an AMD EPYC"
GPU, BATCH = "v100", 32

ModelOption = Annotated[
    str, typer.Option("--model", metavar="NAME", help="A model, a job or a workload file (TOML).")
]
NetworkOption = Annotated[
    str | None,
    typer.Option(
        "--network",
        metavar="NAME",
        help=f"With --workers: {', '.join(NETWORKS)}, as others measured them.",
    ),
]
GpuOption = Annotated[
    str | None,
    typer.Option(
        "--gpu", metavar="NAME", help=f"That computes: {', '.join(GPUS)}; {GPU} if absent."
    ),
]
BatchOption = Annotated[
    int | None,
    typer.Option(
        "--batch", metavar="N", min=1, help=f"Samples a step on each worker; {BATCH} if absent."
    ),
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


def place_at(
    network: str | None,
    *,
    workers: int | None,
    cluster: Path | None,
    lab: str | None,
    nic: str | None,
    uplink: str | None,
    rank_order: str | None,
    latency: str | None,
) -> Cluster:
    """As other commands have it; or so many workers on a network that others measured."""
    if network is None:
        return cluster_at(
            workers=workers,
            cluster=cluster,
            lab=lab,
            nic=nic,
            uplink=uplink,
            rank_order=rank_order,
            latency=latency,
        )
    if workers is None or any(x is not None for x in (cluster, lab, nic, uplink, latency)):
        raise UsageError(
            "--network says what links so many workers have", "give it with --workers N alone"
        )
    found = network_named(network)
    made = Cluster.regular(
        [workers], nic=Rate(found.bytes_per_second * 8), latency=Duration(found.alpha)
    )
    return replace(made, assumed=(f"{network}: {NETWORKS[network].source}",))


def situation_of(
    *,
    place: Cluster,
    cluster_file: Path | None,
    model: str,
    gpu: str | None,
    batch: int | None,
    machine: Path | None,
    what_if: WhatIf,
    measured_only: bool,
) -> Situation:
    known = _machine(cluster_file, machine)
    workload, assumed = _workload(model, gpu, batch)
    known = replace(known, assumed=(*known.assumed, *assumed))
    cluster = what_if.cluster(place)
    if measured_only and (cluster.assumed or known.assumed):
        raise UsageError(
            f"not measured: {'; '.join((*cluster.assumed, *known.assumed))}",
            "measure with `thalweg calibrate`, or leave out --measured-only",
        )
    return Situation(cluster=cluster, workload=what_if.workload(workload), machine=known)


def _workload(model: str, gpu: str | None, batch: int | None) -> tuple[Workload, list[str]]:
    """With what a step computes, and what of that is assumed."""
    workload = workload_of(model)
    if model in MODELS:
        device, samples = (gpu or GPU).lower(), batch or BATCH
        costs = costs_of(model, device, samples)
        computing = f"computing of {samples} samples on {device.upper()}: {STEPS[model].source}"
        return replace(workload, costs=costs), [computing]
    if gpu is not None or batch is not None:
        raise UsageError(
            f"{model} says itself what computing takes, or nobody knows",
            "leave out --gpu and --batch",
        )
    costs = workload.costs
    known = costs.forward.seconds + costs.backward.seconds + costs.optimizer.seconds
    return workload, [] if known else [NO_COMPUTING]


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
    """As measured; compressors that nobody measured cost what is assumed."""
    beside = None if cluster_file is None else machine_path(cluster_file)
    path = machine or (beside if beside is not None and beside.exists() else None)
    if path is None:
        return replace(assumed_machine(), assumed=(MESSAGES, CODECS))
    measured = read_machine(path)
    names = {text.partition("(")[0] for text in measured.codecs}
    others = {
        text: cost
        for text, cost in assumed_machine().codecs.items()
        if text.partition("(")[0] not in names
    }
    if not others:
        return measured
    said = f"{listed(dict.fromkeys(text.partition('(')[0] for text in others))}: {CODECS}"
    return replace(
        measured, codecs={**measured.codecs, **others}, assumed=(*measured.assumed, said)
    )
