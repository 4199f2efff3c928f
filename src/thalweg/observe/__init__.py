"""What a run leaves behind, and what can be read from it: who was late and why.

`Step` is one step of one rank, `Journal` keeps them in a file, `Judge` compares those of all ranks,
`Tally` adds them up. Nothing here knows torch or a socket: it judges a run that goes on as it
judges files of one that is over.
"""

from thalweg.observe.records import Encoding, Flow, Moment, Note, Opening, Round, Step
from thalweg.observe.step_totals import Tally
from thalweg.observe.straggler import Kind, Late
from thalweg.observe.straggler_detector import Judge, Report

__all__ = [
    "Encoding",
    "Flow",
    "Judge",
    "Kind",
    "Late",
    "Moment",
    "Note",
    "Opening",
    "Report",
    "Round",
    "Step",
    "Tally",
]
