"""Checks of a recorded history: what must hold whatever faults were injected."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import ParamSpec

from thalweg.chaos.history import Violation

P = ParamSpec("P")
Problem = str | tuple[str, int | None]
"""A text, and the number of the fault before it if that is known."""


def check(
    name: str,
) -> Callable[[Callable[P, Iterator[Problem]]], Callable[P, list[Violation]]]:
    """Declare a generator of problems as the check of this name, which returns its violations."""

    def decorate(problems: Callable[P, Iterator[Problem]]) -> Callable[P, list[Violation]]:
        @wraps(problems)
        def violations(*args: P.args, **kwargs: P.kwargs) -> list[Violation]:
            found = problems(*args, **kwargs)
            return [Violation(name, *((p,) if isinstance(p, str) else p)) for p in found]

        return violations

    return decorate
