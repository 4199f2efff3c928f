"""What the environment variables of a launcher say: this process's rank, and where the store is.

    launcher                 rank                   size                   address of the store
    torchrun, or a script    RANK                   WORLD_SIZE             MASTER_ADDR only
    openmpi (mpirun)         OMPI_COMM_WORLD_RANK   OMPI_COMM_WORLD_SIZE   this host if all are here
    slurm (srun)             SLURM_PROCID           SLURM_STEP_NUM_TASKS   the step's first host
    mpich (mpiexec, hydra)   PMI_RANK               PMI_SIZE               this host if all are here

MASTER_ADDR and MASTER_PORT always win over the address in the table; several ranks without
an address are an error.

The first launcher whose variables are set counts. mpirun comes before srun because it starts its
daemons with srun, whose variables then number the daemons. So does hydra, which is why a PMI_RANK
that contradicts SLURM_PROCID wins. A shell of `sbatch` or `salloc` has SLURM variables too, but is
one process: srun started only the processes of numbered steps (SLURM_STEP_ID).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from thalweg.errors import LaunchError, UsageError
from thalweg.facts import Cluster, read_cluster

LAUNCHER_VARIABLE = "THALWEG_LAUNCHER"
CLUSTER_VARIABLE = "THALWEG_CLUSTER"  # path of the cluster file
RECORDS_VARIABLE = "THALWEG_RECORDS"  # folder for records of steps
ONE_RACK_ASSUMPTION = "all hosts in one rack"  # of runs without a cluster file
DEFAULT_PORT = 29500
SLURM_PORTS = range(20_000, 30_000)
SLURM_STEP_PORT_STRIDE = 101  # between steps of a job, so that the next jobs' ports differ
SLURM_RESERVED_STEPS = 0xFFFFFFF0  # the first step number of shells of sbatch and salloc

# The variables for rank, size, rank on the host, and number of ranks on the host.
MPI_VARIABLES = {
    "openmpi": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "mpich": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # and Intel MPI
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAssignment:
    """The rank and size of this process, and the address of the store."""

    rank: int
    size: int
    local_rank: int
    address: str | None  # of the c10d store; None if there is one rank only
    port: int | None
    hosted: bool  # True if the launcher hosts the store; otherwise rank 0 does
    launcher: str


def read_rank_assignment(environment: Mapping[str, str]) -> RankAssignment:
    """The rank assignment that the launcher set; one rank alone without a launcher."""
    variables = {name: value for name, value in environment.items() if value}
    if "RANK" in variables and "WORLD_SIZE" in variables:
        return _torchrun(variables)
    assignment = _mpi(variables, "openmpi") or _slurm(variables) or _mpi(variables, "mpich")
    if assignment is not None:
        for name, value in (("RANK", assignment.rank), ("WORLD_SIZE", assignment.size)):
            if name in variables and _whole_number(variables, name) != value:
                raise LaunchError(
                    f"{name} is {variables[name]}, but {assignment.launcher} says {value}",
                    f"unset {name}",
                )
        return assignment
    for present, absent in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if present in variables:
            raise LaunchError(
                f"{present} is set, but {absent} is not", "set both or neither, or use torchrun"
            )
    return RankAssignment(
        rank=0, size=1, local_rank=0, address=None, port=None, hosted=False, launcher="alone"
    )


def find_cluster(
    given: Cluster | str | Path | None,
    size: int,
    environment: Mapping[str, str],
    hosts: Callable[[], Sequence[str]] | None = None,
) -> Cluster:
    """The given cluster or the one in the given file; else the one in the file that the environment
    names; else one rack of equal hosts. `hosts` returns the host of each rank; without it every
    worker has its own."""
    given = given or environment.get(CLUSTER_VARIABLE)
    if isinstance(given, Cluster):
        cluster = given
    elif given:
        cluster = read_cluster(Path(given))
    else:
        flat = Cluster.flat(size) if hosts is None else Cluster.of_hosts(hosts())
        cluster = replace(flat, assumed=(*flat.assumed, ONE_RACK_ASSUMPTION))
    if cluster.workers != size:
        raise UsageError(
            f"the cluster has {cluster.workers} workers, and {size} were started",
            f"start {cluster.workers} workers, or describe a cluster of {size}",
        )
    return cluster


def _torchrun(variables: Mapping[str, str]) -> RankAssignment:
    launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in variables else "environment"
    return _assignment_from(
        variables,
        ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
        launcher=variables.get(LAUNCHER_VARIABLE, launcher),
        address=None,
        hosted=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",  # as torch reads it
    )


def _mpi(variables: Mapping[str, str], launcher: str) -> RankAssignment | None:
    *names, local_size = MPI_VARIABLES[launcher]
    if names[0] not in variables or names[1] not in variables:
        return None
    on_one_host = variables.get(local_size) == variables[names[1]]
    return _assignment_from(
        variables, names, launcher=launcher, address="127.0.0.1" if on_one_host else None
    )


def _slurm(variables: Mapping[str, str]) -> RankAssignment | None:
    size = next((n for n in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if n in variables), None)
    if size is None or "SLURM_PROCID" not in variables or "SLURM_STEP_ID" not in variables:
        return None
    step = _whole_number(variables, "SLURM_STEP_ID")
    if step >= SLURM_RESERVED_STEPS or _whole_number(variables, size) == 1:
        return None
    for name, pmi_name in (("SLURM_PROCID", "PMI_RANK"), (size, "PMI_SIZE")):
        if variables.get(pmi_name, variables[name]) != variables[name]:
            return None
    hosts = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST")
    port = DEFAULT_PORT
    if "SLURM_JOB_ID" in variables:  # steps of a job may run side by side, like jobs
        place = _whole_number(variables, "SLURM_JOB_ID") + SLURM_STEP_PORT_STRIDE * step
        port = SLURM_PORTS[place % len(SLURM_PORTS)]
    return _assignment_from(
        variables,
        ("SLURM_PROCID", size, "SLURM_LOCALID"),
        launcher="slurm",
        address=first_host(hosts) if hosts else None,
        port=port,
    )


def first_host(nodelist: str) -> str:
    """The first host of a SLURM list such as `node01`, `node[03-05,7]` or `a,b[1-2]`."""
    first = re.match(r"(?:[^,\[\]]|\[[^\[\]]+\])+", nodelist)
    if first is None:
        raise LaunchError(f"can't read SLURM's node list {nodelist!r}", "set MASTER_ADDR")
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0])


def _assignment_from(
    variables: Mapping[str, str],
    names: Sequence[str],
    *,
    launcher: str,
    address: str | None,
    port: int = DEFAULT_PORT,
    hosted: bool = False,
) -> RankAssignment:
    """The assignment from the variables `names` for rank, size and, if it is set, local rank.
    `address` and `port` are the defaults of MASTER_ADDR and MASTER_PORT."""
    rank, size = _whole_number(variables, names[0]), _whole_number(variables, names[1])
    if size == 0 or rank >= size:
        raise LaunchError(
            f"{names[0]} is {rank}, but {names[1]} is {size}",
            "ranks count from 0 to one below the size: start all workers with the same launcher",
        )
    local_rank = _whole_number(variables, names[2]) if names[2] in variables else 0
    address = variables.get("MASTER_ADDR", address)
    if "MASTER_PORT" in variables:
        port = _whole_number(variables, "MASTER_PORT")
        if not 0 < port < 2**16:
            raise LaunchError(f"MASTER_PORT is {port}", "set it to a port from 1 to 65535")
    if size > 1 and address is None:
        raise LaunchError(
            f"{names[1]} is {size}, but MASTER_ADDR is not set",
            "set MASTER_ADDR to the host of rank 0, the same on all workers",
        )
    is_alone = size == 1
    return RankAssignment(
        rank=rank,
        size=size,
        local_rank=local_rank,
        address=None if is_alone else address,
        port=None if is_alone else port,
        hosted=hosted and not is_alone,
        launcher=launcher,
    )


def _whole_number(variables: Mapping[str, str], name: str) -> int:
    text = variables[name]
    if not (text.isascii() and text.isdigit()):
        raise LaunchError(
            f"{name} is {text!r}, not a whole number", "unset it, or let a launcher set it"
        )
    return int(text)
