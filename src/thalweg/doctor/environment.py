"""The environment of this process, to paste into an issue, and versions that differ between ranks.

No text contains the value of a secret.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import cryptography
import numpy as np
import psutil
import torch
import torch.distributed as dist

from thalweg.doctor.finding import Finding, RankFacts, fail, ok, together, warn
from thalweg.facts import about, grouped
from thalweg.launch.launcher_variables import RankAssignment

SHOWN_VARIABLES_PATTERN = re.compile(
    r"RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|CUDA_VISIBLE_DEVICES"
    r"|RES_OPTIONS|(THALWEG|GLOO|NCCL|OMP|MKL|ONEDNN)_\w+|\w+_IFNAME|OMPI_COMM_WORLD_\w+|PMI_\w+"
    r"|SLURM_(PROCID|LOCALID|NODEID|NNODES|NTASKS|JOB_ID|STEP_\w+|JOB_NODELIST|MPI_TYPE)"
)
SECRET_VARIABLES_PATTERN = re.compile(r"SECRET|TOKEN|PASSWORD|KEY", re.IGNORECASE)


def versions() -> dict[str, str]:
    """The versions of packages that should be equal on all ranks."""
    return {
        "thalweg": import_module("thalweg").__version__,  # the top package imports this one
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "cryptography": cryptography.__version__,
        "numpy": np.__version__,
    }


def environment(assignment: RankAssignment, variables: Mapping[str, str]) -> dict[str, Any]:
    """All facts about the environment, by name."""
    distribution = congestion_control = "unknown"
    with suppress(OSError):
        distribution = platform.freedesktop_os_release().get("PRETTY_NAME", distribution)
    with suppress(OSError):
        congestion_control = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    return {
        **versions(),
        "torch has": ", ".join(_backends()) or "no backend",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "distribution": distribution,
        "cores": len(cores()),
        "memory": about(psutil.virtual_memory().total, "B"),
        "congestion control": congestion_control,
        "launcher": f"{assignment.launcher}, rank {assignment.rank} of {assignment.size}",
        "variables": shown(variables),
    }


def shown(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables that matter to a run, secrets without their value."""
    return {
        name: "(set, not shown)" if SECRET_VARIABLES_PATTERN.search(name) else value
        for name, value in sorted(variables.items())
        if SHOWN_VARIABLES_PATTERN.fullmatch(name) and value
    }


def summary(facts: Mapping[str, Any]) -> Finding:
    """The environment as a finding of one line."""
    parts = [f"{name} {facts[name]}" for name in ("thalweg", "python", "torch")]
    parts.append(
        f"({facts['torch has']}), numpy {facts['numpy']}, cryptography {facts['cryptography']}"
    )
    where = f"{facts['system']}, {facts['cores']} cores, {facts['memory']}"
    tcp = f"TCP {facts['congestion control']}"
    return ok("environment", f"{' '.join(parts)}; {where}; {tcp}; {facts['launcher']}")


def paste(environment: Mapping[str, Any]) -> list[str]:
    """The lines of a block to paste into an issue."""
    lines = [f"- {name}: {value}" for name, value in environment.items() if name != "variables"]
    return [*lines, *(f"- {name}={value}" for name, value in environment["variables"].items())]


def cores() -> set[int]:
    """The numbers of the cores that this process may use: launchers may bind workers."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return {*range(os.cpu_count() or 1)}


def _backends() -> list[str]:
    names = ("gloo", "nccl", "mpi")
    backends = [name for name in names if getattr(dist, f"is_{name}_available")()]
    if torch.version.cuda:
        devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        backends.append(f"cuda {torch.version.cuda} with {devices} devices")
    return backends


def version_findings(ranks: Sequence[RankFacts]) -> list[Finding]:
    """One finding per package whose version differs, or one that all are the same; patch versions
    of Python don't count."""
    findings = []
    for name in versions():
        parts = 2 if name == "python" else None
        held = _by_value(
            (".".join(facts.versions[name].split(".")[:parts]), facts)
            for facts in ranks
            if name in facts.versions
        )
        if len(held) > 1:
            listed = "; ".join(f"{together(there)}: {version}" for version, there in held)
            usual, odd = held[-1][0], held[0][1]
            verdict = fail if name == "thalweg" else warn  # its messages change with it
            hosts = " and ".join(dict.fromkeys(facts.name for facts in odd))
            remedy = (
                f"install {name} {usual} on {hosts}, or make the environment anew from the same "
                "lock file on all hosts"
            )
            findings.append(
                verdict("versions", f"{name} differs: {listed}", remedy, odd, named=True)
            )
    listed = ", ".join(f"{name} {version}" for name, version in ranks[0].versions.items())
    return findings or [ok("versions", f"the same on all ranks: {listed}")]


def _by_value(values: Iterable[tuple[str, RankFacts]]) -> list[tuple[str, list[RankFacts]]]:
    """The ranks of each value, the minority first; of two halves, the one without rank 0."""
    return sorted(grouped(values).items(), key=lambda pair: (len(pair[1]), -pair[1][0].rank))


def secret_findings(ranks: Sequence[RankFacts]) -> list[Finding]:
    """A comparison of the secrets' fingerprints, of the ranks that could read theirs."""
    held = _by_value((facts.secret, facts) for facts in ranks if facts.secret is not None)
    if len(held) < 2:
        same = {"absent": "none is set"}
        return [ok("secret", same.get(each, "the same on all ranks")) for each, _ in held]
    other = {"absent": "no job secret, and the others have one"}
    detail = "another job secret than the others"
    remedy = "set THALWEG_SECRET, or THALWEG_SECRET_FILE, to the same on all workers"
    return [fail("secret", other.get(each, detail), remedy, odd) for each, odd in held[:-1]]
