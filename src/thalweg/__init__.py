"""Thalweg: distributed training as fast as the network at hand allows.

Names that need torch, which takes a second to load, are imported on first access.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

import thalweg_backend
from thalweg.catalog import parse_plan
from thalweg.errors import ThalwegError
from thalweg.facts import (
    Cluster,
    Machine,
    Rate,
    Situation,
    Size,
    Workload,
    read_cluster,
    read_workload,
)
from thalweg.plan import Plan
from thalweg.predict import Advice, Estimate, advise, predict
from thalweg.schedules import Group, Schedule, check
from thalweg.steps import Round, Step, compile_step

if TYPE_CHECKING:
    from thalweg.probing import probe
    from thalweg.training import Run, attach

__version__ = "0.1.0"

if "torch.distributed" in sys.modules:  # otherwise torch finds the backend itself
    thalweg_backend.register()

__all__ = [
    "Advice",
    "Cluster",
    "Estimate",
    "Group",
    "Machine",
    "Plan",
    "Rate",
    "Round",
    "Run",
    "Schedule",
    "Situation",
    "Size",
    "Step",
    "ThalwegError",
    "Workload",
    "__version__",
    "advise",
    "attach",
    "check",
    "compile_step",
    "parse_plan",
    "predict",
    "probe",
    "read_cluster",
    "read_workload",
]


def __getattr__(name: str) -> Any:
    if name in ("Run", "attach"):
        return getattr(import_module("thalweg.training"), name)
    if name == "probe":
        return import_module("thalweg.probing").probe
    raise AttributeError(f"module 'thalweg' has no attribute {name!r}")
