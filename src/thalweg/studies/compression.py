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

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from thalweg.bench.compress_costs import method_of
from thalweg.facts import CodecCost, Machine, Size, Tensor, Workload
from thalweg.predict.assumptions import assumed_machine, workload_of
from thalweg.predict.closed_form import ddp_step
from thalweg.predict.closed_form.ddp_step import (
    AlphaBetaNetwork,
    CodecTimes,
    CompressedStep,
    SentPayload,
    UncompressedStep,
)

STUDY_BUCKET_SIZE = Size.parse("25MiB")
STUDY_MESSAGE_SECONDS = 15e-6  # TCP in a data centre
DATA_CENTRE_GBPS = 10.0
STUDY_JOBS: Mapping[str, tuple[int, ...]] = {
    "resnet50": (16, 32, 64),
    "resnet101": (16, 32, 64),
    "bert-base": (4, 8, 12),
}
STUDY_WORKER_COUNTS = (64,)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """The sources of step and codec times; `two_shot` is True if shards are reduced."""

    name: str
    whose: str  # in words, for headings
    machine: Machine
    methods: Sequence[str]
    two_shot: bool
    gpu: str = "v100"


def paper_constants() -> Constants:
    machine = assumed_machine("v100")
    return Constants(
        name="paper",
        whose="the paper's V100",
        machine=machine,
        methods=PAPER_METHODS,
        two_shot=False,
    )


def constants_of(machine: Machine, whose: str = "your machine") -> Constants:
    methods = list(machine.codecs)
    return Constants(name="yours", whose=whose, machine=machine, methods=methods, two_shot=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionCase:
    model: str
    batch: int
    workers: int
    gbps: float
    method: str
    dense: float  # seconds
    compressed: float

    @property
    def vs_ddp(self) -> float:
        """Speed-up: above 1 is faster."""
        return self.dense / self.compressed

    @property
    def wins(self) -> bool:
        return self.compressed < self.dense


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """The rate in Gbit/s below which a compressor pays: 0 is never, inf always."""

    model: str
    batch: int
    workers: int
    method: str
    gbps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sufficient:
    """The compression ratio, at no cost, with which links keep up with backward."""

    model: str
    batch: int
    workers: int
    gbps: float
    ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionStudy:
    constants: Constants
    outcomes: Sequence[CompressionCase]
    break_evens: Sequence[BreakEven]  # of each model with its largest batch, on the most workers
    ratios: Sequence[Sufficient]  # at 10 Gbit/s, on the most workers

    @property
    def in_data_centres(self) -> list[CompressionCase]:
        return [each for each in self.outcomes if each.gbps >= DATA_CENTRE_GBPS]


def wins(outcomes: Iterable[CompressionCase]) -> tuple[int, int]:
    """The number of cases in which compression wins, and of all cases."""
    found = [each.wins for each in outcomes]
    return sum(found), len(found)


def run_compression_study(
    constants: Constants,
    *,
    jobs: Mapping[str, Sequence[int]] = STUDY_JOBS,
    workers: Sequence[int] = STUDY_WORKER_COUNTS,
    rates: Sequence[float] = STUDY_RATES_GBPS,
) -> CompressionStudy:
    outcomes: list[CompressionCase] = []
    break_evens: list[BreakEven] = []
    ratios: list[Sufficient] = []
    for model, batches in jobs.items():
        for batch in batches:
            workload = workload_of(model, constants.gpu, batch)
            for many in workers:
                outcomes += _outcomes(constants, workload, batch, many, rates)
            ratios.append(_sufficient(workload, batch, max(workers)))
        workload = workload_of(model, constants.gpu, max(batches))
        break_evens += _break_evens(constants, workload, max(batches), max(workers))
    return CompressionStudy(
        constants=constants, outcomes=outcomes, break_evens=break_evens, ratios=ratios
    )


def _outcomes(
    constants: Constants, workload: Workload, batch: int, workers: int, rates: Sequence[float]
) -> Iterator[CompressionCase]:
    dense = dense_step(workload, workers)
    for method in constants.methods:
        compressed = compressed_step(constants, method, workload, workers)
        for gbps in rates:
            network = AlphaBetaNetwork.of_gbps(gbps, STUDY_MESSAGE_SECONDS)
            yield CompressionCase(
                model=workload.name,
                batch=batch,
                workers=workers,
                gbps=gbps,
                method=method,
                dense=dense.seconds(network),
                compressed=compressed.seconds(network),
            )


def _break_evens(
    constants: Constants, workload: Workload, batch: int, workers: int
) -> Iterator[BreakEven]:
    dense = dense_step(workload, workers)
    for method in constants.methods:
        compressed = compressed_step(constants, method, workload, workers)
        below = ddp_step.pays_below(dense, compressed, STUDY_MESSAGE_SECONDS)
        yield BreakEven(
            model=workload.name,
            batch=batch,
            workers=workers,
            method=method,
            gbps=8 * below / 1e9,
        )


def _sufficient(workload: Workload, batch: int, workers: int) -> Sufficient:
    network = AlphaBetaNetwork.of_gbps(DATA_CENTRE_GBPS, STUDY_MESSAGE_SECONDS)
    return Sufficient(
        model=workload.name,
        batch=batch,
        workers=workers,
        gbps=DATA_CENTRE_GBPS,
        ratio=ddp_step.sufficient_ratio(dense_step(workload, workers), network),
    )


def dense_step(workload: Workload, workers: int) -> UncompressedStep:
    return UncompressedStep(
        compute=workload.costs.backward.seconds,
        buckets=[bucket.nbytes for bucket in workload.buckets(STUDY_BUCKET_SIZE)],
        workers=workers,
    )


def compressed_step(
    constants: Constants, method: str, workload: Workload, workers: int
) -> CompressedStep:
    compressor = method_of(method).compressor
    shards = constants.two_shot and compressor.elementwise and workers > 2
    gathers = not compressor.summable and not shards
    collective = ddp_step.all_gather if gathers else ddp_step.ring
    return CompressedStep(
        compute=workload.costs.backward.seconds,
        codec=_codec(constants.machine.codecs[method], workload, all_payloads=gathers),
        payloads=[
            SentPayload(nbytes, ddp_step.ring if exact else collective)
            for nbytes, exact in _payloads(method, workload.tensors)
        ],
        workers=workers,
    )


def _codec(cost: CodecCost, workload: Workload, *, all_payloads: bool) -> CodecTimes:
    """The codec times; a rank that reduces a shard decodes a p-th of every payload, and then the
    sums of all shards."""
    elements = sum(tensor.elements for tensor in workload.tensors)
    decode = cost.decode.value if all_payloads else cost.decoding_shards
    own = cost.bucket.value + (cost.encode.value + decode) * elements
    return CodecTimes(own=own, gathered=cost.gathered.value * elements if all_payloads else 0.0)


@lru_cache(maxsize=256)  # the same for every batch, and any number of workers
def _payloads(method: str, tensors: tuple[Tensor, ...]) -> tuple[tuple[float, bool], ...]:
    """The bytes of each payload and whether it is uncompressed, averaged over differing steps."""
    found = method_of(method)
    compressor, arguments = found.compressor, found.arguments
    steps = [compressor.payloads(tensors, step, **arguments) for step in range(compressor.period)]
    if len(steps) == 1:
        return tuple((payload.nbytes, payload.exact) for payload in steps[0])
    mean = {
        exact: sum(p.nbytes for step in steps for p in step if p.exact is exact) / len(steps)
        for exact in (False, True)
    }
    return tuple((nbytes, exact) for exact, nbytes in mean.items() if nbytes)
