"""Rejected messages and connections, counted by reason.

Some are normal: a straggler, or a member that was cut off, still sends for an older membership
epoch. The others come from outside the job or from a defect, and are logged at most once a minute.
"""

from __future__ import annotations

import logging
from collections import Counter
from enum import Enum
from threading import Lock
from time import monotonic

log = logging.getLogger("thalweg")
REJECTION_LOG_PERIOD_SECONDS = 60.0  # between two lines in the log


class RejectionReason(Enum):
    STALE = "messages of an older membership epoch"
    OUTSIDER = "messages from a rank that isn't in the membership epoch"
    TOO_EARLY = "messages of a later membership epoch, more than are kept"
    UNFINISHED = "connections that ended during their handshake"
    STRANGER = "connections from processes outside the job"
    FORGED = "connections and addresses in another rank's name, or without the job's secret"
    MALFORMED = "malformed messages, or messages of another version"
    TAMPERED = "messages that were changed, repeated or reordered in the network"
    TRUNCATED = "messages that were cut off by the end of their connection"
    TOO_LARGE = "messages that don't fit into memory"

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


class RejectionCounter(Counter[RejectionReason]):
    """The rejections of one rank by reason; any thread may count. Copy it before iterating."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank
        self._lock = Lock()
        self._quiet_until = 0.0

    def count(self, why: RejectionReason, number: int = 1, *, peer: int | None = None) -> None:
        """Count rejections; `peer` is the rank at the other end of the connection, if known."""
        if not number:
            return
        with self._lock:
            self[why] += number
            logs = why.is_suspicious and monotonic() >= self._quiet_until
            if logs:
                self._quiet_until = monotonic() + REJECTION_LOG_PERIOD_SECONDS
        if logs:
            log.warning(
                "rank %d rejected %s%s (%d so far); training continues, and more of it within %g s "
                "is counted in run.refused only",
                self._rank,
                why.value,
                "" if peer is None else f", from rank {peer}",
                self[why],
                REJECTION_LOG_PERIOD_SECONDS,
            )
