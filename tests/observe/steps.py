"""Steps with given parts, and clusters on which flows share links fairly."""

from __future__ import annotations

from collections.abc import Sequence

from thalweg.facts import Cluster, Link
from thalweg.observe.records import BucketRecord, EncodeRecord, FlowRecord, StepRecord, StepReport


def step_of(
    number: int,
    *,
    computing: float,
    gradients: float = 0.0,
    parameters: float = 0.0,
    settled: float = 0.0,
    begin: float = 0.0,
    rounds: Sequence[BucketRecord] = (),
    encodings: Sequence[EncodeRecord] = (),
    flows: Sequence[FlowRecord] = (),
) -> StepRecord:
    """A third of computing is forward, and a tenth the optimizer's; exposed are averages of
    gradients, and of parameters."""
    first = begin + settled + computing / 3
    last = begin + settled + 0.9 * computing
    averaged = last + gradients
    optimized = averaged + 0.1 * computing
    return StepRecord(
        step=number,
        begin=begin,
        settled=settled,
        first=first,
        last=last,
        averaged=averaged,
        optimized=optimized,
        end=optimized + parameters,
        rounds=tuple(rounds),
        encodings=tuple(encodings),
        flows=tuple(flows),
    )


def report_of(
    number: int, *, computing: float = 0.1, exposed: float = 0.1, flows: Sequence[FlowRecord] = ()
) -> StepReport:
    return StepReport.of(step_of(number, computing=computing, gradients=exposed, flows=flows))


def flows_of(
    pairs: Sequence[tuple[int, int]], nbytes: int, cluster: Cluster, rates: dict[Link, float]
) -> dict[int, list[FlowRecord]]:
    """By source: each pair sends so much, and every link shares its rate, in bytes per second,
    evenly among the flows through it."""
    paths = {pair: cluster.path(*pair) for pair in pairs}
    through = {link: [p for p in pairs if link in paths[p]] for p in pairs for link in paths[p]}
    found: dict[int, list[FlowRecord]] = {}
    for source, target in pairs:
        rate = min(rates[link] / len(through[link]) for link in paths[source, target])
        found.setdefault(source, []).append(FlowRecord(target, nbytes, nbytes / rate))
    return found
