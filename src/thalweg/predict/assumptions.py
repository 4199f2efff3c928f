"""Assumed rates, speeds and times with their sources, used only where nothing was measured.

Rates are *effective*: those that a collective reaches on a link, a fifth of the nominal rate on the
fastest ones. Codec times are those of ResNet-50's 25.6 million elements, and scale with elements;
where only a total is known, its division into encoding and decoding is a guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from thalweg.errors import ClusterError, PlanError, WorkloadError
from thalweg.facts import CodecCost, Costs, Duration, FittedValue, Machine, Workload, model_named
from thalweg.predict.closed_form.ddp_step import AlphaBetaNetwork

RESNET50_ELEMENTS = 25_557_032
ASSUMED_SPREAD_FRACTION = 0.3  # of an assumed value


@dataclass(frozen=True, slots=True)
class AssumedNetwork:
    gbps: float
    latency: float  # seconds per message
    source: str


NETWORKS: Mapping[str, AssumedNetwork] = {
    "1gbe": AssumedNetwork(0.94, 50e-6, "1 Gbit/s less the headers of Ethernet, IP and TCP"),
    "10gbe": AssumedNetwork(9.2, 15e-6, "fitted to ddl-benchmarks, 8 to 32 GPUs, 10GbE"),
    "25gbe": AssumedNetwork(14.0, 12e-6, "between what 10GbE and 100GbE give over TCP"),
    "100gbe": AssumedNetwork(18.0, 11e-6, "fitted to ddl-benchmarks, 8 to 32 GPUs, 100GbE, TCP"),
    "infiniband": AssumedNetwork(40.0, 5e-6, "fitted to ddl-benchmarks, 100 Gbit/s, RDMA"),
}


@dataclass(frozen=True, slots=True)
class AssumedSpeed:
    relative: float  # to V100
    source: str


GPUS: Mapping[str, AssumedSpeed] = {
    "v100": AssumedSpeed(1.0, "what the others are compared with"),
    "a100": AssumedSpeed(2.0, "published training throughputs, float32 against TF32"),
    "h100": AssumedSpeed(4.0, "published training throughputs, about twice those of A100"),
    "1080ti": AssumedSpeed(0.6, "published training throughputs in float32"),
    "t4": AssumedSpeed(0.35, "published training throughputs in float32"),
}


@dataclass(frozen=True, slots=True)
class AssumedStep:
    """The seconds per sample on V100; forward is half of backward, which has twice the products."""

    backward: float
    source: str

    @property
    def forward(self) -> float:
        return self.backward / 2


ASSUMED_STEPS: Mapping[str, AssumedStep] = {
    "resnet50": AssumedStep(
        1.9e-3, "122 ms of backward for 64 images (Agarwal et al.), as recalled"
    ),
    "resnet101": AssumedStep(3.2e-3, "ResNet-50, times their ratio of products"),
    "vgg19": AssumedStep(3.2e-3, "published throughput, 210 images a second"),
    "bert-base": AssumedStep(
        21e-3, "products at the rate of ResNet-50: 250 ms for 12 times 512 tokens"
    ),
    "bert-large": AssumedStep(70e-3, "BERT-base, times their ratio of products"),
    "gpt2": AssumedStep(60e-3, "BERT-base, times their ratio of products, 1024 tokens"),
}
OPTIMIZER_SECONDS_PER_ELEMENT = 3e-11  # on V100: reads and writes at the rate of its memory


def network_named(name: str) -> AlphaBetaNetwork:
    if name not in NETWORKS:
        raise ClusterError(f"there is no network {name!r}", f"there are {', '.join(NETWORKS)}")
    found = NETWORKS[name]
    return AlphaBetaNetwork.of_gbps(found.gbps, found.latency)


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
    step, speed = ASSUMED_STEPS[model], GPUS[gpu].relative
    elements = sum(tensor.elements for tensor in model_named(model).tensors)
    return Costs(
        forward=Duration(batch * step.forward / speed),
        backward=Duration(batch * step.backward / speed),
        optimizer=Duration(elements * OPTIMIZER_SECONDS_PER_ELEMENT / speed),
    )


def workload_of(name: str, gpu: str = "v100", batch: int = 32) -> Workload:
    """A well-known model with its assumed compute times."""
    return replace(model_named(name), costs=costs_of(name, gpu, batch))


@dataclass(frozen=True, slots=True, kw_only=True)
class AssumedCodec:
    """The milliseconds for ResNet-50; `gathered` is per worker's payload."""

    encode: float
    decode: float = 0.0
    gathered: float = 0.0
    source: str

    def cost(self) -> CodecCost:
        def per_element(milliseconds: float) -> FittedValue:
            return FittedValue(milliseconds / 1e3 / RESNET50_ELEMENTS, ASSUMED_SPREAD_FRACTION)

        return CodecCost(
            encode=per_element(self.encode),
            decode=per_element(self.decode),
            gathered=per_element(self.gathered),
        )


_PAPER = "encode and decode on V100 (Agarwal et al.), as recalled"
_SAMPLINGS = "100 times three passes over memory"
_CPU = "measured, one core of an AMD EPYC, 8 workers"
_CPU_SCALED = "one core of an AMD EPYC, measured at other ranks"

ASSUMED_CODECS: Mapping[str, Mapping[str, AssumedCodec]] = {
    "v100": {
        "powersgd(rank=4)": AssumedCodec(encode=30, decode=15, source=_PAPER),
        "powersgd(rank=8)": AssumedCodec(encode=43, decode=21, source=_PAPER),
        "powersgd(rank=16)": AssumedCodec(encode=87, decode=43, source=_PAPER),
        "sign": AssumedCodec(encode=8.3, gathered=1.0, source=_PAPER + ", 8 payloads"),
        "topk(ratio=0.001)": AssumedCodec(encode=232, gathered=1.0, source="as for 0.01"),
        "topk(ratio=0.01)": AssumedCodec(encode=232, gathered=1.0, source=_PAPER),
        "topk(ratio=0.1)": AssumedCodec(encode=281, gathered=1.0, source=_PAPER),
        "topk(ratio=0.2)": AssumedCodec(encode=287, gathered=1.0, source=_PAPER),
        "mstopk(ratio=0.001)": AssumedCodec(encode=40, gathered=1.0, source=_SAMPLINGS),
        "mstopk(ratio=0.01)": AssumedCodec(encode=40, gathered=1.0, source=_SAMPLINGS),
        "mstopk(ratio=0.1)": AssumedCodec(encode=40, gathered=1.0, source=_SAMPLINGS),
        "fp16": AssumedCodec(encode=0.3, decode=0.3, source="two passes over memory"),
    },
    "cpu": {
        "fp16": AssumedCodec(encode=7.7, decode=8.5, source=_CPU),
        "bf16": AssumedCodec(encode=7.7, decode=8.5, source="as fp16"),
        "int8": AssumedCodec(encode=45, decode=32, source=_CPU),
        "qsgd": AssumedCodec(encode=220, gathered=13, source=_CPU),
        "terngrad": AssumedCodec(encode=236, gathered=57, source=_CPU),
        "sign": AssumedCodec(encode=18.6, gathered=5.0, source=_CPU),
        "efsign": AssumedCodec(encode=82, gathered=5.0, source=_CPU),
        "topk(ratio=0.01)": AssumedCodec(encode=149, gathered=9.5, source=_CPU),
        "mstopk(ratio=0.01)": AssumedCodec(encode=283, gathered=9.5, source=_CPU),
        "dgc(ratio=0.01)": AssumedCodec(encode=84, gathered=7.0, source=_CPU),
        "randomk(ratio=0.01)": AssumedCodec(encode=27, decode=13, source=_CPU),
        "randomblock(ratio=0.01)": AssumedCodec(encode=16, decode=8, source=_CPU),
        "powersgd(rank=1)": AssumedCodec(encode=27, decode=19, source=_CPU),
        "powersgd(rank=4)": AssumedCodec(encode=57, decode=38, source=_CPU),
        "powersgd(rank=8)": AssumedCodec(encode=97, decode=63, source=_CPU_SCALED),
        "powersgd(rank=16)": AssumedCodec(encode=177, decode=113, source=_CPU_SCALED),
        "acpsgd(rank=4)": AssumedCodec(encode=28, decode=38, source="half the factors of powersgd"),
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
        codecs={text: codec.cost() for text, codec in table.items()},
        assumed=tuple(f"{text}: {codec.source}" for text, codec in table.items()),
    )
