"""Agreement: "this value, from step t on", with the same t on all ranks, whatever their lag.

Any rank may propose a value at any time; proposals form one log in the store. At every step that
is a multiple of the period, its safe point, each rank *seals* the log for that step: it reads the
log and offers what it read as the seal of the step. The store accepts the first offer; whoever
comes later is given that one, however much longer the log has become. What is in the seal of t and
wasn't in the seal before takes effect at t.

    rank 0   ... 7 | seal 8 := [a]       8 ... 15 | seal 16 := [a, b]
    rank 1   . 6 . b proposed . 7 | seal 8 = [a]     8 ... 15 | seal 16 = [a, b]

No rank waits for another, and no clock is read. A seal extends the one before, since who offers it
has first read that one, and the log only grows. A rank holds the number of proposals that it
has handed out, so that each takes effect once.

A seal is removed, and what it holds is cut from the log, when all members have passed it, however
far apart they are: now and then each writes down where it is. So the store doesn't grow with the
length of the run. The last seals stay for a rank that was restarted: it reads the same again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from secrets import token_hex

from thalweg.transports.store_client import Store, StoreClient

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]

_AGREEMENT_LOG_KEY = "agreement/log"
SEAL_HISTORY_COUNT = 32  # seals that stay; as often each rank looks for older ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """From `step` on, `name` is `value`."""

    name: str
    value: Json
    step: int


@dataclass(frozen=True, slots=True)
class _Log:
    """Proposals number `start` and following, as (name, value, token).

    The token tells two equal proposals apart, and so whose edit it was that the store accepted."""

    start: int
    proposals: list[tuple[str, Json, str]]

    @classmethod
    def read(cls, text: bytes | str) -> _Log:
        start, proposals = json.loads(text)
        return cls(start, [(name, value, token) for name, value, token in proposals])

    def text(self) -> str:
        return json.dumps([self.start, self.proposals])

    @property
    def stop(self) -> int:
        return self.start + len(self.proposals)

    def with_one_more(self, proposal: tuple[str, Json, str]) -> _Log:
        return _Log(self.start, [*self.proposals, proposal])

    def after(self, number: int) -> _Log:
        """Without the proposals before this number."""
        start = min(max(self.start, number), self.stop)
        return _Log(start, self.proposals[start - self.start :])


class Agreement:
    """What the `size` ranks that share this store agree on, seen from one of them.

    Ranks that form anew, or go back to a checkpoint, take a new prefix of the store: each step is
    sealed once. Old proposals are not remembered across that; propose them again if they matter.
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
        """`awaits` are the ranks that may still need old seals: all of them, if it is None."""
        if not 0 <= rank < size or period < 1:
            raise ValueError(f"rank {rank} of {size} with a period of {period} steps")
        self._store_client = StoreClient(store, rank)
        self._rank = rank
        self._awaits = awaits or (lambda: range(size))
        self._period = period
        self._effective_count = 0
        self._sealed: dict[int, _Log] = {}
        self._last_step = -1
        self._own: dict[str, tuple[str, Json]] = {}  # proposals that haven't taken effect, by token

    @property
    def effective_count(self) -> int:
        """How many proposals have taken effect here."""
        return self._effective_count

    def resume_from(self, handed_out: int) -> None:
        """As a rank at which so many have taken effect."""
        self._effective_count = handed_out

    @property
    def pending(self) -> list[tuple[str, Json]]:
        """What this rank has proposed, and hasn't taken effect."""
        return list(self._own.values())

    def propose(self, name: str, value: Json) -> None:
        """Ask for a change; all ranks make it at the same one of their next safe points."""
        entry = (name, json.loads(json.dumps(value)), token_hex(8))
        self._own[entry[2]] = entry[:2]
        self._store_client.call(lambda store: _edit(store, lambda log: log.with_one_more(entry)))

    def take_effect(self, step: int) -> list[Change]:
        """The changes that take effect at `step`, in the order in which they were proposed.

        To be called before each step, on every rank. Between safe points it is [] without a word
        to the store, as it is for a step that this rank has settled before."""
        if step % self._period or step <= self._last_step:
            return []
        seal = self._store_client.call(lambda store: self._seal(store, step))
        new = seal.after(self._effective_count).proposals
        self._effective_count = max(self._effective_count, seal.stop)
        self._last_step = step
        for _, _, token in new:
            self._own.pop(token, None)
        return [Change(name=name, value=value, step=step) for name, value, _ in new]

    def _seal(self, store: Store, step: int) -> _Log:
        seal = _Log.read(store.compare_set(_key(step), "", _text(store)))
        self._sealed[step] = seal
        if (
            len(self._sealed) > SEAL_HISTORY_COUNT
            and step // self._period % SEAL_HISTORY_COUNT == 0
        ):
            self._remove_old(store, step)
        return seal

    def _remove_old(self, store: Store, step: int) -> None:
        """Remove the seals that all ranks have passed, but not the last ones."""
        store.set(_passed(self._rank), str(step))
        others = [_passed(rank) for rank in {self._rank, *self._awaits()}]
        if not store.check(others):
            return  # one of them isn't that far yet
        slowest = min(int(passed) for passed in store.multi_get(others))
        old = sorted(
            s for s in self._sealed if s < min(slowest, step - SEAL_HISTORY_COUNT * self._period)
        )
        for sealed in old:
            store.delete_key(_key(sealed))
            over = self._sealed.pop(sealed)
        if old and over.proposals:
            _edit(store, lambda log: log.after(over.stop))


def _key(step: int) -> str:
    return f"agreement/seal/{step}"


def _passed(rank: int) -> str:
    """In the store: the step of a seal that this rank has read, and needs no earlier one."""
    return f"agreement/passed/{rank}"


def _text(store: Store) -> str:
    """The log as it is now; an empty one is begun if there is none."""
    return store.compare_set(_AGREEMENT_LOG_KEY, "", _Log(0, []).text()).decode()


def _edit(store: Store, change: Callable[[_Log], _Log]) -> None:
    """Replace the log by a changed one, again from the start if another rank did so meanwhile."""
    text = _text(store)
    while True:
        changed = change(_Log.read(text)).text()
        found = store.compare_set(_AGREEMENT_LOG_KEY, text, changed).decode()
        if found == changed:
            return
        text = found
