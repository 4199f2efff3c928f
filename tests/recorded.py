"""Records of runs that never were: so many ranks, whose clocks are seconds apart, one of which may
compute slowly or have a slow NIC. What they should be made into is known beforehand."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from thalweg.observe.journal import Journal
from thalweg.observe.records import (
    BucketRecord,
    ClockSample,
    EncodeRecord,
    EventRecord,
    FlowRecord,
    Record,
    RunHeader,
    StepRecord,
)

START = 1_700_000_000.0  # of the run, by its common clock
FORWARD, BACKWARD, OPTIMIZER, SETTLED = 0.030, 0.060, 0.006, 0.004
AVERAGING = 0.050  # a bucket's, on good links
NBYTES = 4_000_000
BUCKETS = 2
ENCODING = 0.0004  # a bucket's
COMPARED = 10  # steps between two comparisons of clocks
ERROR = 2e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """`slow` ranks compute so many times as long from step `since` to `until`, and hosts with a
    `thin` NIC send at so much of the others' rate; `skews` are how far clocks are off, in seconds,
    and `unknown` the ranks that never compared theirs."""

    ranks: int = 8
    steps: int = 40
    slow: Mapping[int, float] = field(default_factory=dict)
    thin: Mapping[int, float] = field(default_factory=dict)
    since: int = 10
    until: int = 1 << 30
    parameters: bool = False
    drift: float = 20e-6  # seconds a second
    unknown: frozenset[int] = frozenset()

    def skew(self, rank: int) -> float:
        """What the rank's clock shows less than the run's, at its start."""
        return START - 1000.0 - 7.25 * rank

    def own(self, rank: int, at: float) -> float:
        """By the rank's clock, at this moment of the run's."""
        return (at - self.skew(rank)) - self.drift * rank * (at - START)

    def records(self) -> dict[int, list[Record]]:
        noise = random.Random(7)
        found: dict[int, list[Record]] = {rank: [self._opening(rank)] for rank in range(self.ranks)}
        at = dict.fromkeys(range(self.ranks), START)
        for number in range(self.steps):
            if number % COMPARED == 0:
                self._compare(found, at)
            steps, at = self._step(number, at, noise)
            for rank, step in steps.items():
                found[rank].append(step)
        self._compare(found, at)
        over = self.own(0, at[0])
        found[0].append(
            EventRecord(at=over, step=self.steps - 1, topic="incident", text="it is over")
        )
        return found

    def written(self, folder: Path) -> Path:
        for rank, records in self.records().items():
            journal = Journal(folder, rank)
            journal.add(records)
            journal.close()
        return folder

    def _opening(self, rank: int) -> RunHeader:
        return RunHeader(
            rank=rank,
            size=self.ranks,
            host=f"host{rank}",
            rack=f"rack{rank * 2 // self.ranks}",
            members=tuple(range(self.ranks)),
            sync="local_sgd(every=1)" if self.parameters else "ring+fp16",
            at=self.own(rank, START),
            thalweg="0.1.0",
        )

    def _compare(self, records: Mapping[int, list[Record]], at: Mapping[int, float]) -> None:
        for rank, moment in at.items():
            own = self.own(rank, moment)
            if rank not in self.unknown:
                error = 0.0 if rank == 0 else ERROR
                records[rank].append(ClockSample(at=own, offset=moment - own, error=error))

    def _step(
        self, number: int, begin: Mapping[int, float], noise: random.Random
    ) -> tuple[dict[int, StepRecord], dict[int, float]]:
        """All ranks have a bucket before it is averaged; the second leaves while the first is
        still under way."""
        disturbed = self.since <= number <= self.until
        times = {rank: self.slow.get(rank, 1.0) if disturbed else 1.0 for rank in begin}
        passing = AVERAGING / (min([1.0, *self.thin.values()]) if disturbed else 1.0)
        first = {
            r: begin[r] + SETTLED + t * FORWARD + 1e-3 * noise.random() for r, t in times.items()
        }
        last = {r: first[r] + t * BACKWARD for r, t in times.items()}
        applied = {r: t * OPTIMIZER for r, t in times.items()}
        if self.parameters:
            ready = [{r: last[r] + applied[r] for r in times}] * BUCKETS
        else:
            ready = [{r: (first[r] + last[r]) / 2 for r in times}, last]
        starts = [max(each.values()) for each in ready]
        ends = [starts[0] + passing, max(starts[1] + passing, starts[0] + 2 * passing)]
        averaged = last if self.parameters else dict.fromkeys(times, ends[-1])
        optimized = {r: averaged[r] + applied[r] for r in times}
        over = dict.fromkeys(times, ends[-1]) if self.parameters else optimized
        steps = {
            rank: StepRecord(
                step=number,
                begin=self.own(rank, begin[rank]),
                settled=SETTLED,
                first=self.own(rank, first[rank]),
                last=self.own(rank, last[rank]),
                averaged=self.own(rank, averaged[rank]),
                optimized=self.own(rank, optimized[rank]),
                end=self.own(rank, over[rank]),
                rounds=tuple(self._round(rank, b, ready[b], ends[b]) for b in range(BUCKETS)),
                encodings=tuple(self._encoding(rank, b, ready[b][rank]) for b in range(BUCKETS)),
                flows=(self._flow(rank, disturbed),),
                store=0.0004,
            )
            for rank in times
        }
        return steps, over

    def _encoding(self, rank: int, bucket: int, ready: float) -> EncodeRecord:
        began = ready + bucket * ENCODING
        return EncodeRecord(bucket, self.own(rank, began), self.own(rank, began + ENCODING))

    def _round(
        self, rank: int, bucket: int, ready: Mapping[int, float], end: float
    ) -> BucketRecord:
        started = ready[rank] + 0.001
        peers = {peer: max(ready[peer] + 0.002, started) for peer in ready if peer != rank}
        return BucketRecord(
            bucket,
            self.own(rank, ready[rank]),
            self.own(rank, started),
            self.own(rank, end),
            {peer: self.own(rank, came) for peer, came in peers.items()},
        )

    def _flow(self, rank: int, disturbed: bool) -> FlowRecord:
        peer = (rank + 1) % self.ranks
        share = min(self.thin.get(rank, 1.0), self.thin.get(peer, 1.0)) if disturbed else 1.0
        return FlowRecord(peer, NBYTES, 2 * AVERAGING / share)
