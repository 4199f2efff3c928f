"""What a family of gradient codes declares. A file in this folder holds a `CODE`, and nothing else
changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from thalweg.declarations import Code


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeFamily:
    name: str
    summary: str
    make: Callable[..., Code]  # (members, stragglers=)
