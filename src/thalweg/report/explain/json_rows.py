"""An explanation as JSON: settings for the whole step, and rows.

A row of kind `round` is a round with all its messages. Under a code, and where there are no rounds,
a row of kind `worker` has the parts that it computes, or its traffic.
"""

from __future__ import annotations

from dataclasses import asdict
from math import isfinite
from typing import Any

from thalweg.codes import TREE_ROOT
from thalweg.report.explain.coded_plan import BatchPart, CodedPlanView
from thalweg.report.explain.groups import Groups
from thalweg.report.explain.step_view import Explanation, Scene

Entries = dict[str, Any]


def settings(explanation: Explanation) -> Entries:
    plan, guarantee = explanation.plan, explanation.guarantee
    slowest = explanation.slowest_link()
    groups = explanation.groups
    turns = () if groups is None else groups.turns
    common: Entries = {
        "sync": str(plan),
        "workers": explanation.group.size,
        "racks": [list(rack) for rack in explanation.group.racks],
        "bytes": explanation.workload.nbytes,
        "step": explanation.step,
        "choices": {
            "topology": str(plan.topology),
            "what": plan.what.value,
            "cadence": str(plan.cadence),
            "redundancy": str(plan.redundancy) if plan.redundancy else None,
            "precision": str(plan.precision) if plan.precision else None,
        },
        "promise": guarantee.promise.value,
        "result": guarantee.result,
        "late": guarantee.late,
        "dead": guarantee.dead,
        "protected": guarantee.protected,
        "period": 1 if groups is None else groups.period,
        "turns": [[list(each.ranks) for each in turn] for turn in turns],
        "lasts": [[each.lasts for each in turn] for turn in turns],
        "sequential_moves": explanation.sequential_moves,
        "sent": explanation.traffic.sent,
        "received": explanation.traffic.received,
        "links": {str(link): n for link, n in sorted(explanation.traffic.links.items())},
        "slowest_link": str(slowest[0]) if slowest else None,
        "slowest_link_seconds": slowest[1] if slowest else None,
        "uncompressed_seconds": explanation.uncompressed_seconds,
    }
    if groups is not None:
        common["mixing"] = _mixing(groups)
    if explanation.coded is not None:
        common["code"] = _code(explanation.coded)
    if explanation.async_plan is not None:
        messages = explanation.async_plan
        common["mailbox"] = {
            "root": messages.root,
            "up_bytes": messages.up_nbytes,
            "down_bytes": messages.down_nbytes,
            "story": dict(messages.story),
        }
    return common


def _mixing(groups: Groups) -> Entries | None:
    """The mixing summary; variances are in units of one step's noise, None if unbounded."""
    found = groups.mixing
    if found is None:
        return None
    return {
        **{name: value for name, value in asdict(found).items() if name != "steps_to_little"},
        "steps_to_1e-3": found.steps_to_little,
        "drift": found.drift if isfinite(found.drift) else None,
        "drift_before": found.drift_before if isfinite(found.drift_before) else None,
        "crossing": groups.uplink_traffic,
        "racks_in_pairs": groups.pairs,
        "kept_apart": [
            {
                "kind": each.kind,
                "name": each.name,
                "bits_per_second": each.rate.bits_per_second,
                "usual_bits_per_second": each.usual.bits_per_second,
                "wanted": each.wanted,
                "steps": each.steps,
            }
            for each in groups.contended
        ],
    }


def rows(explanation: Explanation) -> list[Entries]:
    found = [row for scene in explanation.scenes for row in _rounds(scene)]
    if explanation.coded is not None:
        view = explanation.coded
        found += [_computes(view, rank) for rank in view.allocation.workers]
    if explanation.async_plan is not None:
        traffic, root = explanation.traffic, explanation.async_plan.root
        found += [
            {
                "kind": "worker",
                "rank": rank,
                "answers": root if rank != root else None,
                "sends": traffic.sent[rank],
                "receives": traffic.received[rank],
            }
            for rank in explanation.group.order
        ]
    return found


def _rounds(scene: Scene) -> list[Entries]:
    """A row for each group: its members, its payload, and every message with its time slot."""
    found = []
    for round_ in scene.rounds:
        members = set(round_.group.ranks)
        found.append(
            {
                "kind": "round",
                "step": round_.step,
                "when": round_.when.value,
                "bucket": round_.bucket,
                "payload": round_.payload.name,
                "bytes": round_.payload.nbytes,
                "group": list(round_.group.order),
                "schedule": round_.schedule.name,
                "postcondition": round_.schedule.after.text,
                "chunks": len(round_.schedule.sizes),
                "sequential_moves": scene.sequential_moves,
                "beats": len(scene.slots),
                "moves": [
                    {
                        "beat": slot,
                        "from": message.source,
                        "to": message.target,
                        "chunks": [message.start, message.stop],
                        "then": kind.value,
                    }
                    for slot, arrows in enumerate(scene.slots, start=1)
                    for message, kind in arrows
                    if message.source in members
                ],
            }
        )
    return found


def _code(view: CodedPlanView) -> Entries:
    allocation, said = view.allocation, view.tolerance
    loads = allocation.loads.values()
    return {
        "root": allocation.host,
        "root_computes": allocation.host in allocation.weights,
        "root_answers": view.root_answers,
        "root_traffic": None
        if view.at_root is None
        else {
            "down": view.at_root.results,
            "up": view.at_root.answers,
            "received": view.at_root.received,
        },
        "layers": [list(layer) for layer in allocation.tree.layers() if layer != (TREE_ROOT,)],
        "batch": view.batch,
        "cells": [str(cut) for cut in allocation.cuts],
        "least_load": str(min(loads)),
        "largest_load": str(max(loads)),
        "redundancy": float(view.redundancy),
        "amplification": allocation.amplification,
        "tolerance": {
            "per_parent": said.per_parent,
            "under_every_parent": said.under_every_parent,
            "anywhere": said.anywhere,
            "last_layer": said.leaves,
            "at_best": said.at_best,
            "breaking": list(said.breaking),
            "breaking_last_layer": list(said.breaking_leaves),
            "enough": list(said.enough),
        },
        "waiting": view.waiting,
    }


def _computes(view: CodedPlanView, rank: int) -> Entries:
    allocation = view.allocation
    parent = allocation.tree.parents[rank]
    [team] = [quota for quota in view.quotas(parent) if rank in quota.members]
    return {
        "kind": "worker",
        "rank": rank,
        "answers": None if parent == TREE_ROOT else parent,
        "children": list(allocation.tree.children[rank]),
        "team": list(team.members),
        "team_may_miss": team.spare,
        "load": str(allocation.loads[rank]),
        "parts": [_part(part, str) for part in view.parts(rank)],
        "samples": None if view.batch is None else [_part(p, int) for p in view.samples(rank)],
    }


def _part(part: BatchPart, number: type[int] | type[str]) -> Entries:
    return {"from": number(part.start), "to": number(part.stop), "weight": part.weight}
