"""Step time predictions without a run, and the choice of a plan."""

from thalweg.facts.situation import suppose
from thalweg.predict.advisor import advise
from thalweg.predict.closed_form import synchronisation_seconds
from thalweg.predict.estimate import Advice, Breakdown, Estimate, Outcome, RankedPlan
from thalweg.predict.predictor import predict
from thalweg.schedules.closed_form import Cost, Symbols

__all__ = [
    "Advice",
    "Breakdown",
    "Cost",
    "Estimate",
    "Outcome",
    "RankedPlan",
    "Symbols",
    "advise",
    "predict",
    "suppose",
    "synchronisation_seconds",
]
