"""What a check says when something was not as promised."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Violation:
    """`fault` is the number of the one that it follows, if that is known."""

    check: str
    text: str
    fault: int | None = None

    def __str__(self) -> str:
        return f"{self.check}: {self.text}"
