"""Clusters emulated with network namespaces: real addresses, links and faults on one machine.

Events can be parsed on any system, as scenario files contain them; labs need Linux.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from thalweg.errors import LabError
from thalweg.lab.event import Event

if TYPE_CHECKING:
    from thalweg.lab.lab import Lab, sweep

__all__ = ["Event", "Lab", "sweep"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'thalweg.lab' has no attribute {name!r}")
    try:
        return getattr(import_module("thalweg.lab.lab"), name)
    except ModuleNotFoundError as error:
        raise LabError(
            f"the lab needs Linux and pyroute2 ({error})",
            "install it there, or use local workers without shaping instead (--workers N)",
        ) from None
