"""What one rank finds out by itself, before it meets the others."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from thalweg.doctor import environment, interfaces, limits, names, premises, processor
from thalweg.doctor.facts import Facts
from thalweg.doctor.finding import Finding
from thalweg.probing.worker import introduction
from thalweg.runtime.launch import Seat
from thalweg.runtime.world import own_address

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    facts: Facts
    findings: list[Finding]
    environment: dict[str, Any]
    variables: Mapping[str, str]  # that a run accepts
    secret_is_readable: bool


def look(seat: Seat) -> Own:
    """Call it before this process has threads: a child tries what may end it."""
    across = names.across_hosts(seat.size, os.environ)
    tried = [processor.bfloat16()] if seat.local_rank == 0 else []
    variables, refused = premises.accepted(os.environ)
    introduced = introduction()
    host = introduced["name"]
    lookup = names.look_up(socket.gethostname())
    address = own_address(seat.address, variables)
    seen = interfaces.look()
    holder = interfaces.holder(address, seen)
    found = environment.environment(seat, os.environ)
    facts = Facts(
        rank=seat.rank,
        name=host,
        machine=introduced["machine"],
        stack=introduced["stack"],
        cores=introduced["cores"],
        cpus=environment.cpus(),
        threads=torch.get_num_threads(),
        address=address,
        interface=holder.name if holder else "",
        versions=environment.versions(),
        resolved=lookup.addresses,
        gloo_interface=variables.get(GLOO_INTERFACE, ""),
        buffers=limits.buffers(),
    )
    alone = seat.size == 1
    hosts_store = seat.rank == 0 and not alone and not seat.hosted
    findings: list[Finding | None] = [
        *refused,
        *tried,
        interfaces.judge_alone(address, seen, variables)
        if alone
        else interfaces.judge(address, interfaces.why(seat.address, variables), seen),
        names.lookups(host, address, lookup),
        names.meeting_point(seat.address, across),
        limits.open_files(seat.size, hosts_store=hosts_store),
        limits.backlog(seat.size) if hosts_store or alone else None,
        premises.cluster_file(seat.size, os.environ),
        premises.disk(Path.cwd()) if seat.local_rank == 0 else None,
        premises.lab() if seat.rank == 0 else None,
    ]
    if alone:
        findings += [
            names.alone(host, lookup, facts.gloo_interface),
            limits.buffers_alone(facts.buffers),
            *processor.threads([facts]),
        ]
    return Own(
        facts=facts,
        findings=[finding for finding in findings if finding is not None],
        environment=found,
        variables=variables,
        secret_is_readable=not any(finding.check == "secret" for finding in refused),
    )
