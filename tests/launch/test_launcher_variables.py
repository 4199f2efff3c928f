from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from thalweg.errors import LaunchError
from thalweg.facts import Cluster
from thalweg.launch.launcher_variables import (
    ONE_RACK_ASSUMPTION,
    find_cluster,
    first_host,
    read_rank_assignment,
)

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "10.0.0.7",
    "MASTER_PORT": "1234",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "1234567",
    "SLURM_JOB_NODELIST": "login,gpu[01-04]",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
}
SBATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "1"}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
ALONE = {"rank": 0, "size": 1, "address": None, "port": None, "hosted": False}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        pytest.param({}, ALONE | {"launcher": "alone"}, id="nothing set"),
        pytest.param({"RANK": "", "HOME": "/"}, ALONE | {"launcher": "alone"}, id="empty is unset"),
        pytest.param(
            TORCHRUN,
            {
                "rank": 3,
                "size": 4,
                "local_rank": 1,
                "address": "10.0.0.7",
                "port": 1234,
                "hosted": True,
                "launcher": "torchrun",
            },
            id="torchrun",
        ),
        pytest.param(
            TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "False"}, {"hosted": False}, id="no agent"
        ),
        pytest.param(
            TORCHRUN | {"THALWEG_LAUNCHER": "thalweg"}, {"launcher": "thalweg"}, id="ours"
        ),
        pytest.param(TORCHRUN | SRUN | MPIRUN, {"rank": 3, "launcher": "torchrun"}, id="it wins"),
        pytest.param(
            {"RANK": "0", "WORLD_SIZE": "1"}, ALONE | {"launcher": "environment"}, id="size 1"
        ),
        pytest.param(
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"},
            {"local_rank": 0, "port": 29500, "launcher": "environment", "hosted": False},
            id="by hand",
        ),
        pytest.param(
            SRUN,
            {
                "rank": 5,
                "size": 8,
                "local_rank": 1,
                "address": "gpu03",
                "port": 24567,
                "hosted": False,
                "launcher": "slurm",
            },
            id="srun",
        ),
        pytest.param(SRUN | {"SLURM_STEP_ID": "1"}, {"port": 24668}, id="second step"),
        pytest.param(
            SRUN | {"MASTER_ADDR": "b", "MASTER_PORT": "77", "WORLD_SIZE": "8"},
            {"address": "b", "port": 77, "launcher": "slurm"},
            id="srun with an address",
        ),
        pytest.param(SRUN | {"PMI_RANK": "5", "PMI_SIZE": "8"}, {"launcher": "slurm"}, id="pmi2"),
        pytest.param(SBATCH, ALONE | {"launcher": "alone"}, id="sbatch"),
        pytest.param(
            SBATCH | {"SLURM_STEP_ID": "4294967290"}, ALONE | {"launcher": "alone"}, id="salloc"
        ),
        pytest.param(
            SRUN | {"SLURM_STEP_NUM_TASKS": "1"}, ALONE | {"launcher": "alone"}, id="srun of one"
        ),
        pytest.param(
            MPIRUN,
            {
                "rank": 2,
                "size": 4,
                "local_rank": 2,
                "address": "127.0.0.1",
                "port": 29500,
                "launcher": "openmpi",
            },
            id="mpirun",
        ),
        pytest.param(SRUN | MPIRUN, {"rank": 2, "launcher": "openmpi"}, id="mpirun by srun"),
        pytest.param(
            HYDRA,
            {
                "rank": 1,
                "size": 2,
                "local_rank": 1,
                "address": "127.0.0.1",
                "port": 29500,
                "launcher": "mpich",
            },
            id="mpiexec",
        ),
        pytest.param(SRUN | HYDRA, {"rank": 1, "launcher": "mpich"}, id="mpiexec by srun"),
    ],
)
def test_the_seat(environment: dict[str, str], expected: dict[str, Any]) -> None:
    seat = asdict(read_rank_assignment(environment))
    assert seat | expected == seat


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (TORCHRUN | {"RANK": "5"}, "RANK is 5, but WORLD_SIZE is 4; "),
        (TORCHRUN | {"RANK": "x"}, "RANK is 'x', not a whole number; "),
        (TORCHRUN | {"RANK": "-1"}, "RANK is '-1', not a whole number; "),
        (TORCHRUN | {"WORLD_SIZE": "0"}, "RANK is 3, but WORLD_SIZE is 0; "),
        (TORCHRUN | {"LOCAL_RANK": "one"}, "LOCAL_RANK is 'one', not a whole number; "),
        (TORCHRUN | {"MASTER_PORT": "http"}, "MASTER_PORT is 'http', not a whole number; "),
        (TORCHRUN | {"MASTER_PORT": "70000"}, "MASTER_PORT is 70000; "),
        (TORCHRUN | {"MASTER_ADDR": ""}, "WORLD_SIZE is 4, but MASTER_ADDR is not set; "),
        ({"RANK": "0"}, "RANK is set, but WORLD_SIZE is not; "),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set, but RANK is not; "),
        (SRUN | {"WORLD_SIZE": "4"}, "WORLD_SIZE is 4, but slurm says 8; "),
        (SRUN | {"SLURM_STEP_NODELIST": "[", "SLURM_JOB_NODELIST": "["}, "node list '['; "),
        (
            MPIRUN | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            "OMPI_COMM_WORLD_SIZE is 4, but MASTER_ADDR is not set; ",
        ),
    ],
)
def test_what_contradicts_itself_is_named(environment: dict[str, str], message: str) -> None:
    with pytest.raises(LaunchError) as caught:
        read_rank_assignment(environment)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [
        ("node01", "node01"),
        ("node[03-05,7]", "node03"),
        ("node[7,9]-ib", "node7-ib"),
        ("a,b[1-2]", "a"),
        ("b[1-2],a", "b1"),
        ("rack[1-2]n[10-11]", "rack1n10"),
        ("gpu-a-[001-128]", "gpu-a-001"),
    ],
)
def test_the_first_host_of_a_node_list(nodelist: str, first: str) -> None:
    assert first_host(nodelist) == first


def test_a_cluster_that_nobody_describes_is_assumed() -> None:
    assert find_cluster(None, 4, {}) == Cluster.flat(4)
    assert ONE_RACK_ASSUMPTION in find_cluster(None, 4, {}).assumed
    assert ONE_RACK_ASSUMPTION not in find_cluster(Cluster.flat(4), 4, {}).assumed
