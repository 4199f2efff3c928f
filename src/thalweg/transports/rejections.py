"""What came and wasn't handed out, and how often.

Some of it is a matter of course: who is late, or was cut off, still speaks for an older formation.
The rest comes from a stranger or from a defect, and is said once in a while in the log.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from enum import Enum
from threading import Lock
from time import monotonic

log = logging.getLogger("thalweg")
REJECTION_LOG_PERIOD_SECONDS = 60.0  # seconds between two lines in the log


class RejectionReason(Enum):
    STALE = "messages of an older formation"
    OUTSIDER = "messages from a rank that isn't in the formation"
    TOO_EARLY = "messages of a formation that it hasn't entered, more than it keeps for later"
    UNFINISHED = "connections that ended before they said who they are"
    STRANGER = "connections of strangers"
    FORGED = "connections and addresses in another rank's name, or without the job's secret"
    MALFORMED = "messages not of our making, or of another version"
    TAMPERED = "messages that were changed, repeated or reordered on their way"
    TRUNCATED = "messages whose connection ended before all of them had come"
    TOO_LARGE = "messages longer than there is memory for"

    @property
    def is_suspicious(self) -> bool:
        return self not in _USUAL_REJECTIONS


_USUAL_REJECTIONS = (
    RejectionReason.STALE,
    RejectionReason.OUTSIDER,
    RejectionReason.TOO_EARLY,
    RejectionReason.UNFINISHED,
    RejectionReason.TRUNCATED,
)


class RejectionCounter(Mapping[RejectionReason, int]):
    """Of one rank; counted by any thread."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._counts: Counter[RejectionReason] = Counter()
        self._lock = Lock()
        self._quiet_until = 0.0

    def count(self, why: RejectionReason, number: int = 1, *, peer: int | None = None) -> None:
        """`peer` is whose connection it came by, where that is known."""
        if not number:
            return
        with self._lock:
            self._counts[why] += number
            says = why.is_suspicious and monotonic() >= self._quiet_until
            if says:
                self._quiet_until = monotonic() + REJECTION_LOG_PERIOD_SECONDS
        if says:
            log.warning(
                "rank %d refused %s%s (%d so far); training goes on, and more of it within %g s is "
                "counted in run.refused only",
                self._rank,
                why.value,
                "" if peer is None else f", from rank {peer}",
                self[why],
                REJECTION_LOG_PERIOD_SECONDS,
            )

    def __getitem__(self, why: RejectionReason) -> int:
        with self._lock:
            return self._counts[why]

    def __iter__(self) -> Iterator[RejectionReason]:
        with self._lock:
            return iter([why for why, number in self._counts.items() if number])

    def __len__(self) -> int:
        return sum(1 for _ in self)
