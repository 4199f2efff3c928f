"""The checks of `attach()`: some milliseconds, and one key of the store for each rank.

`publish` precedes the ranks' agreement on what they train, `preflight` follows it: by then all keys
are there, and no rank waits. Every rank checks itself, one of each host the host; rank 0 compares.
Only problems are logged, and nothing is raised: training may go well all the same.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, replace

from thalweg.doctor import interfaces, limits, name_resolution
from thalweg.doctor.environment import version_differences, versions
from thalweg.doctor.finding import Finding, RankFacts
from thalweg.doctor.local_checks import GLOO_INTERFACE_VARIABLE
from thalweg.members.world import World
from thalweg.probing.coordinator import host_description

HOSTNAME_TIMEOUT_SECONDS = 0.01  # for the lookup of the host's own name; slower ones don't count
log = logging.getLogger("thalweg")


def publish(world: World) -> None:
    """Publish this rank's versions and host, for comparison."""
    if world.size == 1:
        return
    try:
        world.put(_key(world.rank), json.dumps(asdict(_own(world))))
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
    keys = [_key(rank) for rank in (range(world.size) if world.rank == 0 else [0])]
    texts = world.store_client.call(lambda s: s.multi_get([key for key in keys if s.check([key])]))
    others = [RankFacts.unpacked(json.loads(text)) for text in texts]  # that have published theirs
    assignment = world.rank_assignment
    hosts_store = world.rank == 0 and assignment is not None and not assignment.hosted
    found = [limits.open_files(world.size, hosts_store=hosts_store)]
    local_rank = assignment.local_rank if assignment else os.environ.get("LOCAL_RANK", "0")
    if local_rank in (0, "0") and any(other.host != own.host for other in others):
        found += _about_host(world, own, others)
    found = [finding if finding.ranks else finding.at(own.rank, own.name) for finding in found]
    return found + (version_differences(others) if world.rank == 0 else [])


def _about_host(world: World, own: RankFacts, others: Sequence[RankFacts]) -> list[Finding]:
    """Findings on this host among several; an interface that is named was chosen on purpose."""
    listed = interfaces.list_interfaces()
    holder = interfaces.holder(own.address, listed)
    resolved = None
    if not own.gloo_interface:
        name = socket.gethostname()
        resolved = name_resolution.resolve_name(name, HOSTNAME_TIMEOUT_SECONDS).addresses
    facts = replace(own, interface=holder.name if holder else "", resolved=resolved)
    elsewhere = next(other for other in others if other.host != own.host)
    traps = name_resolution.traps([facts, elsewhere])
    found = [finding for finding in traps if own.rank in finding.ranks]
    if world.rank_assignment is not None and not interfaces.is_named(os.environ):
        reason = interfaces.why(world.rank_assignment.address, os.environ)
        found.append(interfaces.judge(own.address, reason, listed))
    return found


def _own(world: World) -> RankFacts:
    return RankFacts(
        rank=world.rank,
        **host_description(),
        address=world.address,
        versions=versions(),
        gloo_interface=os.environ.get(GLOO_INTERFACE_VARIABLE, ""),
    )


def _key(rank: int) -> str:
    return f"doctor/{rank}"
