"""Rejected messages and connections, counted by reason.

The usual reasons follow from stragglers, members that were evicted, and connections that end early:
they are counted only. The suspicious ones come from outside the job or from a defect: they are
logged too, at most one line a minute for all of them together.
"""

from __future__ import annotations

import logging
from collections import Counter
from enum import Enum
from threading import Lock
from time import monotonic

log = logging.getLogger("thalweg")
REJECTION_LOG_PERIOD_SECONDS = 60.0  # between two log lines, whatever their reasons


class RejectionReason(Enum):
    # Usual: a straggler or an evicted member still sends for an epoch that is over, or a restarted
    # one is ahead; a process ends, or a port scanner connects and says nothing.
    STALE = "messages of an older membership epoch"
    OUTSIDER = "messages from a rank that isn't in the membership epoch"
    TOO_EARLY = "messages of a later membership epoch, more than are kept"
    UNFINISHED = "connections that ended during their handshake"
    TRUNCATED = "messages that were cut off by the end of their connection"
    # Suspicious: a process outside the job, a changed network, or a defect.
    STRANGER = "connections from processes outside the job"
    FORGED = "connections and addresses in another rank's name, or without the job's secret"
    MALFORMED = "malformed messages, or messages of another version"
    TAMPERED = "messages that were changed, repeated or reordered in the network"
    TOO_LARGE = "messages that don't fit into memory"


USUAL_REASONS = (
    RejectionReason.STALE,
    RejectionReason.OUTSIDER,
    RejectionReason.TOO_EARLY,
    RejectionReason.UNFINISHED,
    RejectionReason.TRUNCATED,
)


class RejectionCounter(Counter[RejectionReason]):
    """The number of rejections of one rank by reason. Any thread may count, so iterate over
    `dict(counter)` only; `copy()` would make an empty counter."""

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
            logs = why not in USUAL_REASONS and monotonic() >= self._quiet_until
            if logs:
                self._quiet_until = monotonic() + REJECTION_LOG_PERIOD_SECONDS
        if logs:
            log.warning(
                "rank %d rejected %s%s (%d so far); training continues, and what it rejects within "
                "the next %g s is only counted (run.report().rejected)",
                self._rank,
                why.value,
                "" if peer is None else f", from rank {peer}",
                self[why],
                REJECTION_LOG_PERIOD_SECONDS,
            )
