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

A seal is removed, and what it holds is cut from the log, when nobody can be that far behind any
more: the store doesn't grow with the length of the run. Who reads it again, since it was restarted
meanwhile, reads the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from secrets import token_hex

from thalweg.transports.line import Line, Store

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]

_LOG = "agreement/log"
KEPT = 32  # seals; the oldest is further behind than any rank that still goes through the steps


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

    def __init__(self, store: Store, *, rank: int, size: int, period: int = 8) -> None:
        if not 0 <= rank < size or period < 1:
            raise ValueError(f"rank {rank} of {size} with a period of {period} steps")
        self._line = Line(store, rank)
        self._period = period
        self._handed_out = 0
        self._sealed: dict[int, _Log] = {}
        self._last_step = -1
        self._own: dict[str, tuple[str, Json]] = {}  # proposals that haven't taken effect, by token

    @property
    def handed_out(self) -> int:
        """How many proposals have taken effect here."""
        return self._handed_out

    def go_on_from(self, handed_out: int) -> None:
        """As a rank at which so many have taken effect."""
        self._handed_out = handed_out

    @property
    def pending(self) -> list[tuple[str, Json]]:
        """What this rank has proposed, and hasn't taken effect."""
        return list(self._own.values())

    def propose(self, name: str, value: Json) -> None:
        """Ask for a change; all ranks make it at the same one of their next safe points."""
        entry = (name, json.loads(json.dumps(value)), token_hex(8))
        self._own[entry[2]] = entry[:2]
        self._line.ask(lambda store: _edit(store, lambda log: log.with_one_more(entry)))

    def settle(self, step: int) -> list[Change]:
        """The changes that take effect at `step`, in the order in which they were proposed.

        To be called before each step, on every rank. Between safe points it is [] without a word
        to the store, as it is for a step that this rank has settled before."""
        if step % self._period or step <= self._last_step:
            return []
        seal = self._line.ask(lambda store: self._seal(store, step))
        new = seal.after(self._handed_out).proposals
        self._handed_out = max(self._handed_out, seal.stop)
        self._last_step = step
        for _, _, token in new:
            self._own.pop(token, None)
        return [Change(name=name, value=value, step=step) for name, value, _ in new]

    def _seal(self, store: Store, step: int) -> _Log:
        key = f"agreement/seal/{step}"
        seal = _Log.read(store.compare_set(key, "", _text(store)))
        self._sealed[step] = seal
        old = step - KEPT * self._period
        if old in self._sealed:
            store.delete_key(f"agreement/seal/{old}")
            over = self._sealed.pop(old)
            if over.proposals:
                _edit(store, lambda log: log.after(over.stop))
        return seal


def _text(store: Store) -> str:
    """The log as it is now; an empty one is begun if there is none."""
    return store.compare_set(_LOG, "", _Log(0, []).text()).decode()


def _edit(store: Store, change: Callable[[_Log], _Log]) -> None:
    """Replace the log by a changed one, again from the start if another rank did so meanwhile."""
    text = _text(store)
    while True:
        changed = change(_Log.read(text)).text()
        found = store.compare_set(_LOG, text, changed).decode()
        if found == changed:
            return
        text = found
