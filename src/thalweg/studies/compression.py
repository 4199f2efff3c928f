"""The study of Agarwal et al. (MLSys 2022) on whether compression pays, over many configurations.

Each configuration is a model with a batch per worker, a number of workers, a link rate, and a
compressor. Its step time is compared with DDP's (`ddp_step`), in seconds from the begin of
backward. Buckets are DDP's 25 MB, from real shapes. Compression follows backward, as in the paper,
for all tensors at once.

There are two sets of constants. *Paper*: its encode and decode times on V100, and an all-gather of
payloads that can't be summed. *Yours*: a machine's codecs, and two shots for payloads whose shards
can be reduced, where that sends less.

The grid is that of the paper's repository (uw-mad-dash/GradCompressionUtility): 16 hosts with 4
V100 each; ResNet-50 and -101 with 16, 32 and 64 images per worker, and BERT; PowerSGD, SignSGD,
Top-K and MSTop-K at the ranks and ratios below; links limited to 1, 2, 4, 8 and 20 Gbit/s, and the
10 of those hosts (p3.8xlarge) themselves. BERT's batch isn't given: 4, 8 and 12 sequences of 512
tokens are assumed. A data centre's links are those of these hosts, or faster.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from thalweg.bench.compress_costs import PayloadPattern, exchange_of, method_of, pays_row
from thalweg.catalog import default_catalog
from thalweg.facts import CodecCost, Machine, Size, Tensor, Workload
from thalweg.predict import ddp_step
from thalweg.predict.assumptions import assumed_machine, workload_of
from thalweg.predict.ddp_step import AlphaBetaNetwork, DdpStep, SentPayload

STUDY_BUCKET_SIZE = Size.parse("25MiB")
STUDY_MESSAGE_SECONDS = 15e-6  # TCP in a data centre
DATA_CENTRE_GBPS = 10.0
STUDY_JOBS: Mapping[str, tuple[int, ...]] = {
    "resnet50": (16, 32, 64),
    "resnet101": (16, 32, 64),
    "bert-base": (4, 8, 12),
}
STUDY_WORKER_COUNT = 64
STUDY_GPU = "v100"
STUDY_RATES_GBPS = (1.0, 2.0, 4.0, 8.0, 10.0, 20.0)
PAPER_METHODS = (
    "powersgd(rank=4)",
    "powersgd(rank=8)",
    "powersgd(rank=16)",
    "sign",
    "topk(ratio=0.2)",
    "topk(ratio=0.1)",
    "topk(ratio=0.01)",
    "topk(ratio=0.001)",
    "mstopk(ratio=0.1)",
    "mstopk(ratio=0.01)",
    "mstopk(ratio=0.001)",
)


Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """The sources of step and codec times; `two_shot` is True if shards are reduced."""

    name: str
    whose: str  # in words, for headings
    machine: Machine
    methods: Sequence[str]
    two_shot: bool


def paper_constants() -> Constants:
    return Constants(
        name="paper",
        whose="the paper's V100",
        machine=assumed_machine(STUDY_GPU),
        methods=PAPER_METHODS,
        two_shot=False,
    )


def constants_of(machine: Machine, whose: str = "your machine") -> Constants:
    return Constants(
        name="yours", whose=whose, machine=machine, methods=list(machine.codecs), two_shot=True
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionStudy:
    """The results of the study as rows, each of a model with a batch. The rate below which a
    compressor pays is that of the model's largest batch; the ratio is the one with which links of
    10 Gbit/s keep up with backward, at no cost."""

    constants: Constants
    cases: Sequence[Row]  # for each compressor and rate; `vs_ddp` is the speed-up
    break_evens: Sequence[Row]
    ratios: Sequence[Row]

    @property
    def in_data_centres(self) -> list[Row]:
        return [row for row in self.cases if row["gbps"] >= DATA_CENTRE_GBPS]


def wins(cases: Iterable[Row]) -> tuple[int, int]:
    """The number of cases in which compression wins, and of all cases."""
    faster = [row["vs_ddp"] > 1 for row in cases]
    return sum(faster), len(faster)


def run_compression_study(
    constants: Constants, rates: Sequence[float] = STUDY_RATES_GBPS
) -> CompressionStudy:
    networks = {gbps: AlphaBetaNetwork.of_gbps(gbps, STUDY_MESSAGE_SECONDS) for gbps in rates}
    fast = AlphaBetaNetwork.of_gbps(DATA_CENTRE_GBPS, STUDY_MESSAGE_SECONDS)
    cases: list[Row] = []
    break_evens: list[Row] = []
    ratios: list[Row] = []
    for model, batches in STUDY_JOBS.items():
        for batch in batches:
            job = {"model": model, "batch": batch, "workers": STUDY_WORKER_COUNT}
            workload = workload_of(model, STUDY_GPU, batch)
            dense = dense_step(workload, STUDY_WORKER_COUNT)
            ratio = ddp_step.sufficient_ratio(dense, fast)
            ratios.append({**job, "gbps": DATA_CENTRE_GBPS, "ratio": ratio})
            for method in constants.methods:
                compressed = compressed_step(constants, method, workload, STUDY_WORKER_COUNT)
                for gbps, network in networks.items():
                    vs_ddp = dense.seconds(network) / compressed.seconds(network)
                    cases.append({**job, "gbps": gbps, "method": method, "vs_ddp": vs_ddp})
                if batch == max(batches):
                    below = 8 * ddp_step.pays_below(dense, compressed, STUDY_MESSAGE_SECONDS)
                    break_evens.append({**job, "method": method, **pays_row(below)})
    return CompressionStudy(
        constants=constants, cases=cases, break_evens=break_evens, ratios=ratios
    )


def dense_step(workload: Workload, workers: int) -> DdpStep:
    buckets = [bucket.nbytes for bucket in workload.buckets(STUDY_BUCKET_SIZE)]
    return DdpStep.uncompressed(workload.costs.backward.seconds, buckets, workers)


def compressed_step(constants: Constants, method: str, workload: Workload, workers: int) -> DdpStep:
    pattern = exchange_of(method_of(method), workers)
    if pattern is PayloadPattern.TWO_SHOT and not constants.two_shot:
        pattern = PayloadPattern.ALL_GATHER
    gathers = pattern is PayloadPattern.ALL_GATHER
    return DdpStep(
        backward=workload.costs.backward.seconds,
        codec=_codec_seconds(
            constants.machine.codecs[method], workload, gathered=workers if gathers else 0
        ),
        exposed=[
            SentPayload(nbytes) if exact else pattern.sent(nbytes)
            for nbytes, exact in _payloads(method, workload.tensors)
        ],
        workers=workers,
    )


def _codec_seconds(cost: CodecCost, workload: Workload, *, gathered: int) -> float:
    """The seconds of T_ed with this many gathered payloads, each of which every rank decodes. If
    there are none, a rank decodes a p-th of every payload, and then the sums of all shards."""
    elements = sum(tensor.elements for tensor in workload.tensors)
    decode = cost.decode.value if gathered else cost.decoding_shards
    own = cost.bucket.value + (cost.encode.value + decode) * elements
    return own + cost.gathered.value * elements * gathered


@lru_cache(maxsize=256)  # the same for every batch, and any number of workers
def _payloads(method: str, tensors: tuple[Tensor, ...]) -> tuple[tuple[float, bool], ...]:
    """The bytes of each payload and whether it is uncompressed, averaged over differing steps."""
    found = method_of(method)
    compressor, arguments = default_catalog().compressors[found.name], found.arguments
    steps = [compressor.payloads(tensors, step, **arguments) for step in range(compressor.period)]
    if len(steps) == 1:
        return tuple((payload.nbytes, payload.exact) for payload in steps[0])
    mean = {
        exact: sum(p.nbytes for step in steps for p in step if p.exact is exact) / len(steps)
        for exact in (False, True)
    }
    return tuple((nbytes, exact) for exact, nbytes in mean.items() if nbytes)
