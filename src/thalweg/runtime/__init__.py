"""Running rounds on a transport, and the processes in which that happens.

What runs rounds needs torch, which takes a second to load: it is loaded when it is first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thalweg.runtime.agreement import Agreement, Change
    from thalweg.runtime.alarm import Alarm
    from thalweg.runtime.arithmetic import Arithmetic, arithmetic_of
    from thalweg.runtime.arrivals import Arrival, Arrivals
    from thalweg.runtime.engine import Chain, Engine, Task
    from thalweg.runtime.execute import Part, View, flat
    from thalweg.runtime.relay import Relay
    from thalweg.runtime.world import World

__all__ = [
    "Agreement",
    "Alarm",
    "Arithmetic",
    "Arrival",
    "Arrivals",
    "Chain",
    "Change",
    "Engine",
    "Part",
    "Relay",
    "Task",
    "View",
    "World",
    "arithmetic_of",
    "flat",
]

_HOMES = {
    "Agreement": "agreement",
    "Alarm": "alarm",
    "Arithmetic": "arithmetic",
    "Arrival": "arrivals",
    "Arrivals": "arrivals",
    "Chain": "engine",
    "Change": "agreement",
    "Engine": "engine",
    "Part": "execute",
    "Relay": "relay",
    "Task": "engine",
    "View": "execute",
    "World": "world",
    "arithmetic_of": "arithmetic",
    "flat": "execute",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"thalweg.runtime.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'thalweg.runtime' has no attribute {name!r}")
