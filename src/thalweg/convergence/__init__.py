"""Whether replicas averaged in groups come together, how fast, and how far apart they stay."""

from thalweg.convergence.bound import DistanceBound, Problem, distance_bound, reach
from thalweg.convergence.contraction import Contraction, contraction_of, steps_to
from thalweg.convergence.crossing import crossing
from thalweg.convergence.drift import Drift, ExpectedDrift, drift, expected_drift, mean_moved
from thalweg.convergence.mixing import Exchange, Mixing, mixing_of
from thalweg.convergence.outlook import Outlook, outlook, outlook_of

__all__ = [
    "Contraction",
    "DistanceBound",
    "Drift",
    "Exchange",
    "ExpectedDrift",
    "Mixing",
    "Outlook",
    "Problem",
    "contraction_of",
    "crossing",
    "distance_bound",
    "drift",
    "expected_drift",
    "mean_moved",
    "mixing_of",
    "outlook",
    "outlook_of",
    "reach",
    "steps_to",
]
