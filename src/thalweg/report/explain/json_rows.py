"""An explanation as JSON: settings for the whole step, and rows for its rounds and its workers.

Sizes are in bytes, times in seconds, rates in bits per second; ranks, steps, buckets and chunks
are numbered from 0, time slots (`beat`) from 1. Settings, in addition to the plan's five `choices`
and the texts of its promise:

    racks                   the ranks of each rack
    bytes                   the model size
    period, turns, lasts    the steps after which averaging groups repeat; for each of the first of
                            these steps, the ranks of each group and the steps that it lasts
    sequential_moves        the longest chain of moves; null if they weren't counted
    sent, received, links   bytes by rank and by link direction
    slowest_link(_seconds)  the link direction that needs longest for its bytes alone
    uncompressed_seconds    the same without the plan's compressor, if it has one
    mixing                  convergence, if replicas differ (`_mixing`)
    code                    the tree of a code, its loads and its tolerance (`_code`)
    mailbox                 the messages of a plan without rounds: bytes to and from the root

Rows have one of three shapes, of which two are of kind `worker`:

    round                   one round of one group, with all its messages (`_round_row`)
    worker, under a code    the parts of the batch that it computes (`_coded_worker_row`)
    worker, without rounds  the bytes that it sends and receives (`_async_worker_row`)
"""

from __future__ import annotations

from dataclasses import asdict
from math import isfinite
from typing import Any

from thalweg.codes import TREE_ROOT
from thalweg.report.explain.coded_plan import BatchPart, CodedPlanView
from thalweg.report.explain.groups import Groups
from thalweg.report.explain.step_view import AsyncPlanView, Explanation, Scene
from thalweg.schedules import Traffic
from thalweg.steps import Round

Entries = dict[str, Any]
WHEN_READY, AFTER_OPTIMIZER = "when the bucket is ready", "after the optimizer step"


def settings(explanation: Explanation) -> Entries:
    """The entries of the JSON document that concern the whole step."""
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
            "what": plan.averaged,
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
        "turns": [[list(group.ranks) for group in turn] for turn in turns],
        "lasts": [[group.lasts for group in turn] for turn in turns],
        "sequential_moves": explanation.sequential_moves,
        "sent": explanation.traffic.sent,
        "received": explanation.traffic.received,
        "links": {str(link): nbytes for link, nbytes in sorted(explanation.traffic.links.items())},
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
            "story": messages.story,
        }
    return common


def _mixing(groups: Groups) -> Entries | None:
    """The fields of `MixingSummary`, and the contended members (`kept_apart`); None for many
    workers. The drifts are variances in units of one step's noise, None if unbounded; `crossing`
    are the bytes that leave the busiest rack per step, over the model size."""
    summary = groups.mixing
    if summary is None:
        return None
    return {
        **{name: value for name, value in asdict(summary).items() if name != "steps_to_little"},
        "steps_to_1e-3": summary.steps_to_little,
        "drift": summary.drift if isfinite(summary.drift) else None,
        "drift_before": summary.drift_before if isfinite(summary.drift_before) else None,
        "crossing": groups.uplink_traffic,
        "racks_in_pairs": groups.pairs,
        "kept_apart": [
            {
                "kind": member.kind,
                "name": member.name,
                "bits_per_second": member.rate.bits_per_second,
                "usual_bits_per_second": member.usual.bits_per_second,
                "wanted": member.wanted,
                "steps": member.steps,
            }
            for member in groups.contended
        ],
    }


def rows(explanation: Explanation) -> list[Entries]:
    """The rows of the JSON document: first of rounds, then of workers."""
    entries = [
        _round_row(explanation, scene, round_)
        for scene in explanation.scenes
        for round_ in scene.rounds
    ]
    if (view := explanation.coded) is not None:
        entries += [_coded_worker_row(view, rank) for rank in view.allocation.workers]
    if (messages := explanation.async_plan) is not None:
        entries += [
            _async_worker_row(messages, explanation.traffic, rank)
            for rank in explanation.group.order
        ]
    return entries


def _round_row(explanation: Explanation, scene: Scene, round_: Round) -> Entries:
    """A row for one round: its group, its payload, and every message with its time slot. Numbers
    of moves and of slots are those of all rounds that run at the same time; there are no slots if
    the moves of many workers weren't drawn. `chunks` of a move are the first and the one after the
    last; `then` is what the recipient does with them."""
    members = set(round_.group.ranks)
    return {
        "kind": "round",
        "step": explanation.step,
        "when": AFTER_OPTIMIZER if explanation.plan.averages_parameters else WHEN_READY,
        "bucket": scene.bucket,
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


def _code(view: CodedPlanView) -> Entries:
    """The tree of the code, the loads of its workers as fractions of the batch in text, and the
    stragglers that it tolerates. `cells` are the bounds of the batch's cells, which workers compute
    as a whole; `root_answers` is the worker that the root's process answers, if there is one;
    `waiting` the probability that a step waits, if stragglers were measured."""
    allocation, tolerance = view.allocation, view.tolerance
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
            "per_parent": tolerance.per_parent,
            "under_every_parent": tolerance.under_every_parent,
            "anywhere": tolerance.anywhere,
            "last_layer": tolerance.leaves,
            "at_best": tolerance.at_best,
            "breaking": list(tolerance.breaking),
            "breaking_last_layer": list(tolerance.breaking_leaves),
            "enough": list(tolerance.enough),
        },
        "waiting": view.waiting,
    }


def _coded_worker_row(view: CodedPlanView, rank: int) -> Entries:
    """A worker under a code: its parent (`answers`; None for the root) and children, the members of
    its quota and how many of them may be missing, and its parts of the batch: as fractions in text,
    and as samples if the batch is known."""
    allocation = view.allocation
    parent = allocation.tree.parents[rank]
    [quota] = [quota for quota in view.quotas(parent) if rank in quota.members]
    return {
        "kind": "worker",
        "rank": rank,
        "answers": None if parent == TREE_ROOT else parent,
        "children": list(allocation.tree.children[rank]),
        "team": list(quota.members),
        "team_may_miss": quota.spare,
        "load": str(allocation.loads[rank]),
        "parts": [_part(part, str) for part in view.parts(rank)],
        "samples": None if view.batch is None else [_part(p, int) for p in view.samples(rank)],
    }


def _async_worker_row(messages: AsyncPlanView, traffic: Traffic, rank: int) -> Entries:
    """A worker of a plan without rounds: the root that it answers, None if it is the root itself,
    and its traffic in one step of every worker."""
    return {
        "kind": "worker",
        "rank": rank,
        "answers": messages.root if rank != messages.root else None,
        "sends": traffic.sent[rank],
        "receives": traffic.received[rank],
    }


def _part(part: BatchPart, number: type[int] | type[str]) -> Entries:
    return {"from": number(part.start), "to": number(part.stop), "weight": part.weight}
