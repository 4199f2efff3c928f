"""The abort flag: a rank that fails publishes the cause, and the others stop waiting for it.

The flag is one key of the store. The first rank to set it is the root cause; later failures are
consequences and change nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from time import monotonic, sleep

from thalweg.errors import (
    PeerFailed,
    PeerLate,
    RunError,
    StoreLost,
    ThalwegError,
    TransportError,
    ranks_text,
)
from thalweg.members.activity import key_of, last_seen
from thalweg.transports.store_client import Store, StoreClient

ROLL_CALL_TIMEOUT_SECONDS = 1.5  # waiting ranks poll more often than that
ROLL_CALL_POLL_SECONDS = 0.05
_ROLL_CALL_KEY = "rollcall"
_ABORT_KEY = "alarm"


class AbortFlag:
    """The abort flag of all `ranks`, as one of them uses it; and a roll call through the store.

    When one rank of a ring stops, all others wait for a neighbour, and each would blame its own. So
    the first rank that times out starts a roll call; ranks that wait respond, since they poll the
    store meanwhile. A rank that doesn't respond is dead, partitioned, or busy with something else:
    the root cause.
    """

    def __init__(self, store: Store, rank: int, ranks: Sequence[int] = ()) -> None:
        self._store_client = StoreClient(store, rank)
        self._ranks = ranks or (rank,)
        self._responded = False
        self._found: PeerFailed | None = None  # by this rank's roll call

    def raise_flag(self, problem: str) -> None:
        """Publish why this rank fails. Never raises: the store may be lost as well."""
        text = json.dumps({"rank": self._store_client.rank, "problem": " ".join(problem.split())})
        with suppress(RunError):
            self._store_client.call(lambda store: store.compare_set(_ABORT_KEY, "", text))

    def _raise_for_late_peer(self, late: PeerLate) -> None:
        """Raise the flag for a late peer, after a roll call that finds the root cause."""
        problem = late.problem
        with suppress(RunError):
            if self.poll() is None and (absent := self._unresponsive()):
                don_t = "doesn't" if len(absent) == 1 else "don't"
                seen = ""
                for rank in absent:
                    activity = self._store_client.call(partial(last_seen, key=key_of(rank)))
                    seen += f", rank {rank} was last seen {activity}" if activity else ""
                problem = f"{ranks_text(absent)} {don_t} answer{seen}: {problem}"
                self._found = PeerFailed(problem, f"look at the output of {ranks_text(absent)}")
        self.raise_flag(problem)

    def _unresponsive(self) -> list[int]:
        """Start a roll call; the ranks that don't respond."""
        self._store_client.call(lambda store: store.add(_ROLL_CALL_KEY, 1))
        self._respond()
        keys = {rank: f"{_ROLL_CALL_KEY}/{rank}" for rank in self._ranks}
        deadline = monotonic() + ROLL_CALL_TIMEOUT_SECONDS
        while True:
            missing = self._store_client.call(lambda s: [r for r in keys if not s.check([keys[r]])])
            if not missing or monotonic() >= deadline:
                return missing
            sleep(ROLL_CALL_POLL_SECONDS)

    def _respond(self) -> None:
        self._responded = True
        key = f"{_ROLL_CALL_KEY}/{self._store_client.rank}"
        self._store_client.call(lambda store: store.add(key, 1))

    def witness(self, what: str) -> int:
        """The number of ranks that have reported `what`, including this one."""
        with suppress(RunError):
            return self._store_client.call(lambda store: store.add(f"seen/{what}", 1))
        return 0

    def poll(self) -> PeerFailed | None:
        """The failure that another rank published, or the loss of the store; else None."""
        try:
            if not self._responded and self._store_client.call(lambda s: s.check([_ROLL_CALL_KEY])):
                self._respond()
            text = self._store_client.call(
                lambda s: s.get(_ABORT_KEY) if s.check([_ABORT_KEY]) else None
            )
        except RunError as error:
            return StoreLost(f"the store is lost ({error.problem})", error.remedy)
        flag = None if text is None else json.loads(text)
        if flag is None or flag["rank"] == self._store_client.rank:
            return self._found
        rank, problem = flag["rank"], flag["problem"]
        return PeerFailed(f"rank {rank} aborted: {problem}", f"look at the output of rank {rank}")

    def first_cause(self, error: BaseException) -> BaseException:
        """Raise the flag for this error; return the first cause, if another rank published it."""
        if isinstance(error, PeerLate):
            self._raise_for_late_peer(error)
        elif isinstance(error, ThalwegError) and not isinstance(error, PeerFailed):
            self.raise_flag(error.problem)
        elif not isinstance(error, ThalwegError):
            self.raise_flag(f"{type(error).__name__}: {error}")
        abort = self.poll() if isinstance(error, TransportError) else None
        return abort or error
