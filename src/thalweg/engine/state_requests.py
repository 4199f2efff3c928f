"""States of the run that the ranks of a coded tree ask one another for, and give.

Who is asked answers when its training thread comes by with its state; at once if that doesn't
change any more; with an empty letter if it is waiting for one itself, so that the other asks
elsewhere.
"""

from __future__ import annotations

from thalweg.transports import Array
from thalweg.transports.best_effort import Letter, Sort


class Lending:
    """One rank's side of it. Whoever uses it holds the relay's lock."""

    def __init__(self) -> None:
        self.wanted_by: set[int] = set()
        self.standing: Array | None = None  # this rank's own, once it doesn't change any more
        self.asking: int | None = None  # whom; meanwhile this rank is of no help to others
        self.refused = False  # by whom it asks, which is in the same position, or gone
        self._came: Array | None = None

    def arrive(self, letter: Letter) -> list[Letter]:
        """A request, or an answer."""
        if letter.sort is Sort.ASK:
            if self.standing is not None:
                return [Letter(letter.peer, Sort.STATE, 0, array=self.standing)]
            if self.asking is not None:
                return [Letter(letter.peer, Sort.STATE, 0)]
            self.wanted_by.add(letter.peer)
        elif letter.array is not None:
            self._came = letter.array
        elif letter.peer == self.asking:
            self.refused = True
        return []

    def give(self, state: Array, *, from_now_on: bool) -> list[Letter]:
        """To all who have asked, or also to those who will."""
        if from_now_on:
            self.standing = state
        return [Letter(peer, Sort.STATE, 0, array=state) for peer in self._those_who_want_it()]

    def begin(self, peer: int) -> None:
        """This one is to be asked."""
        self.asking, self.refused = peer, False

    def ask(self, peer: int) -> list[Letter]:
        """For its state; and say to others, who wait for this rank's, that it is of no help."""
        refusals = [Letter(other, Sort.STATE, 0) for other in self._those_who_want_it()]
        return [Letter(peer, Sort.ASK, 0), *refusals]

    @property
    def has_come(self) -> bool:
        return self._came is not None

    def take(self) -> Array | None:
        """What came, once."""
        came, self._came = self._came, None
        return came

    def end(self) -> None:
        self.asking = None

    def _those_who_want_it(self) -> list[int]:
        wanted_by, self.wanted_by = self.wanted_by, set()
        return sorted(wanted_by)
