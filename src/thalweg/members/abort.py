"""The abort flag: a rank that fails publishes the cause, and the others stop waiting for it.

The flag is one key of the store, which keeps its first value: a rank and the problem of that rank.
Later failures are consequences of the first, and change nothing. The rank that publishes need not
be the root cause: one that timed out waiting for another publishes which ranks are.
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
    """The abort flag of all `ranks`, as one of them uses it; and the roll call through the store.

    When one rank of a ring stops, all others wait for a neighbour, and each would blame its own. So
    the first rank that times out starts the roll call, of which each membership epoch has one at
    most. Ranks that wait respond, since they poll the store meanwhile. A rank that doesn't respond
    is dead, partitioned, or busy with something else: the root cause.
    """

    def __init__(self, store: Store, rank: int, ranks: Sequence[int] = ()) -> None:
        self._store_client = StoreClient(store, rank)
        self._ranks = ranks or (rank,)
        self._responded = False  # to the roll call
        self._roll_call_failure: PeerFailed | None = None  # the root cause by this rank's roll call

    def publish(self, problem: str) -> None:
        """Set the flag, unless it is set: this rank fails with this problem. Never raises an error,
        as the store may be lost as well."""
        text = json.dumps({"rank": self._store_client.rank, "problem": " ".join(problem.split())})
        with suppress(RunError):
            self._store_client.call(lambda store: store.compare_set(_ABORT_KEY, "", text))

    def _publish_timeout(self, error: PeerLate) -> None:
        """Publish that this rank timed out waiting for a peer, after a roll call that finds the
        root cause unless another rank has published one."""
        problem = error.problem
        with suppress(RunError):
            if self.poll() is None and (absent := self._unresponsive()):
                do_not = "doesn't" if len(absent) == 1 else "don't"
                activities = ""
                for rank in absent:
                    activity = self._store_client.call(partial(last_seen, key=key_of(rank)))
                    activities += f", rank {rank} was last seen {activity}" if activity else ""
                problem = f"{ranks_text(absent)} {do_not} answer{activities}: {problem}"
                remedy = f"look at the output of {ranks_text(absent)}"
                self._roll_call_failure = PeerFailed(problem, remedy)
        self.publish(problem)

    def _unresponsive(self) -> list[int]:
        """Start the roll call, and return the ranks that don't respond to it in time."""
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

    def count_report(self, event: str) -> int:
        """Report an event, once per rank, and return the number of ranks that have reported it,
        with this one; 0 if the store is lost."""
        with suppress(RunError):
            return self._store_client.call(lambda store: store.add(f"seen/{event}", 1))
        return 0

    def poll(self) -> PeerFailed | None:
        """Respond to the roll call if there is one, and read the flag. Returns the failure that
        another rank published, the root cause that this rank's own roll call found, or the loss of
        the store; else None."""
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
            return self._roll_call_failure
        rank, problem = flag["rank"], flag["problem"]
        return PeerFailed(f"rank {rank} aborted: {problem}", f"look at the output of rank {rank}")

    def publish_error(self, error: BaseException) -> BaseException:
        """Publish an error of this rank that isn't the consequence of a published one. Returns the
        error to raise: for an error of the transport the published failure, if there is one."""
        if isinstance(error, PeerLate):
            self._publish_timeout(error)
        elif isinstance(error, ThalwegError) and not isinstance(error, PeerFailed):
            self.publish(error.problem)
        elif not isinstance(error, ThalwegError):
            self.publish(f"{type(error).__name__}: {error}")
        failure = self.poll() if isinstance(error, TransportError) else None
        return failure or error
