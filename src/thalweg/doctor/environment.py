"""What this process runs on, in words to paste into an issue. Never a secret's value."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import cryptography
import numpy as np
import psutil
import torch
import torch.distributed as dist

from thalweg.doctor.finding import Finding
from thalweg.facts import about
from thalweg.launch.rank_assignment import RankAssignment

TCP_CONGESTION_PATH = Path("/proc/sys/net/ipv4/tcp_congestion_control")
SHOWN_VARIABLES_PATTERN = re.compile(
    r"RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|CUDA_VISIBLE_DEVICES"
    r"|RES_OPTIONS|(THALWEG|GLOO|NCCL|OMP|MKL|ONEDNN)_\w+|\w+_IFNAME|OMPI_COMM_WORLD_\w+|PMI_\w+"
    r"|SLURM_(PROCID|LOCALID|NODEID|NNODES|NTASKS|JOB_ID|STEP_\w+|JOB_NODELIST|MPI_TYPE)"
)
SECRET_VARIABLES_PATTERN = re.compile(r"SECRET|TOKEN|PASSWORD|KEY", re.IGNORECASE)


def versions() -> dict[str, str]:
    """Of what ranks must have alike, or should."""
    return {
        "thalweg": import_module("thalweg").__version__,  # the package's face stands above us
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "cryptography": cryptography.__version__,
        "numpy": np.__version__,
    }


def environment(assignment: RankAssignment, variables: Mapping[str, str]) -> dict[str, Any]:
    """All there is to say, by name."""
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
    """Those that matter here, secrets without their value."""
    return {
        name: "(set, not shown)" if SECRET_VARIABLES_PATTERN.search(name) else value
        for name, value in sorted(variables.items())
        if SHOWN_VARIABLES_PATTERN.fullmatch(name) and value
    }


def summary(found: Mapping[str, Any]) -> Finding:
    """In one line."""
    parts = [f"{name} {found[name]}" for name in ("thalweg", "python", "torch")]
    parts.append(
        f"({found['torch has']}), numpy {found['numpy']}, cryptography {found['cryptography']}"
    )
    where = f"{found['system']}, {found['cores']} cores, {found['memory']}"
    detail = f"{' '.join(parts)}; {where}; TCP {found['congestion control']}; {found['launcher']}"
    return Finding(check="environment", verdict="ok", detail=detail)


def paste(found: Mapping[str, Any]) -> list[str]:
    """A line each, to copy."""
    lines = [f"- {name}: {value}" for name, value in found.items() if name != "variables"]
    return [*lines, *(f"- {name}={value}" for name, value in found["variables"].items())]


def cores() -> int:
    """That this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpus() -> str:
    """Which of the host's, as bits in hexadecimal: launchers may give each worker its own."""
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
        found += [
            name for name in ("gloo", "nccl", "mpi") if getattr(dist, f"is_{name}_available")()
        ]
    if torch.version.cuda:
        seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
        found.append(f"cuda {torch.version.cuda} with {seen} devices")
    return found


def _distribution() -> str:
    with suppress(OSError):
        return platform.freedesktop_os_release().get("PRETTY_NAME", "unknown")
    return "unknown"
