"""Moves: the operations of one rank on one span of chunks.

A *chunk* is a named piece of the data, the same name on every rank; a *span* is a run of
consecutive chunks, `start` up to but not including `stop`, that travels as one message. The list
of a rank's moves is ordered chunk by chunk: a move waits for the earlier moves that share a chunk
with it (a send only for those that change it), and for nothing else, so different chunks are in
flight at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from thalweg.declarations import Code

Span = tuple[int, int]


class MoveKind(Enum):
    """The kinds of moves; answers to a quorum may arrive late, so they have a kind of their own."""

    SEND = "sends"
    ANSWER = "answers"  # send to a quorum, which may not need it
    ADD = "adds"  # receive and add
    COPY = "copies"  # receive and overwrite
    QUORUM = "decodes"  # receive from enough of these peers, and add what they decode to

    @property
    def sends(self) -> bool:
        return self in (MoveKind.SEND, MoveKind.ANSWER)


@dataclass(frozen=True, slots=True)
class Quorum:
    """The peers that may answer, in the order of the code's members. A rank that gathers and is
    itself a member counts its own chunk as its answer; otherwise its own chunk is added with weight
    one, or overwritten if it was `sent` to another rank, which answers for it."""

    peers: tuple[int, ...]
    code: Code
    sent: bool = False


class Move(NamedTuple):
    kind: MoveKind
    peer: int  # for a quorum: the rank itself
    start: int
    stop: int
    quorum: Quorum | None = None

    def __str__(self) -> str:
        chunks = f"{self.start}" if self.stop == self.start + 1 else f"{self.start}-{self.stop - 1}"
        if self.quorum is not None:
            return f"decode {chunks} from a quorum of {list(self.quorum.peers)}"
        direction = "to" if self.kind.sends else "from"
        return f"{self.kind.name.lower()} {chunks} {direction} {self.peer}"


Program = Callable[[int], Iterator[Move]]
"""Makes the moves of a rank, lazily."""
