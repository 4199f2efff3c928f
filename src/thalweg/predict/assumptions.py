"""Assumed rates, speeds and times with their sources, used only where nothing was measured.

Rates are *effective*: those that a collective reaches on a link, a fifth of the nominal rate on the
fastest ones. Codec times are those of ResNet-50's 25.6 million elements, and scale with elements;
where only a total is known, its division into encoding and decoding is a guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from thalweg.errors import ClusterError, PlanError, WorkloadError
from thalweg.facts import CodecCost, Costs, Duration, FittedValue, Machine, Workload, model_named
from thalweg.predict.ddp_step import AlphaBetaNetwork

RESNET50_ELEMENTS = 25_557_032
ASSUMED_SPREAD_FRACTION = 0.3  # of an assumed value


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Assumed(Generic[T]):
    value: T
    source: str


NETWORKS: Mapping[str, Assumed[AlphaBetaNetwork]] = {
    name: Assumed(AlphaBetaNetwork.of_gbps(gbps, latency), source)
    for name, gbps, latency, source in (
        ("1gbe", 0.94, 50e-6, "1 Gbit/s less the headers of Ethernet, IP and TCP"),
        ("10gbe", 9.2, 15e-6, "fitted to ddl-benchmarks, 8 to 32 GPUs, 10GbE"),
        ("25gbe", 14.0, 12e-6, "between what 10GbE and 100GbE give over TCP"),
        ("100gbe", 18.0, 11e-6, "fitted to ddl-benchmarks, 8 to 32 GPUs, 100GbE, TCP"),
        ("infiniband", 40.0, 5e-6, "fitted to ddl-benchmarks, 100 Gbit/s, RDMA"),
    )
}
# Speeds relative to V100.
GPUS: Mapping[str, Assumed[float]] = {
    "v100": Assumed(1.0, "what the others are compared with"),
    "a100": Assumed(2.0, "published training throughputs, float32 against TF32"),
    "h100": Assumed(4.0, "published training throughputs, about twice those of A100"),
    "1080ti": Assumed(0.6, "published training throughputs in float32"),
    "t4": Assumed(0.35, "published training throughputs in float32"),
}
# Seconds of backward per sample on V100; forward is half of it, which has twice the products.
ASSUMED_STEPS: Mapping[str, Assumed[float]] = {
    "resnet50": Assumed(1.9e-3, "122 ms of backward for 64 images (Agarwal et al.), as recalled"),
    "resnet101": Assumed(3.2e-3, "ResNet-50, times their ratio of products"),
    "vgg19": Assumed(3.2e-3, "published throughput, 210 images a second"),
    "bert-base": Assumed(
        21e-3, "products at the rate of ResNet-50: 250 ms for 12 times 512 tokens"
    ),
    "bert-large": Assumed(70e-3, "BERT-base, times their ratio of products"),
    "gpt2": Assumed(60e-3, "BERT-base, times their ratio of products, 1024 tokens"),
}
OPTIMIZER_SECONDS_PER_ELEMENT = 3e-11  # on V100: reads and writes at the rate of its memory


def network_named(name: str) -> AlphaBetaNetwork:
    if name not in NETWORKS:
        raise ClusterError(f"there is no network {name!r}", f"there are {', '.join(NETWORKS)}")
    return NETWORKS[name].value


def costs_of(model: str, gpu: str, batch: int) -> Costs:
    """The compute times of a step with this many samples per worker."""
    if model not in ASSUMED_STEPS:
        raise WorkloadError(
            f"the step time of {model!r} is not known",
            f"there are {', '.join(ASSUMED_STEPS)}, or give a workload file with forward and "
            "backward",
        )
    if gpu not in GPUS:
        raise WorkloadError(f"there is no GPU {gpu!r}", f"there are {', '.join(GPUS)}")
    backward, speed = batch * ASSUMED_STEPS[model].value, GPUS[gpu].value
    elements = sum(tensor.elements for tensor in model_named(model).tensors)
    return Costs(
        forward=Duration(backward / 2 / speed),
        backward=Duration(backward / speed),
        optimizer=Duration(elements * OPTIMIZER_SECONDS_PER_ELEMENT / speed),
    )


def workload_of(name: str, gpu: str = "v100", batch: int = 32) -> Workload:
    """A well-known model with its assumed compute times."""
    return replace(model_named(name), costs=costs_of(name, gpu, batch))


def _codec(
    source: str, *, encode: float, decode: float = 0.0, gathered: float = 0.0
) -> Assumed[CodecCost]:
    """The cost from the milliseconds for ResNet-50; `gathered` is per worker's payload."""
    milliseconds = {"encode": encode, "decode": decode, "gathered": gathered}
    per_element = {
        name: FittedValue(each / 1e3 / RESNET50_ELEMENTS, ASSUMED_SPREAD_FRACTION)
        for name, each in milliseconds.items()
    }
    return Assumed(CodecCost(**per_element), source)


_PAPER = "encode and decode on V100 (Agarwal et al.), as recalled"
_SAMPLINGS = "100 times three passes over memory"
_CPU = "measured, one core of an AMD EPYC, 8 workers"
_CPU_SCALED = "one core of an AMD EPYC, measured at other ranks"

ASSUMED_CODECS: Mapping[str, Mapping[str, Assumed[CodecCost]]] = {
    "v100": {
        "powersgd(rank=4)": _codec(_PAPER, encode=30, decode=15),
        "powersgd(rank=8)": _codec(_PAPER, encode=43, decode=21),
        "powersgd(rank=16)": _codec(_PAPER, encode=87, decode=43),
        "sign": _codec(_PAPER + ", 8 payloads", encode=8.3, gathered=1.0),
        "topk(ratio=0.001)": _codec("as for 0.01", encode=232, gathered=1.0),
        "topk(ratio=0.01)": _codec(_PAPER, encode=232, gathered=1.0),
        "topk(ratio=0.1)": _codec(_PAPER, encode=281, gathered=1.0),
        "topk(ratio=0.2)": _codec(_PAPER, encode=287, gathered=1.0),
        "mstopk(ratio=0.001)": _codec(_SAMPLINGS, encode=40, gathered=1.0),
        "mstopk(ratio=0.01)": _codec(_SAMPLINGS, encode=40, gathered=1.0),
        "mstopk(ratio=0.1)": _codec(_SAMPLINGS, encode=40, gathered=1.0),
        "fp16": _codec("two passes over memory", encode=0.3, decode=0.3),
    },
    "cpu": {
        "fp16": _codec(_CPU, encode=7.7, decode=8.5),
        "bf16": _codec("as fp16", encode=7.7, decode=8.5),
        "int8": _codec(_CPU, encode=45, decode=32),
        "qsgd": _codec(_CPU, encode=220, gathered=13),
        "terngrad": _codec(_CPU, encode=236, gathered=57),
        "sign": _codec(_CPU, encode=18.6, gathered=5.0),
        "efsign": _codec(_CPU, encode=82, gathered=5.0),
        "topk(ratio=0.01)": _codec(_CPU, encode=149, gathered=9.5),
        "mstopk(ratio=0.01)": _codec(_CPU, encode=283, gathered=9.5),
        "dgc(ratio=0.01)": _codec(_CPU, encode=84, gathered=7.0),
        "randomk(ratio=0.01)": _codec(_CPU, encode=27, decode=13),
        "randomblock(ratio=0.01)": _codec(_CPU, encode=16, decode=8),
        "powersgd(rank=1)": _codec(_CPU, encode=27, decode=19),
        "powersgd(rank=4)": _codec(_CPU, encode=57, decode=38),
        "powersgd(rank=8)": _codec(_CPU_SCALED, encode=97, decode=63),
        "powersgd(rank=16)": _codec(_CPU_SCALED, encode=177, decode=113),
        "acpsgd(rank=4)": _codec("half the factors of powersgd", encode=28, decode=38),
    },
}


def assumed_machine(codecs: str = "cpu") -> Machine:
    """A machine whose codecs run on a `v100` or a `cpu`, at assumed speeds."""
    if codecs not in ASSUMED_CODECS:
        raise PlanError(
            f"there are no codec times for {codecs!r}", f"use {', '.join(ASSUMED_CODECS)}"
        )
    table = ASSUMED_CODECS[codecs]
    return Machine(
        codecs={text: codec.value for text, codec in table.items()},
        assumed=tuple(f"{text}: {codec.source}" for text, codec in table.items()),
    )
