"""What happened to the members of a run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipChange:
    """`left` are ranks that were found dead, silent or hanging; `joined` those that were let in,
    or in again. Moments are those of `time.time()`."""

    formation: int
    step: int
    left: tuple[int, ...]
    joined: tuple[int, ...]
    reason: str
    noticed: float  # this rank learnt of it
    over: float  # its training could go on
    samples: int = 0
    """What was lost with those who left, where replicas differ: their share of the steps since they
    last met others. 0 if a loader of the script's own shares out the samples."""
