"""A rank that gives up says so, and the others stop waiting for it.

The alarm is one key of the store that all ranks can reach; the first to set it is the cause, what
fails after it is a consequence and changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
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

ROLL_CALL_TIMEOUT_SECONDS = 1.5  # seconds: who waits looks around more often than that
ROLL_CALL_POLL_SECONDS = 0.05
_ROLL_CALL_KEY = "rollcall"
_ABORT_KEY = "alarm"


class ResponseCheck:
    """Who doesn't answer?

    In a ring all wait for a neighbour when one rank stops, and each would blame its own. So the
    first whose patience ends calls the ranks through the store; those who are waiting answer, since
    they look around meanwhile. Who hasn't answered is dead, cut off, or busy with something else:
    the cause.
    """

    def __init__(self, client: StoreClient, ranks: Sequence[int]) -> None:
        self._store_client = client
        self._ranks = ranks
        self._answered = False

    def respond(self) -> None:
        """If the roll is being called: here."""
        if not self._answered and self._store_client.call(
            lambda store: store.check([_ROLL_CALL_KEY])
        ):
            self._write_response()

    def unresponsive(self) -> list[int]:
        """Call the roll; who doesn't answer."""
        self._store_client.call(lambda store: store.add(_ROLL_CALL_KEY, 1))
        self._write_response()
        deadline = monotonic() + ROLL_CALL_TIMEOUT_SECONDS
        while (missing := self._missing()) and monotonic() < deadline:
            sleep(ROLL_CALL_POLL_SECONDS)
        return missing

    def _write_response(self) -> None:
        self._answered = True
        self._store_client.call(
            lambda store: store.add(f"{_ROLL_CALL_KEY}/{self._store_client.rank}", 1)
        )

    def _missing(self) -> list[int]:
        keys = {rank: f"{_ROLL_CALL_KEY}/{rank}" for rank in self._ranks}
        return self._store_client.call(
            lambda s: [r for r, key in keys.items() if not s.check([key])]
        )


class AbortFlag:
    """The alarm of all `ranks`, seen from one of them."""

    def __init__(self, store: Store, rank: int, ranks: Sequence[int] = ()) -> None:
        self._store_client = StoreClient(store, rank)
        self._responses = ResponseCheck(self._store_client, ranks or (rank,))
        self._found: PeerFailed | None = None  # by this rank's own roll call

    def raise_flag(self, problem: str) -> None:
        """Tell the others why this rank gives up. Never raises: the store may be gone as well."""
        text = json.dumps({"rank": self._store_client.rank, "problem": " ".join(problem.split())})
        with suppress(RunError):
            self._store_client.call(lambda store: store.compare_set(_ABORT_KEY, "", text))

    def raise_for_late_peer(self, late: PeerLate) -> None:
        """The same, because another rank didn't come: find out whose fault that is."""
        problem = late.problem
        with suppress(RunError):
            if self.poll() is None and (absent := self._responses.unresponsive()):
                don_t = "doesn't" if len(absent) == 1 else "don't"
                seen = "".join(map(self._last_seen, absent))
                problem = f"{ranks_text(absent)} {don_t} answer{seen}: {problem}"
                self._found = PeerFailed(problem, f"look at {ranks_text(absent)} and its output")
        self.raise_flag(problem)

    def _last_seen(self, rank: int) -> str:
        seen = self._store_client.call(lambda store: last_seen(store, key_of(rank)))
        return f", rank {rank} was last seen {seen}" if seen else ""

    def witness(self, what: str) -> int:
        """How many ranks have seen this, with this one."""
        with suppress(RunError):
            return self._store_client.call(lambda store: store.add(f"seen/{what}", 1))
        return 0

    def poll(self) -> PeerFailed | None:
        """What another rank sounded, or that the store is gone; None while all is quiet."""
        try:
            self._responses.respond()
            text = self._store_client.call(
                lambda s: s.get(_ABORT_KEY) if s.check([_ABORT_KEY]) else None
            )
        except RunError as error:
            return StoreLost(f"the store is gone ({error.problem})", error.remedy)
        if text is None:
            return self._found
        alarm = json.loads(text)
        if alarm["rank"] == self._store_client.rank:
            return self._found
        return PeerFailed(
            f"rank {alarm['rank']} gave up: {alarm['problem']}",
            f"look at the output of rank {alarm['rank']}",
        )

    def first_cause(self, error: BaseException) -> BaseException:
        """Raise the flag for this error; return the first cause, if another rank published it."""
        if isinstance(error, PeerLate):
            self.raise_for_late_peer(error)
        elif isinstance(error, ThalwegError) and not isinstance(error, PeerFailed):
            self.raise_flag(error.problem)
        elif not isinstance(error, ThalwegError):
            self.raise_flag(f"{type(error).__name__}: {error}")
        abort = self.poll() if isinstance(error, TransportError) else None
        return abort or error
