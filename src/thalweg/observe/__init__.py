"""The records of a run, and their analysis: stragglers and their causes.

`StepRecord` is one step of one rank, `Journal` keeps records in a file, `StragglerDetector`
compares the steps of all ranks, and `StepTotals` adds them up. The analysis needs neither torch nor
a socket: it treats a run in progress and the files of a finished run alike.
"""

from thalweg.observe.records import (
    BucketRecord,
    ClockSample,
    EncodeRecord,
    EventRecord,
    FlowRecord,
    RunHeader,
    StepRecord,
    StepReport,
)
from thalweg.observe.step_totals import StepTotals
from thalweg.observe.straggler import Straggler, StragglerKind
from thalweg.observe.straggler_detector import StragglerDetector

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
