"""Parts are found in folders of Thalweg, by a constant of their modules, and in other installed
packages, by entry points for topologies, compressors and codes:

    [project.entry-points."thalweg.topologies"]
    line = "my_package.line:TOPOLOGY"

All processes read the metadata of the packages installed there, so workers find the same parts as
the command that starts them. A part that can't be used is refused with a reason; nothing else
breaks.
"""

from __future__ import annotations

import pkgutil
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from thalweg.declarations import Parameter, Variant
from thalweg.errors import PlanError
from thalweg.plan import WORD_PATTERN

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINT_GROUPS = {
    "topology": "thalweg.topologies",
    "compressor": "thalweg.compressors",
    "code": "thalweg.codes",
}


def declared(package: ModuleType, constant: str) -> dict[str, Any]:
    """The values that a folder's modules declare under this constant, by name."""
    modules = (
        import_module(f"{package.__name__}.{module.name}")
        for module in pkgutil.iter_modules(package.__path__)
    )
    return by_name([getattr(module, constant) for module in modules if hasattr(module, constant)])


def by_name(parts: Sequence[Any]) -> dict[str, Any]:
    named = {part.name: part for part in parts}
    for name, times in Counter(part.name for part in parts).items():
        if times > 1:
            raise PlanError(f"{times} parts are called {name!r}", "rename all but one")
    return named


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledPart:
    """A part with the package that it comes from; or the `problem` that keeps it from being used,
    in which case `name` is the entry point's."""

    kind: str
    name: str
    origin: str  # name and version of the package
    part: Any = None
    problem: str = ""


def installed_parts(types: Mapping[str, type]) -> Iterator[InstalledPart]:
    """The parts of these types, one for each kind, in the order of packages and entry points."""
    from importlib.metadata import entry_points  # here, as it takes as long as all else together

    found = entry_points()
    for kind, group in ENTRY_POINT_GROUPS.items():
        for entry in sorted(found.select(group=group), key=lambda e: (origin_of(e), e.name)):
            yield _loaded(kind, entry, types[kind])


def origin_of(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else "an unnamed package"


def _loaded(kind: str, entry: EntryPoint, expected: type) -> InstalledPart:
    origin = origin_of(entry)
    try:
        part = entry.load()
        problem = _mistake(part, expected)
    except Exception as error:  # whatever the other package's code raises
        part, problem = None, f"loading {entry.value} failed: {type(error).__name__}: {error}"
    if problem:
        return InstalledPart(kind=kind, name=entry.name, origin=origin, problem=problem)
    return InstalledPart(kind=kind, name=part.name, origin=origin, part=part)


def _mistake(part: Any, expected: type) -> str:
    """The mistake in a declaration; empty if there is none."""
    if not isinstance(part, expected):
        return f"its type is {type(part).__name__}, not {expected.__name__}"
    name = getattr(part, "name", None)
    if not re.fullmatch(WORD_PATTERN, str(name)) or name != str(name).lower():
        return f"its name {name!r} is not a lower-case word"
    for argument, parameter in getattr(part, "parameters", {}).items():
        if not isinstance(parameter, Parameter):
            return (
                f"the type of its argument {argument} is {type(parameter).__name__}, not Parameter"
            )
    declared = getattr(part, "variants", None) or ()
    variant = str if getattr(part, "sizes", None) else Variant
    for each in declared:
        if not isinstance(each, variant):
            return (
                f"the type of its variant {each!r} is {type(each).__name__}, not {variant.__name__}"
            )
    return ""
