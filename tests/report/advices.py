"""An advice to look at: eight plans on four racks of four, as an advisor could have given it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from thalweg.catalog import default_catalog
from thalweg.declarations import Promise
from thalweg.facts import Cluster, Machine, Situation, Size, Workload
from thalweg.predict.estimate import (
    Advice,
    Breakdown,
    Crossover,
    Estimate,
    Outcome,
    RankedPlan,
    Sweep,
)

LONG = "hierarchical(compress=between)+powersgd(rank=4) @ bucket=4MB"
CODED = "codedreduce(fanout=4, stragglers=1)+fp16"
EXACT, LOSSY, EVENTUAL = Promise.EXACT, Promise.LOSSY, Promise.EVENTUAL
DDP = Breakdown(compute=0.110, transfer=0.415, waiting=0.035)
PARTS = {
    LONG: Breakdown(compute=0.110, encode=0.018, decode=0.009, transfer=0.041, waiting=0.012),
    "dssync+int8": Breakdown(
        compute=0.110, encode=0.006, decode=0.011, transfer=0.064, waiting=0.007
    ),
    "local_sgd(every=8)": Breakdown(compute=0.110, transfer=0.052, waiting=0.035),
    CODED: Breakdown(compute=0.220, encode=0.003, decode=0.004, transfer=0.093),
    "ring+fp16": Breakdown(
        compute=0.110, encode=0.003, decode=0.003, transfer=0.180, waiting=0.035
    ),
    "hierarchical": Breakdown(compute=0.110, transfer=0.214, waiting=0.035),
    "ring": Breakdown(compute=0.110, transfer=0.362, waiting=0.035),
    "ddp": DDP,
}
PROMISES = {LONG: LOSSY, "dssync+int8": EVENTUAL, "local_sgd(every=8)": EVENTUAL, CODED: LOSSY}
PROMISES["ring+fp16"] = LOSSY
WHY = {
    LONG: "uplinks are the bottleneck, and only 1.3% of the bytes cross them",
    "dssync+int8": "only groups of four meet, in a quarter of the bytes",
    "local_sgd(every=8)": "averages once in eight steps",
    CODED: "nobody waits for one late child of any parent, at twice the work",
    "ring+fp16": "half the bytes",
    "hierarchical": "each uplink carries the gradients once each way",
    "ring": "the slowest NIC is full all the time",
    "ddp": "the baseline",
}
RATES = tuple(1e7 * 10 ** (step / 6) for step in range(25))  # 10 Mbit/s to 100 Gbit/s


def estimate(sync: str, parts: Breakdown) -> Estimate:
    low, high = 0.93 * parts.seconds, 1.09 * parts.seconds
    plan = default_catalog().plan(sync)
    return Estimate(plan=plan, parts=parts, low=low, high=high, form="replay")


def advised(sync: str, parts: Breakdown, steps: float = 1.0) -> RankedPlan:
    return RankedPlan(
        estimate=estimate(sync, parts),
        vs_ddp=DDP.seconds / parts.seconds,
        promise=PROMISES.get(sync, EXACT),
        steps=steps,
        survives="one late worker in every group of four" if sync == CODED else "regroups",
        why=WHY.get(sync, "tried"),
    )


def sweep() -> Sweep:
    """What doesn't depend on the links, and a transfer that takes so long at 1 Gbit/s; breaks are
    where two of these lines cross."""
    work = {LONG: (0.149, 0.041), CODED: (0.227, 0.093), "hierarchical": (0.143, 0.214)}
    work["ddp"] = (0.140, 0.415)
    seconds = {
        sync: tuple(fixed + slow * 1e9 / rate for rate in RATES)
        for sync, (fixed, slow) in work.items()
    }
    crossings = ((LONG, "hierarchical"), ("hierarchical", "ddp"), (CODED, "ddp"))
    return Sweep(
        rates=RATES,
        seconds=seconds,
        breaks=tuple(
            Crossover(
                slower_links=below,
                faster_links=above,
                bits_per_second=1e9
                * abs((work[above][1] - work[below][1]) / (work[above][0] - work[below][0])),
            )
            for below, above in crossings
        ),
    )


def cluster() -> Cluster:
    nics = ["1gbit"] * 16
    nics[6] = "500mbit"
    return Cluster.regular([4, 4, 4, 4], nic=nics, uplink=["2gbit", "2gbit", "1gbit", "2gbit"])


def advice(*, swept: bool = True, **facts: Any) -> Advice:
    """An advice in a situation that differs by these facts."""
    workload = replace(Workload.of_size(Size.parse("102MB")), name="resnet50")
    machine = Machine(assumed=("codecs cost what they did on the machine of the defaults",))
    steps = {LONG: 1.05, "dssync+int8": 1.15, "local_sgd(every=8)": 1.25}
    return Advice(
        situation=Situation(
            **{"cluster": cluster(), "workload": workload, "machine": machine, **facts}
        ),
        allow=EVENTUAL,
        ranking=tuple(advised(sync, parts, steps.get(sync, 1)) for sync, parts in PARTS.items()),
        verdict=f"Use {LONG}: a step takes 190 ms instead of 560 ms, since the uplinks are the "
        "bottleneck; plain DDP would do as well from 20 Gbit/s on.",
        assumed=("100us latency", "workers are late independently of each other"),
        left_out={
            "gc(stragglers=1)": "the root's NIC would carry 16 times the gradients",
            "asp": "no bound on staleness was given",
        },
        sweep=sweep() if swept else None,
    )


def measurements() -> list[Outcome]:
    """The coded plan came out slower than its interval."""
    found = {LONG: 0.196, CODED: 0.371, "ddp": 0.548}
    return [
        Outcome(
            sync=sync,
            measured=seconds,
            predicted=PARTS[sync].seconds,
            low=0.93 * PARTS[sync].seconds,
            high=1.09 * PARTS[sync].seconds,
        )
        for sync, seconds in found.items()
    ]
