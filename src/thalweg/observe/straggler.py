"""A straggler and its cause, as a value and as one line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from thalweg.facts import about


class StragglerKind(StrEnum):
    COMPUTE = "compute"  # a rank computes for longer than the others
    NIC = "nic"  # the NIC of a host is slower than others, or than before
    UPLINK = "uplink"  # the uplink of a rack is
    LINK = "link"  # one of several NICs and uplinks is: nothing tells which


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A straggler: `who` are ranks as `3`, hosts or racks, by kind; several if the cause may be any
    of them. `since` is its first step, `steps` the fraction of the latest steps that it delayed,
    and `seconds` its cost per step, which is `share` of the step time."""

    kind: StragglerKind
    who: tuple[str, ...]
    ranks: tuple[int, ...]
    since: int
    steps: float
    seconds: float
    share: float
    why: str

    @property
    def key(self) -> tuple[StragglerKind, tuple[str, ...]]:
        return self.kind, self.who

    def __str__(self) -> str:
        often = "" if self.steps > 0.95 else f", at {100 * self.steps:.0f} % of the steps"
        cost = f"{about(self.seconds, 's')} per step ({100 * self.share:.0f} %)"
        return f"{self.why} since step {self.since}{often}; costs {cost}"

    @classmethod
    def of(cls, entries: Mapping[str, Any]) -> Self:
        lists = {key: tuple(entries[key]) for key in ("who", "ranks")}
        return cls(**{**entries, **lists, "kind": StragglerKind(entries["kind"])})


def log_line(stragglers: Sequence[Straggler], before: Sequence[Straggler] = ()) -> str:
    """The log line for changed stragglers."""
    if stragglers:
        return f"straggler: {'; '.join(map(str, stragglers))}"
    resolved = "; ".join(straggler.why for straggler in before)
    return f"straggler resolved: {resolved}" if resolved else "no stragglers"
