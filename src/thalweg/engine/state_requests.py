"""States of the run that the ranks of a coded tree ask one another for, and give.

Who is asked answers when its training thread comes by with its state; at once if that doesn't
change any more; with an empty letter if it is waiting for one itself, so that the other asks
elsewhere.
"""

from __future__ import annotations

from thalweg.transports import Array
from thalweg.transports.best_effort import BestEffortMessage, MessageKind


class StateRequests:
    """One rank's side of it. Whoever uses it holds the relay's lock."""

    def __init__(self) -> None:
        self.requesters: set[int] = set()
        self.final_state: Array | None = None  # this rank's own, once it doesn't change any more
        self.asking: int | None = None  # whom; meanwhile this rank is of no help to others
        self.refused = False  # by whom it asks, which is in the same position, or gone
        self._arrived: Array | None = None

    def arrive(self, message: BestEffortMessage) -> list[BestEffortMessage]:
        """A request, or an answer."""
        if message.kind is MessageKind.REQUEST:
            if self.final_state is not None:
                return [
                    BestEffortMessage(message.peer, MessageKind.STATE, 0, array=self.final_state)
                ]
            if self.asking is not None:
                return [BestEffortMessage(message.peer, MessageKind.STATE, 0)]
            self.requesters.add(message.peer)
        elif message.array is not None:
            self._arrived = message.array
        elif message.peer == self.asking:
            self.refused = True
        return []

    def send_state(self, state: Array, *, from_now_on: bool) -> list[BestEffortMessage]:
        """To all who have asked, or also to those who will."""
        if from_now_on:
            self.final_state = state
        return [
            BestEffortMessage(peer, MessageKind.STATE, 0, array=state)
            for peer in self._those_who_want_it()
        ]

    def start(self, peer: int) -> None:
        """This one is to be asked."""
        self.asking, self.refused = peer, False

    def request(self, peer: int) -> list[BestEffortMessage]:
        """For its state; and say to others, who wait for this rank's, that it is of no help."""
        refusals = [
            BestEffortMessage(other, MessageKind.STATE, 0) for other in self._those_who_want_it()
        ]
        return [BestEffortMessage(peer, MessageKind.REQUEST, 0), *refusals]

    @property
    def has_arrived(self) -> bool:
        return self._arrived is not None

    def pop_state(self) -> Array | None:
        """What came, once."""
        came, self._arrived = self._arrived, None
        return came

    def finish(self) -> None:
        self.asking = None

    def _those_who_want_it(self) -> list[int]:
        wanted_by, self.requesters = self.requesters, set()
        return sorted(wanted_by)
