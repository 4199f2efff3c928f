"""The checks that one rank makes alone, also of its settings: a cluster file, a secret, an
interface, a disk, rights for a lab.

A setting that a run would reject becomes a finding and is dropped, so that the rest can be checked.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from thalweg.doctor import environment, interfaces, limits, name_resolution, processor
from thalweg.doctor.finding import Finding, RankFacts, fail, ok, warn
from thalweg.errors import ThalwegError
from thalweg.facts import about, read_cluster
from thalweg.launch.rank_assignment import CLUSTER_VARIABLE, RankAssignment, find_cluster
from thalweg.launch.secret import SECRET_FILE_VARIABLE, SECRET_VARIABLE, find_secret
from thalweg.members.world import INTERFACE_VARIABLES, own_address
from thalweg.probing.coordinator import host_description
from thalweg.transports.security import ENCRYPTION_VARIABLE, FORMER_VARIABLE, wants_encryption

GLOO_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
MIN_FREE_DISK_BYTES = 1e9  # checkpoints are larger
CAP_NET_ADMIN, CAP_SYS_ADMIN = 12, 21
PROCESS_STATUS_PATH = Path("/proc/self/status")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalReport:
    facts: RankFacts
    findings: list[Finding]
    environment: dict[str, Any]
    variables: Mapping[str, str]  # the environment that a run accepts
    secret_is_readable: bool


def local_report(assignment: RankAssignment) -> LocalReport:
    """The checks of this rank; call it before this process has threads, since it forks."""
    across = name_resolution.across_hosts(assignment.size, os.environ)
    tried = [processor.bfloat16()] if assignment.local_rank == 0 else []
    variables, rejected = accepted(os.environ)
    described = host_description()
    host = described["name"]
    lookup = name_resolution.resolve_name(socket.gethostname())
    address = own_address(assignment.address, variables)
    listed = interfaces.list_interfaces()
    holder = interfaces.holder(address, listed)
    facts = RankFacts(
        rank=assignment.rank,
        **described,
        cpus=environment.cpus(),
        threads=torch.get_num_threads(),
        address=address,
        interface=holder.name if holder else "",
        versions=environment.versions(),
        resolved=lookup.addresses,
        gloo_interface=variables.get(GLOO_INTERFACE_VARIABLE, ""),
        buffers=limits.buffers(),
    )
    alone = assignment.size == 1
    hosts_store = assignment.rank == 0 and not alone and not assignment.hosted
    findings: list[Finding | None] = [
        *rejected,
        *tried,
        interfaces.judge_alone(address, listed, variables)
        if alone
        else interfaces.judge(address, interfaces.why(assignment.address, variables), listed),
        name_resolution.lookups(host, address, lookup),
        name_resolution.rendezvous_finding(assignment.address, across),
        limits.open_files(assignment.size, hosts_store=hosts_store),
        limits.backlog(assignment.size) if hosts_store or alone else None,
        cluster_file(assignment.size, os.environ),
        disk(Path.cwd()) if assignment.local_rank == 0 else None,
        lab() if assignment.rank == 0 else None,
    ]
    if alone:
        findings += [
            name_resolution.alone(host, lookup, facts.gloo_interface),
            limits.buffers_alone(facts.buffers),
            *processor.threads([facts]),
        ]
    return LocalReport(
        facts=facts,
        findings=[finding for finding in findings if finding is not None],
        environment=environment.environment(assignment, os.environ),
        variables=variables,
        secret_is_readable=not any(finding.check == "secret" for finding in rejected),
    )


def accepted(environment: Mapping[str, str]) -> tuple[dict[str, str], list[Finding]]:
    """The environment without settings that `World.join` would reject, and findings on those."""
    left = dict(environment)
    found = []
    for variable in INTERFACE_VARIABLES:
        try:
            if left.get(variable):
                own_address(None, {variable: left[variable]})
        except ThalwegError as error:
            found.append(_failed("interface", error))
            del left[variable]
    try:
        find_secret(left)
    except ThalwegError as error:
        found.append(_failed("secret", error))
        left = {k: v for k, v in left.items() if k not in (SECRET_VARIABLE, SECRET_FILE_VARIABLE)}
    try:
        wants_encryption(left, "127.0.0.1")
    except ThalwegError as error:
        found.append(_failed("secret", error))
        left = {k: v for k, v in left.items() if k not in (ENCRYPTION_VARIABLE, FORMER_VARIABLE)}
    return left, found


def cluster_file(size: int, environment: Mapping[str, str]) -> Finding | None:
    """The finding on the cluster file; alone, its number of workers isn't checked."""
    path = environment.get(CLUSTER_VARIABLE)
    if not path:
        return None
    try:
        known = read_cluster(Path(path)) if size == 1 else find_cluster(None, size, environment)
    except ThalwegError as error:
        return _failed("cluster file", error)
    return ok("cluster file", f"{CLUSTER_VARIABLE} names {path}: {known.workers} workers")


def disk(folder: Path) -> Finding | None:
    with suppress(OSError):
        free = shutil.disk_usage(folder).free
        if free < MIN_FREE_DISK_BYTES:
            remedy = "make room before checkpoints are written there, or start in another folder"
            return warn("disk", f"{about(free, 'B')} are free under {folder}", remedy)
        return ok("disk", f"{about(free, 'B')} free under {folder}")
    return None


def lab() -> Finding:
    """The finding on whether labs work here; training doesn't need them."""
    lacking = _lacking()
    detail = f"none here: {lacking}" if lacking else "clusters can be tried on this machine (--lab)"
    return ok("lab", detail)


def _lacking() -> str:
    if sys.platform != "linux" or find_spec("pyroute2") is None:
        return "it needs Linux and pyroute2"
    with suppress(OSError, StopIteration, ValueError):
        line = next(
            row for row in PROCESS_STATUS_PATH.read_text().splitlines() if row.startswith("CapEff")
        )
        held = int(line.split()[1], 16)
        if not (held >> CAP_NET_ADMIN & 1 and held >> CAP_SYS_ADMIN & 1):
            return "it needs root (CAP_SYS_ADMIN and CAP_NET_ADMIN)"
    return ""


def _failed(check: str, error: ThalwegError) -> Finding:
    return fail(check, error.problem, error.remedy)
