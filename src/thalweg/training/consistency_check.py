"""A check before the first step that all ranks hold the same plan, model and optimizer.

Each rank publishes a description in the store and compares its own with rank 0's; all ranks then
learn which ones differ, and in what.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from thalweg.errors import Mismatch, PeerLost, ranks_text
from thalweg.members.abort import AbortFlag
from thalweg.members.world import World

Description = dict[str, Any]
REFERENCE_KEY = "same/0"  # rank 0's description in the store


def description(
    plan: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    settings: Mapping[str, Any],
) -> Description:
    """Everything that has to be equal on all ranks, as text and numbers that JSON can hold."""
    groups = [] if optimizer is None else optimizer.param_groups
    return {
        "plan": plan,
        "model": {
            **{
                name: _kind(p) + ("" if p.requires_grad else " frozen")
                for name, p in model.named_parameters()
            },
            **{f"buffer {name}": _kind(b) for name, b in model.named_buffers()},
        },
        "optimizer": {
            "class": "absent" if optimizer is None else type(optimizer).__name__,
            **{
                f"group {i}, {key}": repr(value)
                for i, group in enumerate(groups)
                for key, value in (*group.items(), ("parameters", len(group["params"])))
                if isinstance(value, bool | int | float | str | tuple)
            },
        },
        "attach()": {key: repr(value) for key, value in settings.items()},
    }


def _kind(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def agree(world: World, abort_flag: AbortFlag, own: Description) -> Mapping[str, str]:
    """Raise Mismatch, on every rank, if any differs from rank 0; PeerLost if one is missing.
    Returns the reference for ranks that join later, which has to stay in the store as long as the
    run lasts."""
    if world.rank == 0:
        world.put(REFERENCE_KEY, json.dumps(own))
    different = _difference(world, abort_flag, own)
    world.put(f"verdict/{world.rank}", different)
    ranks_by_verdict: dict[str, list[int]] = {}
    for rank, verdict in world.read_all("verdict", abort_flag, _late(world)).items():
        if verdict:
            ranks_by_verdict.setdefault(verdict.decode(), []).append(rank)
    if ranks_by_verdict:
        problems = "; ".join(
            f"{ranks_text(ranks)}: {verdict}" for verdict, ranks in ranks_by_verdict.items()
        )
        raise Mismatch(
            f"not all ranks hold the same as rank 0 ({problems})",
            "start all of them with the same script and arguments",
        )
    return {REFERENCE_KEY: json.dumps(own)}


def hosts_of_all(world: World, abort_flag: AbortFlag, own: Sequence[str]) -> dict[str, str]:
    """The host of each rank by store key, in the order of ranks. `own` is this rank's host: its
    name, and values that distinguish it from others of that name. A restarted rank keeps the host
    that it had."""
    text = json.dumps(own)
    world.store_client.call(lambda store: store.compare_set(f"host/{world.rank}", "", text))
    hosts = world.read_all("host", abort_flag, _late(world))
    return {f"host/{rank}": host.decode() for rank, host in hosts.items()}


def host_names(published: Iterable[str]) -> list[str]:
    """One name for each host, in the order of ranks; hosts that share a name are numbered."""
    identities = [tuple(json.loads(text)) for text in published]
    names: dict[tuple[str, ...], str] = {}
    for identity in identities:
        taken = sum(other[0] == identity[0] for other in names if other != identity)
        names.setdefault(identity, f"{identity[0]}-{taken + 1}" if taken else identity[0])
    return [names[identity] for identity in identities]


def compare(world: World, abort_flag: AbortFlag, own: Description) -> Mapping[str, str]:
    """Raise Mismatch, on this rank alone, if it differs from rank 0 at the beginning of the run."""
    different = _difference(world, abort_flag, own)
    if different:
        raise Mismatch(
            f"rank {world.rank} rejoins with different settings ({different})",
            "start it with the same script and arguments as the others",
        )
    return {REFERENCE_KEY: json.dumps(own)}


def _difference(world: World, abort_flag: AbortFlag, own: Description) -> str:
    reference = json.loads(world.read(REFERENCE_KEY, abort_flag, _late(world)(0)))
    return next(differences(reference, json.loads(json.dumps(own))), "")


def differences(reference: Description, own: Description) -> Iterator[str]:
    """The differences of a rank from rank 0, the most important first."""
    if own["plan"] != reference["plan"]:
        yield f"plan {own['plan']}, on rank 0 {reference['plan']}"
    for part in ("model", "optimizer", "attach()"):
        for name in {**reference[part], **own[part]}:
            value, expected = (values[part].get(name, "absent") for values in (own, reference))
            if value != expected:
                yield f"{part}: {name} is {value}, on rank 0 {expected}"
    if list(own["model"]) != list(reference["model"]):
        yield "model: the parameters are in another order"


def _late(world: World) -> Callable[[int], PeerLost]:
    return lambda rank: PeerLost(
        f"rank {rank} hasn't joined within {world.timeout:g} s",
        "check that it runs, with the same number of workers, or allow more with timeout=",
    )
