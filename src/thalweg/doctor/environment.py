"""The environment of this process, to paste into an issue, and versions that differ between ranks.

No text contains the value of a secret.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping, Sequence
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
from thalweg.facts import about
from thalweg.launch.rank_assignment import RankAssignment

TCP_CONGESTION_PATH = Path("/proc/sys/net/ipv4/tcp_congestion_control")
SHOWN_VARIABLES_PATTERN = re.compile(
    r"RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|CUDA_VISIBLE_DEVICES"
    r"|RES_OPTIONS|(THALWEG|GLOO|NCCL|OMP|MKL|ONEDNN)_\w+|\w+_IFNAME|OMPI_COMM_WORLD_\w+|PMI_\w+"
    r"|SLURM_(PROCID|LOCALID|NODEID|NNODES|NTASKS|JOB_ID|STEP_\w+|JOB_NODELIST|MPI_TYPE)"
)
SECRET_VARIABLES_PATTERN = re.compile(r"SECRET|TOKEN|PASSWORD|KEY", re.IGNORECASE)
EQUAL_VERSION_PACKAGES = ("thalweg",)  # what ranks send each other changes with it


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
    return {
        **versions(),
        "torch has": ", ".join(_backends()) or "no backend",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "distribution": _distribution(),
        "cores": cores(),
        "memory": about(psutil.virtual_memory().total, "B"),
        "congestion control": congestion_control(),
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


def summary(found: Mapping[str, Any]) -> Finding:
    """The environment as a finding of one line."""
    parts = [f"{name} {found[name]}" for name in ("thalweg", "python", "torch")]
    parts.append(
        f"({found['torch has']}), numpy {found['numpy']}, cryptography {found['cryptography']}"
    )
    where = f"{found['system']}, {found['cores']} cores, {found['memory']}"
    tcp = f"TCP {found['congestion control']}"
    return ok("environment", f"{' '.join(parts)}; {where}; {tcp}; {found['launcher']}")


def paste(found: Mapping[str, Any]) -> list[str]:
    """The lines of a block to paste into an issue."""
    lines = [f"- {name}: {value}" for name, value in found.items() if name != "variables"]
    return [*lines, *(f"- {name}={value}" for name, value in found["variables"].items())]


def cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpus() -> str:
    """The numbers of this process's cores, as bits in hexadecimal: launchers may bind workers."""
    if hasattr(os, "sched_getaffinity"):
        return f"{sum(1 << cpu for cpu in os.sched_getaffinity(0)):x}"
    return f"{(1 << cores()) - 1:x}"


def congestion_control() -> str:
    with suppress(OSError):
        return TCP_CONGESTION_PATH.read_text().strip()
    return "unknown"


def _backends() -> list[str]:
    found = []
    if dist.is_available():
        names = ("gloo", "nccl", "mpi")
        found += [name for name in names if getattr(dist, f"is_{name}_available")()]
    if torch.version.cuda:
        devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        found.append(f"cuda {torch.version.cuda} with {devices} devices")
    return found


def _distribution() -> str:
    with suppress(OSError):
        return platform.freedesktop_os_release().get("PRETTY_NAME", "unknown")
    return "unknown"


def version_findings(ranks: Sequence[RankFacts]) -> list[Finding]:
    listed = ", ".join(f"{name} {version}" for name, version in ranks[0].versions.items())
    return version_differences(ranks) or [ok("versions", f"the same on all ranks: {listed}")]


def version_differences(ranks: Sequence[RankFacts]) -> list[Finding]:
    """One finding per package whose version differs; patch versions of Python don't count."""
    found = []
    for name in versions():
        held: dict[str, list[RankFacts]] = {}
        for facts in ranks:
            if name in facts.versions:
                version = facts.versions[name]
                version = ".".join(version.split(".")[:2]) if name == "python" else version
                held.setdefault(version, []).append(facts)
        if len(held) > 1:
            found.append(_difference(name, held))
    return found


def _difference(name: str, held: dict[str, list[RankFacts]]) -> Finding:
    """The ranks of each version, the minority first; of two halves, the one without rank 0."""
    fewest_first = sorted(held.items(), key=lambda pair: (len(pair[1]), -pair[1][0].rank))
    listed = "; ".join(f"{together(ranks)}: {version}" for version, ranks in fewest_first)
    odd = fewest_first[0][1]
    verdict = fail if name in EQUAL_VERSION_PACKAGES else warn
    return verdict(
        "versions",
        f"{name} differs: {listed}",
        f"install {name} {fewest_first[-1][0]} on "
        f"{' and '.join(dict.fromkeys(facts.name for facts in odd))}, or make the environment anew "
        "from the same lock file on all hosts",
        odd,
        named=True,
    )


def secret_findings(ranks: Sequence[RankFacts]) -> list[Finding]:
    """A comparison of the secrets' fingerprints, of the ranks that could read theirs."""
    held: dict[str, list[RankFacts]] = {}
    for facts in ranks:
        if facts.secret is not None:
            held.setdefault(facts.secret, []).append(facts)
    if len(held) < 2:
        detail = "none is set" if set(held) == {"absent"} else "the same on all ranks"
        return [ok("secret", detail)] if held else []
    usual = max(held, key=lambda fingerprint: len(held[fingerprint]))
    odd = [facts for fingerprint, who in held.items() if fingerprint != usual for facts in who]
    lacking = {facts.secret for facts in odd} == {"absent"}
    return [
        fail(
            "secret",
            "no job secret, and the others have one"
            if lacking
            else "another job secret than the others",
            "set THALWEG_SECRET, or THALWEG_SECRET_FILE, to the same on all workers",
            odd,
        )
    ]
