"""Running rounds on a transport."""

from thalweg.runtime.agreement import Agreement, Change
from thalweg.runtime.alarm import Alarm
from thalweg.runtime.arithmetic import Arithmetic, arithmetic_of
from thalweg.runtime.arrivals import Arrival, Arrivals
from thalweg.runtime.engine import Engine, Task
from thalweg.runtime.execute import Part, View, execute, flat
from thalweg.runtime.threads import run_threads
from thalweg.runtime.world import World

__all__ = [
    "Agreement",
    "Alarm",
    "Arithmetic",
    "Arrival",
    "Arrivals",
    "Change",
    "Engine",
    "Part",
    "Task",
    "View",
    "World",
    "arithmetic_of",
    "execute",
    "flat",
    "run_threads",
]
