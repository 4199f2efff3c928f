"""The options of `advise` and `simulate`: the job, its cluster, the costs of its machines, and what
is to be supposed about them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from thalweg.cli.options import ClusterOptions, ModelOption, option
from thalweg.declarations import listed, nearest
from thalweg.errors import UsageError, WorkloadError
from thalweg.facts import (
    FREE_MACHINE,
    MODELS,
    Cluster,
    Duration,
    Machine,
    Rate,
    Situation,
    StragglerDelay,
    Workload,
    about,
    counted,
    machine_path,
    model_named,
    read_machine,
    read_workload,
)
from thalweg.predict import suppose
from thalweg.predict.assumptions import (
    ASSUMED_STEPS,
    GPUS,
    NETWORKS,
    assumed_machine,
    costs_of,
    network_named,
)

NO_COMPUTE_NOTE = "compute time: 0 (not given)"
ASSUMED_CODECS_NOTE = "codecs as on one core of an AMD EPYC"
DEFAULT_GPU, DEFAULT_BATCH_SAMPLES = "v100", 32


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions(ClusterOptions):
    """The options that name a job, and a cluster to run it on."""

    model: ModelOption
    network: Annotated[
        str | None,
        option(f"With --workers: {', '.join(NETWORKS)}, as others measured them.", "NAME"),
    ] = None
    gpu: Annotated[
        str | None,
        option(f"Device of the workers: {', '.join(GPUS)}; {DEFAULT_GPU} if absent.", "NAME"),
    ] = None
    batch: Annotated[
        int | None,
        option(f"Samples per step on each worker; {DEFAULT_BATCH_SAMPLES} if absent.", "N", min=1),
    ] = None
    machine: Annotated[
        Path | None,
        option(
            "Costs of messages and codecs (TOML); the one beside the cluster file if absent.",
            "FILE",
        ),
    ] = None

    def place(self) -> Cluster:
        """The cluster, which may be a number of workers on a network that others measured."""
        if self.network is None:
            return self.described()
        others = (self.cluster, self.lab, self.nic, self.uplink, self.latency)
        if self.workers is None or any(others):
            raise UsageError(
                "--network describes the links of --workers", "give it with --workers N alone"
            )
        network = network_named(self.network)
        made = Cluster.regular(
            [self.workers], nic=Rate(network.bytes_per_second * 8), latency=Duration(network.alpha)
        )
        return replace(made, assumed=(f"{self.network}: {NETWORKS[self.network].source}",))


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfOptions:
    """The options that say what must be measured, and what is supposed to be different."""

    measured_only: Annotated[
        bool, option("Refuse if anything would have to be assumed.", None, "--measured-only")
    ] = False
    bandwidth: Annotated[
        str | None,
        option(
            "What if the slowest NIC had this rate, and all other links changed as much.", "RATE"
        ),
    ] = None
    members: Annotated[
        int | None,
        option("What if there were N workers.", "N", "--members", "--what-if-workers", min=1),
    ] = None
    faster: Annotated[
        float,
        option(
            "What if computing were X times as fast.", "X", "--faster", "--what-if-compute-speed"
        ),
    ] = 1.0
    late: Annotated[
        float | None,
        option("What if every host straggled at a step with probability P", "P", min=0, max=1),
    ] = None
    delay: Annotated[str | None, option("and were delayed by this duration.", "DURATION")] = None

    def changes(self) -> dict[str, Any]:
        """The arguments of `suppose`."""
        if (self.late is None) != (self.delay is None):
            raise UsageError(
                "--late says how often and --delay by how much", "give both: --late 0.05 --delay 2s"
            )
        delay = None
        if self.late is not None and self.delay is not None:
            delay = StragglerDelay(probability=self.late, delay=Duration.parse(self.delay))
        return {
            "bandwidth": None if self.bandwidth is None else Rate.parse(self.bandwidth),
            "workers": self.members,
            "compute": self.faster,
            "late": delay,
        }


def situation_of(asked: JobOptions, supposed: WhatIfOptions) -> Situation:
    changes, cluster = supposed.changes(), asked.place()
    machine = _machine(asked.cluster, asked.machine)
    workload, assumed = _workload(asked.model, asked.gpu, asked.batch)
    machine = replace(machine, assumed=(*machine.assumed, *assumed))
    situation = suppose(Situation(cluster=cluster, workload=workload, machine=machine), **changes)
    if supposed.measured_only and situation.assumed:
        raise UsageError(
            f"not measured: {'; '.join(situation.assumed)}",
            "measure with `thalweg calibrate`, or leave out --measured-only",
        )
    return situation


def job_settings(situation: Situation, supposed: WhatIfOptions) -> dict[str, object]:
    """The job in JSON, with whatever was supposed."""
    values = {
        "bandwidth": supposed.bandwidth and str(Rate.parse(supposed.bandwidth)),
        "members": supposed.members,
        "faster": None if supposed.faster == 1 else supposed.faster,
        "late": supposed.late,
        "delay": supposed.delay and str(Duration.parse(supposed.delay)),
    }
    what_if = {name: value for name, value in values.items() if value is not None}
    workload = situation.workload
    return {"model": workload.name, "bytes": workload.nbytes, "what_if": what_if}


def job_title(situation: Situation) -> str:
    cluster, workload = situation.cluster, situation.workload
    racks = len(cluster.racks)
    spread = f" in {racks} racks" if racks > 1 else ""
    return (
        f"{workload.name}: {about(workload.nbytes, 'B')} of gradients, "
        f"{counted(cluster.workers, 'worker')}{spread}"
    )


def _workload(model: str, gpu: str | None, batch: int | None) -> tuple[Workload, list[str]]:
    """The workload with its compute times, and which of these are assumed."""
    workload = workload_of(model)
    if model in MODELS:
        device, samples = (gpu or DEFAULT_GPU).lower(), batch or DEFAULT_BATCH_SAMPLES
        costs = costs_of(model, device, samples)
        source = ASSUMED_STEPS[model].source
        return replace(workload, costs=costs), [
            f"computing of {samples} samples on {device.upper()}: {source}"
        ]
    if gpu is not None or batch is not None:
        raise UsageError(
            f"--gpu and --batch have no assumed compute time for {model}", "leave them out"
        )
    costs = workload.costs
    known = costs.forward.seconds + costs.backward.seconds + costs.optimizer.seconds
    return workload, [] if known else [NO_COMPUTE_NOTE]


def _machine(cluster_file: Path | None, machine: Path | None) -> Machine:
    """The measured costs, with assumed ones for compressors that were not measured."""
    beside = None if cluster_file is None else machine_path(cluster_file)
    path = machine or (beside if beside is not None and beside.exists() else None)
    if path is None:
        return replace(assumed_machine(), assumed=(*FREE_MACHINE.assumed, ASSUMED_CODECS_NOTE))
    measured = read_machine(path)
    names = {text.partition("(")[0] for text in measured.codecs}
    others = {
        text: cost
        for text, cost in assumed_machine().codecs.items()
        if text.partition("(")[0] not in names
    }
    if not others:
        return measured
    assumed = listed(dict.fromkeys(text.partition("(")[0] for text in others))
    return replace(
        measured,
        codecs={**measured.codecs, **others},
        assumed=(*measured.assumed, f"{assumed}: {ASSUMED_CODECS_NOTE}"),
    )


def workload_of(text: str) -> Workload:
    """The workload that `--model` names: a well-known model, one of our jobs, or a workload file.
    Raises WorkloadError if there is none of this name."""
    name = text.strip()
    if name.endswith(".toml"):
        return read_workload(Path(name))
    return model_named(name) if name in MODELS else _of_job(name)


def _of_job(name: str) -> Workload:
    from thalweg.workloads import all_jobs, describe, find_job  # torch takes a second

    known = [*MODELS, *all_jobs()]
    if name.split("(")[0].strip() not in known and not name.endswith(".py"):
        raise WorkloadError(
            f"there is no model {name!r}",
            f"there are {listed(known)}, or name a workload file (TOML)" + nearest(name, known),
        )
    job = find_job(name)
    model = job.model()
    optimizer = type(job.optimizer(model.parameters())).__name__.lower()
    return replace(describe(job.name, model), trained_with=optimizer)
