"""A rank that gives up says so, and the others stop waiting for it.

The alarm is one key of the store that all ranks can reach; the first to set it is the cause, what
fails after it is a consequence and changes nothing.
"""

from __future__ import annotations

import json

from thalweg.errors import PeerFailed, RunError
from thalweg.runtime.line import Line, Store

_KEY = "alarm"


class Alarm:
    """All ranks' alarm, seen from one."""

    def __init__(self, store: Store, rank: int) -> None:
        self._line = Line(store, rank)

    def sound(self, problem: str) -> None:
        """Tell the others why this rank gives up. Never raises: the store may be gone as well."""
        text = json.dumps({"rank": self._line.rank, "problem": " ".join(problem.split())})
        try:
            self._line.ask(lambda store: store.compare_set(_KEY, "", text))
        except RunError:
            return

    def heard(self) -> PeerFailed | None:
        """What another rank sounded, or that the store is gone; None while all is quiet."""
        try:
            text = self._line.ask(lambda s: s.get(_KEY) if s.check([_KEY]) else None)
        except RunError as error:
            return PeerFailed(f"the store is gone ({error.problem})", error.remedy)
        if text is None:
            return None
        alarm = json.loads(text)
        if alarm["rank"] == self._line.rank:
            return None
        return PeerFailed(
            f"rank {alarm['rank']} gave up: {alarm['problem']}",
            f"look at the output of rank {alarm['rank']}",
        )
