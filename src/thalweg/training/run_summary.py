"""The figures of a run so far, as one frozen object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from thalweg.facts import Cluster
from thalweg.observe.step_totals import StepTotals, summary_text
from thalweg.observe.straggler import Straggler
from thalweg.predict import Advice
from thalweg.training.compression_overlap import Timing


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """The figures of a run at one moment, as this rank knows them. The first member knows those of
    all ranks."""

    stragglers: tuple[Straggler, ...]
    """The stragglers now, with cause and cost: ranks whose compute time is above the others', and
    slow NICs and uplinks. Empty if there are none."""
    totals: Mapping[int, StepTotals]
    """The total times of the steps by rank: of all ranks on the first member, of this rank alone on
    the others."""
    timings: tuple[Timing, ...]
    """The time of backward, exposed communication and compression in the last steps of this rank.
    Empty under plans without common steps, and under those that average parameters."""
    advice: Advice | None = field(repr=False)
    """The last advice under `auto`, on rank 0."""
    rejected: Mapping[str, int]
    """The number of rejected messages from non-members and former members, by reason."""
    drift: float | None = None
    """The RMS distance of the replicas' parameters from their mean, if it was asked for. It is 0 if
    replicas are bitwise equal, as they should be under exact and lossy plans."""
    residuals: Mapping[str, torch.Tensor] | None = None
    """The residuals of this rank's compressor by parameter, divided by the number of ranks, if they
    were asked for: their sum over all ranks is the part that the mean gradient still lacks."""
    cluster: Cluster = field(repr=False)
    changes: tuple[tuple[int, tuple[Straggler, ...]], ...] = field(repr=False)
    """The stragglers over time: the step of each change, and the stragglers from there on."""

    def table(self) -> str:
        """A table of step times by rank, and the stragglers over time."""
        return summary_text(self.cluster, self.totals, self.changes)
