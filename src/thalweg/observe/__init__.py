"""The records of a run, and their analysis: stragglers and their causes.

`Step` is one step of one rank, `Journal` keeps them in a file, `Judge` compares those of all ranks,
`Tally` adds them up. Nothing here knows torch or a socket: it judges a run that goes on as it
judges files of one that is over.
"""

from thalweg.observe.records import (
    BucketRecord,
    ClockSample,
    EncodeRecord,
    EventRecord,
    FlowRecord,
    RunHeader,
    StepRecord,
)
from thalweg.observe.step_totals import StepTotals
from thalweg.observe.straggler import Straggler, StragglerKind
from thalweg.observe.straggler_detector import StepReport, StragglerDetector

__all__ = [
    "BucketRecord",
    "ClockSample",
    "EncodeRecord",
    "EventRecord",
    "FlowRecord",
    "RunHeader",
    "StepRecord",
    "StepReport",
    "StepTotals",
    "Straggler",
    "StragglerDetector",
    "StragglerKind",
]
