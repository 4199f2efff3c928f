"""The checks that one rank makes alone, also of its settings: a cluster file, a secret, an
interface, a disk, rights for a lab.

A setting that a run would reject becomes a finding and is dropped, so that the rest can be checked.

`attach()` makes a few of them, in some milliseconds and with one key of the store for each rank.
`publish` precedes the ranks' agreement on what they train, `preflight` follows it: by then all keys
are there, and no rank waits. Every rank checks itself, one of each host the host; rank 0 compares.
Only problems are logged, and nothing is raised: training may go well all the same.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

from thalweg.doctor import addresses, limits
from thalweg.doctor.environment import cores, version_findings, versions
from thalweg.doctor.finding import Finding, RankFacts, fail, ok, warn
from thalweg.errors import ThalwegError
from thalweg.facts import about, read_cluster
from thalweg.launch.launcher_variables import CLUSTER_VARIABLE, RankAssignment, find_cluster
from thalweg.launch.secret import SECRET_FILE_VARIABLE, SECRET_VARIABLE, find_secret
from thalweg.members.world import INTERFACE_VARIABLES, World, own_address
from thalweg.probing.coordinator import host_description
from thalweg.transports.security import ENCRYPTION_VARIABLE, FORMER_VARIABLE, wants_encryption

GLOO_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
MIN_FREE_DISK_BYTES = 1e9  # checkpoints are larger
CAP_NET_ADMIN, CAP_SYS_ADMIN = 12, 21
HOSTNAME_TIMEOUT_SECONDS = 0.01  # for the lookup of the host's own name by `attach()`
log = logging.getLogger("thalweg")
Variables = Mapping[str, str]
CHECKED_SETTINGS: tuple[tuple[str, tuple[str, ...], Callable[[Variables], object]], ...] = (
    *(("interface", (name,), partial(own_address, None)) for name in INTERFACE_VARIABLES),
    ("secret", (SECRET_VARIABLE, SECRET_FILE_VARIABLE), find_secret),
    (
        "secret",
        (ENCRYPTION_VARIABLE, FORMER_VARIABLE),
        lambda variables: wants_encryption(variables, "127.0.0.1"),
    ),
)
"""The check, the environment variables of a setting, and the function that reads them."""


def local_checks(assignment: RankAssignment) -> tuple[RankFacts, Variables]:
    """The facts and findings of this rank, and the environment without what a run would reject.

    Call it before this process has threads, since it forks."""
    across = addresses.across_hosts(assignment.size, os.environ)
    tried = [limits.bfloat16()] if assignment.local_rank == 0 else []
    variables, rejected = accepted(os.environ)
    described = host_description()
    host = described["name"]
    lookup = addresses.addresses_of(socket.gethostname())
    address = own_address(assignment.address, variables)
    listed = addresses.list_interfaces()
    holder = addresses.holder(address, listed)
    alone = assignment.size == 1
    hosts_store = assignment.rank == 0 and not alone and not assignment.hosted
    findings: list[Finding | None] = [
        *rejected,
        *tried,
        addresses.judge_alone(address, listed, variables)
        if alone
        else addresses.judge(address, addresses.choice(assignment.address, variables), listed),
        addresses.lookups(host, address, lookup),
        addresses.rendezvous_finding(assignment.address, across),
        limits.open_files(assignment.size, hosts_store=hosts_store),
        limits.backlog(assignment.size) if hosts_store or alone else None,
        cluster_file(assignment.size, os.environ),
        disk(Path.cwd()) if assignment.local_rank == 0 else None,
        lab() if assignment.rank == 0 else None,
    ]
    facts = RankFacts(
        rank=assignment.rank,
        **described,
        cpus=f"{sum(1 << core for core in cores()):x}",
        threads=torch.get_num_threads(),
        address=address,
        interface=holder.name if holder else "",
        versions=versions(),
        resolved=lookup.answers,
        gloo_interface=variables.get(GLOO_INTERFACE_VARIABLE, ""),
        buffers=limits.buffers(),
        findings=[finding for finding in findings if finding is not None],
    )
    if alone:
        facts.findings.append(addresses.host_name_alone(host, lookup, facts.gloo_interface))
        facts.findings.extend([*limits.buffers_for([facts], {}, {}), *limits.threads([facts])])
    return facts, variables


def accepted(environment: Variables) -> tuple[Variables, list[Finding]]:
    """The environment without settings that `World.join` would reject, and findings on those."""
    left = dict(environment)
    findings = []
    for check, names, read in CHECKED_SETTINGS:
        try:
            read({name: left[name] for name in names if name in left})
        except ThalwegError as error:
            findings.append(fail(check, error.problem, error.remedy))
            left = {name: value for name, value in left.items() if name not in names}
    return left, findings


def cluster_file(size: int, environment: Variables) -> Finding | None:
    """The finding on the cluster file; alone, its number of workers isn't checked."""
    path = environment.get(CLUSTER_VARIABLE)
    if not path:
        return None
    try:
        known = read_cluster(Path(path)) if size == 1 else find_cluster(None, size, environment)
    except ThalwegError as error:
        return fail("cluster file", error.problem, error.remedy)
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
    if sys.platform != "linux" or find_spec("pyroute2") is None:
        return ok("lab", "none here: it needs Linux and pyroute2")
    with suppress(OSError, IndexError):
        rights = int(Path("/proc/self/status").read_text().split("CapEff:")[1].split()[0], 16)
        if not (rights >> CAP_NET_ADMIN & 1 and rights >> CAP_SYS_ADMIN & 1):
            return ok("lab", "none here: it needs root (CAP_SYS_ADMIN and CAP_NET_ADMIN)")
    return ok("lab", "clusters can be tried on this machine (--lab)")


def publish(world: World) -> None:
    """Publish this rank's versions and host, for comparison."""
    if world.size == 1:
        return
    try:
        world.put(f"doctor/{world.rank}", json.dumps(asdict(_own(world))))
    except Exception as error:
        log.debug("doctor: publishing this rank's facts failed: %s", error)


def preflight(world: World) -> list[Finding]:
    """The problems of this rank; on rank 0 also the differences between ranks."""
    if world.size == 1:
        return []
    try:
        return [finding for finding in _judged(world) if finding.verdict != "ok"]
    except Exception as error:
        log.debug("doctor: the checks failed: %s", error)
        return []


def _judged(world: World) -> list[Finding]:
    own = _own(world)
    keys = [f"doctor/{rank}" for rank in (range(world.size) if world.rank == 0 else [0])]
    texts = world.store_client.call(lambda s: s.multi_get([key for key in keys if s.check([key])]))
    others = [RankFacts.unpacked(json.loads(text)) for text in texts]  # that have published theirs
    assignment = world.rank_assignment
    hosts_store = world.rank == 0 and assignment is not None and not assignment.hosted
    found = [limits.open_files(world.size, hosts_store=hosts_store)]
    local_rank = assignment.local_rank if assignment else os.environ.get("LOCAL_RANK", "0")
    if local_rank in (0, "0") and any(other.host != own.host for other in others):
        found += _about_host(world, own, others)
    found = [finding if finding.ranks else finding.at(own.rank, own.name) for finding in found]
    return found + (version_findings(others) if world.rank == 0 else [])


def _about_host(world: World, own: RankFacts, others: Sequence[RankFacts]) -> list[Finding]:
    """Findings on this host among several; an interface that is named was chosen on purpose."""
    listed = addresses.list_interfaces()
    holder = addresses.holder(own.address, listed)
    resolved = None
    if not own.gloo_interface:
        name = socket.gethostname()
        resolved = addresses.addresses_of(name, HOSTNAME_TIMEOUT_SECONDS).answers
    facts = replace(own, interface=holder.name if holder else "", resolved=resolved)
    elsewhere = next(other for other in others if other.host != own.host)
    traps = addresses.traps([facts, elsewhere])
    findings = [finding for finding in traps if own.rank in finding.ranks]
    if world.rank_assignment is not None and not addresses.is_named(os.environ):
        choice = addresses.choice(world.rank_assignment.address, os.environ)
        findings.append(addresses.judge(own.address, choice, listed))
    return findings


def _own(world: World) -> RankFacts:
    return RankFacts(
        rank=world.rank,
        **host_description(),
        address=world.address,
        versions=versions(),
        gloo_interface=os.environ.get(GLOO_INTERFACE_VARIABLE, ""),
    )
