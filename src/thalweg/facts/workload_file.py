"""A workload as a TOML file.

name = "mlp"
forward = "10ms"                # seconds of one step on one worker; all may be left out
backward = "20ms"
optimizer = "1ms"
tensors = [
    { name = "in.weight", shape = [512, 784] },
    { name = "in.bias", shape = [512], dtype = "float32", ready = "20ms" },
]
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from thalweg.errors import WorkloadError
from thalweg.facts.toml_reader import TomlTable, format_toml, load_toml, read_toml
from thalweg.facts.units import Duration
from thalweg.facts.workload import Costs, Tensor, Workload

_STEP_COST_FIELDS = ("forward", "backward", "optimizer")


def read_workload(path: Path) -> Workload:
    """Read a workload from a file that `thalweg calibrate` or a person wrote; WorkloadError names
    what is wrong with it, and where."""
    return read_toml(path, parse_workload, WorkloadError)


def parse_workload(text: str) -> Workload:
    table = load_toml(text, "the file", WorkloadError)
    table.only("name", *_STEP_COST_FIELDS, "tensors")
    tensors = table.data.get("tensors")
    if not isinstance(tensors, list):
        raise WorkloadError("the file has no list of tensors", "add tensors = [ ... ]")
    return Workload(
        name=table.name(),
        tensors=tuple(_tensor(tensor) for tensor in tensors),
        costs=Costs(**{cost: table.duration(cost, Duration(0.0)) for cost in _STEP_COST_FIELDS}),
    )


def format_workload(workload: Workload) -> str:
    lines = [f'name = "{workload.name}"']
    for cost in _STEP_COST_FIELDS:
        duration: Duration = getattr(workload.costs, cost)
        if duration.seconds:
            lines.append(f'{cost} = "{duration}"')
    lines += ["tensors = [", *(f"    {_format_tensor(t)}," for t in workload.tensors), "]"]
    return "\n".join(lines) + "\n"


def _tensor(entry: Any) -> Tensor:
    table = TomlTable(entry, "a tensor", WorkloadError)
    name = table.name("tensor")
    table.only("name", "shape", "dtype", "ready")
    return Tensor(
        name=name,
        shape=table.whole_numbers("shape", 0, "shape = [512, 784]"),
        dtype=str(table.data.get("dtype", "float32")),
        ready=table.duration("ready", Duration(0.0)) if "ready" in table else None,
    )


def _format_tensor(tensor: Tensor) -> str:
    dtype = {} if tensor.dtype == "float32" else {"dtype": tensor.dtype}
    ready = {} if tensor.ready is None else {"ready": tensor.ready}
    return format_toml({"name": tensor.name, "shape": list(tensor.shape), **dtype, **ready})
