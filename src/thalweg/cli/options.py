"""Options that several commands share, declared once as the fields of a dataclass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, TypeVar, get_type_hints

T = TypeVar("T")


def with_bundles(command: Callable[..., T]) -> Callable[..., T]:
    """The command for typer, in whose signature the fields of each dataclass among the parameters
    stand in place of the dataclass."""
    shown: list[Parameter] = []
    bundles: dict[str, Any] = {}
    hints = get_type_hints(command, include_extras=True)
    for name, own in signature(command).parameters.items():
        if not is_dataclass(kind := hints[name]):
            shown.append(own.replace(kind=Parameter.KEYWORD_ONLY, annotation=kind))
            continue
        bundles[name] = kind
        of_fields = signature(bundles[name]).parameters
        within = get_type_hints(kind, include_extras=True)
        shown += [each.replace(annotation=within[each.name]) for each in of_fields.values()]

    @wraps(command)
    def run(**given: Any) -> T:
        for name, kind in bundles.items():
            given[name] = kind(**{each.name: given.pop(each.name) for each in fields(kind)})
        return command(**given)

    vars(run)["__signature__"] = Signature(shown)
    return run
