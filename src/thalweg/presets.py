"""The presets: names for combinations of a plan's choices.

Every topology is a preset of its own name; these combine a topology with other choices:

    local_sgd(every=8)  =  topology ring, averages parameters, every 8 steps
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from thalweg.declarations import Parameter, Variant
from thalweg.plan import Cadence, Choice
from thalweg.schedules.topologies.shuffle import TOPOLOGY as SHUFFLE

BASELINE_PLAN = "ddp"  # the preset that others are compared with
CODED_PARAMETERS = {
    "stragglers": Parameter(
        kind=int, default=None, least=0, help="tolerated stragglers among the children of a node"
    ),
    "code": Parameter(kind=str, default="fractional", help="name of the gradient code"),
    "root": Parameter(
        kind=str,
        default="worker",
        choices=("worker", "separate"),
        help="rank that decodes: a worker, or a rank that computes nothing",
    ),
    "beyond": Parameter(
        kind=str,
        default="wait",
        choices=("wait", "raise", "partial"),
        help="with more stragglers: wait, fail, or scale up the answers that arrived",
    ),
}


AVERAGED_PARAMETERS = {
    "delay": Parameter(kind=int, default=0, least=0, most=1, help="steps until it is applied"),
    "optimizer": Parameter(
        kind=str,
        default="local",
        choices=("local", "averaged"),
        help="averaged: optimizer state such as momentum is averaged too",
    ),
}


def averaged(values: dict[str, Any]) -> Choice:
    """The tensors that a parameter plan with these values averages."""
    return Choice.of("parameters", {"optimizer": values["optimizer"]})


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A named combination; `choose` maps parameter values to choices (fields of `Plan`). Advice
    tries `variants`; None stands for the preset with default arguments."""

    name: str
    summary: str
    choose: Callable[[dict[str, Any]], dict[str, Any]]
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    variants: tuple[Variant, ...] | None = None


def _local_sgd(values: dict[str, Any]) -> dict[str, Any]:
    by_rack = values["levels"] == "rack"  # racks average at every step, all ranks `every` steps
    return {
        "topology": Choice.of("hierarchical", {"form": "parallel"}) if by_rack else Choice("ring"),
        "what": averaged(values),
        "cadence": Cadence(every=values["every"], inside=by_rack, delay=values["delay"]),
    }


def _coded(values: dict[str, Any]) -> Choice:
    return Choice.of(values["code"], {key: values[key] for key in ("stragglers", "root", "beyond")})


PRESETS = (
    Preset(
        name=BASELINE_PLAN,
        summary="what torch's DistributedDataParallel does",
        choose=lambda values: {"topology": Choice("native")},
        variants=(Variant(text=BASELINE_PLAN, place=0),),
    ),
    Preset(
        name="umw",
        summary="uncoded master and workers: a star",
        choose=lambda values: {"topology": Choice.of("star", {"root": None})},
        variants=(Variant(text="umw", place=7),),
    ),
    Preset(
        name="gc",
        summary="gradient coding: a master that waits for all but a few workers",
        parameters=CODED_PARAMETERS,
        choose=lambda values: {
            "topology": Choice.of("star", {"root": None}),
            "redundancy": _coded(values),
        },
        variants=(),  # codes have them
    ),
    Preset(
        name="codedreduce",
        summary="a tree in which every parent waits for all but a few children",
        parameters={
            "fanout": Parameter(kind=int, default=None, least=2, help="children of a node"),
            **CODED_PARAMETERS,
        },
        choose=lambda values: {
            "topology": Choice.of("tree", {"fanout": values["fanout"]}),
            "redundancy": _coded(values),
        },
        variants=(),
    ),
    Preset(
        name="lgc",
        summary="mean of the fastest k workers; the others' gradients one step later",
        parameters={"k": Parameter(kind=int, default=None, least=1, help="workers to wait for")},
        choose=lambda values: {
            "topology": Choice.of("star", {"root": None}),
            "redundancy": Choice.of("compensate", {"k": values["k"]}),
        },
    ),
    Preset(
        name="asp",
        summary="asynchronous parameter server with bounded staleness",
        parameters={
            "staleness": Parameter(
                kind=int, default=4, least=0, help="steps a worker may be behind"
            )
        },
        choose=lambda values: {
            "topology": Choice.of("star", {"root": None}),
            "cadence": Cadence(staleness=values["staleness"]),
        },
    ),
    Preset(
        name="dssync",
        summary="divide and shuffle: parameters averaged in small groups that take turns",
        parameters={**SHUFFLE.parameters, **AVERAGED_PARAMETERS},
        choose=lambda values: {
            "topology": Choice.of("shuffle", {"adjust": values["adjust"]}),
            "what": averaged(values),
            "cadence": Cadence(delay=values["delay"]),
        },
        variants=(Variant(text="dssync", compressed=True, place=49),),
    ),
    Preset(
        name="local_sgd",
        summary="parameters averaged every few steps",
        parameters={
            "every": Parameter(kind=int, default=8, least=1, help="steps between averages"),
            "levels": Parameter(
                kind=str,
                default="flat",
                choices=("flat", "rack"),
                help="rack: each rack also averages internally at every step",
            ),
            **AVERAGED_PARAMETERS,
        },
        choose=_local_sgd,
        variants=(
            Variant(text="local_sgd(every=8)", compressed=True),
            Variant(text="local_sgd(every=8, levels=rack)", several_racks=True, compressed=True),
            Variant(
                text="local_sgd(every=1, levels=rack, delay=1)",
                several_racks=True,
                compressed=True,
            ),
        ),
    ),
    Preset(
        name="auto",
        summary="the plan that the advisor ranks first on this cluster",
        parameters={
            "allow": Parameter(
                kind=str,
                default="exact",
                choices=("exact", "lossy", "eventual"),
                help="the weakest promise that is acceptable",
            )
        },
        choose=lambda values: {"topology": Choice.of("auto", {"allow": values["allow"]})},
        variants=(),
    ),
)
