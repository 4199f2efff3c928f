"""What `attach()` looks at in passing: some milliseconds, one key of the store for each rank.

`publish` before the ranks agree on what they train, `quick` after it: by then everybody's key is
there, and nobody waits. Every rank judges itself, one of each host for the host; rank 0 compares.
Only what is wrong is told, and nothing is ever raised: training may go well all the same.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Sequence

from thalweg.doctor import interfaces, limits, name_resolution, versions
from thalweg.doctor.environment import versions as own_versions
from thalweg.doctor.finding import Finding, RankFacts
from thalweg.doctor.local_checks import GLOO_INTERFACE_VARIABLE
from thalweg.members.world import World
from thalweg.probing.coordinator import host_description

# Seconds for the host's own name to be looked up; who is slower isn't judged.
HOSTNAME_TIMEOUT_SECONDS = 0.01
log = logging.getLogger("thalweg")


def publish(world: World) -> None:
    """What others compare with: versions, and on which host this rank is."""
    if world.size == 1:
        return
    try:
        world.put(_key(world.rank), json.dumps(_own(world).packed()))
    except Exception as error:
        log.debug("the doctor couldn't tell the others anything: %s", error)


def preflight(world: World) -> list[Finding]:
    """What is wrong with this rank; on rank 0 also in what the others differ."""
    if world.size == 1:
        return []
    try:
        return [finding for finding in _judged(world) if finding.verdict != "ok"]
    except Exception as error:
        log.debug("the doctor couldn't look: %s", error)
        return []


def _judged(world: World) -> list[Finding]:
    own = _own(world)
    others = _published(world, range(world.size) if world.rank == 0 else [0])
    hosts_store = (
        world.rank == 0 and world.rank_assignment is not None and not world.rank_assignment.hosted
    )
    found = [limits.open_files(world.size, hosts_store=hosts_store)]
    if _speaks_for_its_host(world) and any(other.host != own.host for other in others):
        found += _about_host(world, own, others)
    found = [finding if finding.ranks else finding.at(own.rank, own.name) for finding in found]
    return found + (versions.differences(others) if world.rank == 0 else [])


def _about_host(world: World, own: RankFacts, others: Sequence[RankFacts]) -> list[Finding]:
    """Where ranks are on several. An interface that is named was somebody's choice."""
    seen = interfaces.list_interfaces()
    holder = interfaces.holder(own.address, seen)
    resolved = (
        None
        if own.gloo_interface
        else name_resolution.resolve_name(socket.gethostname(), HOSTNAME_TIMEOUT_SECONDS)
    )
    facts = RankFacts.unpacked(
        {
            **own.packed(),
            "interface": holder.name if holder else "",
            "resolved": resolved.addresses if resolved else None,
        }
    )
    elsewhere = next(other for other in others if other.host != own.host)
    traps = name_resolution.traps([facts, elsewhere])
    found = [finding for finding in traps if own.rank in finding.ranks]
    if world.rank_assignment is not None and not interfaces.is_named(os.environ):
        reason = interfaces.why(world.rank_assignment.address, os.environ)
        found.append(interfaces.judge(own.address, reason, seen))
    return found


def _own(world: World) -> RankFacts:
    introduced = host_description()
    return RankFacts(
        rank=world.rank,
        name=introduced["name"],
        machine=introduced["machine"],
        stack=introduced["stack"],
        address=world.address,
        versions=own_versions(),
        gloo_interface=os.environ.get(GLOO_INTERFACE_VARIABLE, ""),
    )


def _published(world: World, ranks: Sequence[int]) -> list[RankFacts]:
    """Of those who have; in one question."""
    keys = [_key(rank) for rank in ranks]
    texts = world.store_client.call(lambda s: s.multi_get([key for key in keys if s.check([key])]))
    return [RankFacts.unpacked(json.loads(text)) for text in texts]


def _speaks_for_its_host(world: World) -> bool:
    return (
        world.rank_assignment.local_rank == 0
        if world.rank_assignment
        else os.environ.get("LOCAL_RANK", "0") == "0"
    )


def _key(rank: int) -> str:
    return f"doctor/{rank}"
