"""Agreement: "this value, from step t on", with the same t on all ranks, whatever their lag.

Any rank may propose a value at any time; proposals form one log in the store. At every step that
is a multiple of the period, its safe point, each rank *seals* the log for that step: it reads the
log and offers it as the seal of the step. The store accepts the first offer; later ranks receive
that one, however much longer the log has become. Proposals in the seal of t that weren't in the
seal before take effect at t.

    rank 0   ... 7 | seal 8 := [a]       8 ... 15 | seal 16 := [a, b]
    rank 1   . 6 . b proposed . 7 | seal 8 = [a]     8 ... 15 | seal 16 = [a, b]

No rank waits for another, and no clock is read. A seal extends the one before, since the rank that
offers it has first read that one, and the log only grows. A rank counts the proposals that have
taken effect, so that each takes effect once.

A seal is removed, and its proposals are cut from the log, when all members have passed it, however
far apart they are; each publishes its position periodically. So the store doesn't grow with the
length of the run. The last seals stay for a restarted rank, which reads them again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from secrets import token_hex
from typing import NamedTuple

from thalweg.transports.store_client import Store, StoreClient

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]

_AGREEMENT_LOG_KEY = "agreement/log"
SEAL_HISTORY_COUNT = 32  # seals that stay; also the period of their removal, in seals


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """An agreed change: from `step` on, `name` has this `value`."""

    name: str
    value: Json
    step: int


class _Log(NamedTuple):
    """The proposals from number `start` on, as (name, value, token). In the store it is JSON.

    The token distinguishes equal proposals, and so shows whose edit the store accepted."""

    start: int
    proposals: Sequence[tuple[str, Json, str]]

    @property
    def stop(self) -> int:
        return self.start + len(self.proposals)

    def after(self, number: int) -> _Log:
        """The log without the proposals before this number."""
        start = min(max(self.start, number), self.stop)
        return _Log(start, self.proposals[start - self.start :])


class Agreement:
    """The agreement of the `size` ranks that share this store, as one of them uses it.

    A new membership epoch and a return to a checkpoint need a new namespace of the store, as each
    step is sealed once. Old proposals are lost with it; propose them again if they matter.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        size: int,
        period: int = 8,
        awaits: Callable[[], Iterable[int]] | None = None,
    ) -> None:
        """Create the agreement; `awaits` are the ranks that may still need old seals, by default
        all."""
        if not 0 <= rank < size or period < 1:
            raise ValueError(f"rank {rank} of {size} with a period of {period} steps")
        self._store_client = StoreClient(store, rank)
        self._rank = rank
        self._awaits = awaits or (lambda: range(size))
        self._period = period
        self.effective_count = 0  # proposals that have taken effect on this rank
        self._sealed: dict[int, _Log] = {}
        self._last_step = -1
        self._pending: dict[str, tuple[str, Json]] = {}  # own proposals to take effect, by token

    @property
    def pending(self) -> list[tuple[str, Json]]:
        """The proposals of this rank that haven't taken effect."""
        return list(self._pending.values())

    def propose(self, name: str, value: Json) -> None:
        """Propose a change; it takes effect at the same safe point on all ranks."""
        entry = (name, json.loads(json.dumps(value)), token_hex(8))
        self._pending[entry[2]] = entry[:2]
        self._store_client.call(
            lambda store: _edit(store, lambda log: _Log(log.start, [*log.proposals, entry]))
        )

    def take_effect(self, step: int) -> list[Change]:
        """The changes that take effect at `step`, in the order in which they were proposed.

        Every rank calls it before each step. Between safe points, and for a step that it was called
        for before, it returns [] without a store request."""
        if step % self._period or step <= self._last_step:
            return []
        seal = self._store_client.call(lambda store: self._seal(store, step))
        new = seal.after(self.effective_count).proposals
        self.effective_count = max(self.effective_count, seal.stop)
        self._last_step = step
        for _, _, token in new:
            self._pending.pop(token, None)
        return [Change(name=name, value=value, step=step) for name, value, _ in new]

    def _seal(self, store: Store, step: int) -> _Log:
        seal = _Log(*json.loads(store.compare_set(_key(step), "", _text(store))))
        self._sealed[step] = seal
        is_due = step // self._period % SEAL_HISTORY_COUNT == 0
        if is_due and len(self._sealed) > SEAL_HISTORY_COUNT:
            self._remove_old(store, step)
        return seal

    def _remove_old(self, store: Store, step: int) -> None:
        """Remove the seals that all ranks have passed, except the last ones."""
        store.set(_passed(self._rank), str(step))
        others = [_passed(rank) for rank in {self._rank, *self._awaits()}]
        if not store.check(others):
            return  # a rank hasn't passed any seal yet
        slowest = min(int(passed) for passed in store.multi_get(others))
        first_kept = min(slowest, step - SEAL_HISTORY_COUNT * self._period)
        old = sorted(sealed for sealed in self._sealed if sealed < first_kept)
        for sealed in old:
            store.delete_key(_key(sealed))
            over = self._sealed.pop(sealed)
        if old and over.proposals:
            _edit(store, lambda log: log.after(over.stop))


def _key(step: int) -> str:
    return f"agreement/seal/{step}"


def _passed(rank: int) -> str:
    """The store key for the step of a seal that this rank has read; it needs no earlier one."""
    return f"agreement/passed/{rank}"


def _text(store: Store) -> str:
    """The current log; an empty one is created if there is none."""
    return store.compare_set(_AGREEMENT_LOG_KEY, "", json.dumps(_Log(0, []))).decode()


def _edit(store: Store, change: Callable[[_Log], _Log]) -> None:
    """Replace the log by a changed one, and retry if another rank has changed it meanwhile."""
    text = _text(store)
    while True:
        changed = json.dumps(change(_Log(*json.loads(text))))
        stored = store.compare_set(_AGREEMENT_LOG_KEY, text, changed).decode()
        if stored == changed:
            return
        text = stored
