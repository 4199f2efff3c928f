"""Thalweg: distributed training as fast as the network at hand allows."""

from thalweg.catalog import parse_plan
from thalweg.errors import ThalwegError
from thalweg.facts import Cluster, Rate, Size, Workload, read_cluster, read_workload
from thalweg.plan import Plan
from thalweg.rounds import Round, compile_rounds
from thalweg.schedules import Group, Schedule, check

__version__ = "0.1.0"

__all__ = [
    "Cluster",
    "Group",
    "Plan",
    "Rate",
    "Round",
    "Schedule",
    "Size",
    "ThalwegError",
    "Workload",
    "__version__",
    "check",
    "compile_rounds",
    "parse_plan",
    "read_cluster",
    "read_workload",
]
