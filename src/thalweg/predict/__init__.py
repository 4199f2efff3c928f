"""What synchronising would cost, reckoned before anything is run; and which plan to take."""

from thalweg.predict.advice import Advice, Advised
from thalweg.predict.advising import advise
from thalweg.predict.cost import Cost
from thalweg.predict.estimate import Breakdown, Estimate
from thalweg.predict.prediction import predict
from thalweg.predict.symbols import Symbols
from thalweg.predict.synchronisation import synchronisation_seconds
from thalweg.predict.what_if import WhatIf

__all__ = [
    "Advice",
    "Advised",
    "Breakdown",
    "Cost",
    "Estimate",
    "Symbols",
    "WhatIf",
    "advise",
    "predict",
    "synchronisation_seconds",
]
