"""One rank of a coded tree, without its network: letters come in, letters go out.

Every piece (a chunk of a round) makes its own way through the rank's moves of the schedule. What
the runner adds to them is that nobody waits: a result, from above or decoded here, makes what was
still to be done with its piece unnecessary, and goes on down at once, whatever this rank's own
training is doing. So a rank may learn the results of many steps that it had no part in.

    own part ──┐
    answers ───┴─ decode and add ── answer to the parent ── result from there ── to the children

Arrays are never changed after they were handed on: what came in is passed on as it is, and sums are
made anew.

A result is exact, unless the root was told to go on without some (`settle`): then it is what was
there, scaled up, and says how many cells it covers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from thalweg.codes import TREE_ROOT, Allocation
from thalweg.engine.arithmetic import NUMPY, Arithmetic
from thalweg.errors import TransportError
from thalweg.schedules import Move, MoveKind, Quorum, Schedule
from thalweg.transports import Array
from thalweg.transports.best_effort import BestEffortMessage, MessageKind

RESULT_HISTORY_BYTES = 256 << 20  # of results, for a rank that is behind
MIN_RESULT_HISTORY_STEPS, MAX_RESULT_HISTORY_STEPS = 2, 64  # steps
MAX_OPEN_STEPS = 4  # steps that are under way; further ones push out the oldest


@dataclass(frozen=True, slots=True)
class ElementType:
    """What numpy takes the values for, and how they are added."""

    dtype: np.dtype[np.generic] = np.dtype(np.float32)
    arithmetic: Arithmetic = NUMPY


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One chunk of one round: where it lies in the round's vector, and what this rank does."""

    round: int
    start: int
    stop: int
    moves: tuple[Move, ...]
    final: int  # from this move on it is the result
    element_type: ElementType

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * self.element_type.dtype.itemsize


@dataclass(slots=True)
class _PieceState:
    """How far a piece is."""

    at: int = 0
    value: Array | None = None
    answers: dict[int, Array] = field(default_factory=dict)
    partial: dict[int, tuple[Array, int]] = field(default_factory=dict)  # and cells covered
    result: Array | None = None
    covered: int = 0


class TreeStep:
    def __init__(self, pieces: int) -> None:
        self.piece_states = [_PieceState() for _ in range(pieces)]
        self.left = pieces  # without a result
        self.wants_partial = False


@dataclass(frozen=True, slots=True)
class Results:
    """All pieces of a step. `covered`: of how many cells, at least; 0 if of all."""

    arrays: tuple[Array, ...]
    covered: int = 0

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


def pieces_of(
    schedules: Sequence[Schedule], forms: Sequence[ElementType], rank: int
) -> tuple[Piece, ...]:
    """This rank's part of the rounds of a step, piece by piece."""
    found = []
    for number, (schedule, form) in enumerate(zip(schedules, forms, strict=True)):
        moves: dict[int, list[Move]] = {}
        for move in schedule.moves(rank):
            assert move.stop == move.start + 1
            moves.setdefault(move.start, []).append(move)
        for chunk, own in sorted(moves.items()):
            gathers = [i for i, move in enumerate(own) if not move.kind.sends]
            found.append(
                Piece(
                    round=number,
                    start=schedule.offsets[chunk],
                    stop=schedule.offsets[chunk + 1],
                    moves=tuple(own),
                    final=gathers[-1] + 1,
                    element_type=form,
                )
            )
    return tuple(found)


class Node:
    """`floor`: all steps before it are over. `finished`: the results of the last `kept` of them,
    for those who are late."""

    def __init__(
        self,
        rank: int,
        pieces: Sequence[Piece],
        allocation: Allocation,
        most_kept: int | None = None,
    ) -> None:
        self.rank = rank
        self.floor = 0
        self.finished: dict[int, Results] = {}
        self.followers: set[int] = set()
        self.pieces = tuple(pieces)
        self._computes = rank in allocation.weights
        self.is_host = rank == allocation.host
        self._above = None if self.is_host else allocation.above[rank]
        self._below = allocation.below[rank]
        self._cells = allocation.cells
        self._cells_below = _cells_below(allocation)
        self._open: dict[int, TreeStep] = {}
        self._out: list[BestEffortMessage] = []
        nbytes = sum(piece.nbytes for piece in self.pieces)
        self.kept = max(
            MIN_RESULT_HISTORY_STEPS,
            min(most_kept or MAX_RESULT_HISTORY_STEPS, RESULT_HISTORY_BYTES // max(1, nbytes)),
        )

    def contribute(self, step: int, round_number: int, vector: Array) -> list[BestEffortMessage]:
        """This rank's own part of a round, which is left alone from now on; what to send."""
        opened = self._step(step)
        if opened is not None:
            for index, piece in enumerate(self.pieces):
                way = opened.piece_states[index]
                if piece.round == round_number and way.result is None and way.value is None:
                    way.value = vector[piece.start : piece.stop]
                    self.advance(step, opened, index)
                    self._answer_partially(step, opened, index)
        return self._messages()

    def arrive(self, message: BestEffortMessage) -> list[BestEffortMessage]:
        """What to send now that this has come."""
        if message.kind is MessageKind.FOLLOW:
            self._follow(message)
            return self._messages()
        opened = self._step(message.step)
        if opened is None:
            return []
        if message.kind is MessageKind.REQUEST_PARTIAL:
            return self.request_partial(message.step)
        array = self.fitting(message)
        piece = opened.piece_states[message.piece]
        if piece.result is not None:
            return []
        if message.kind is MessageKind.RESULT:
            self.finish(message.step, opened, message.piece, array, message.covered)
        elif message.kind is MessageKind.ANSWER:
            piece.answers.setdefault(message.peer, array)
            self.advance(message.step, opened, message.piece)
            self._answer_partially(message.step, opened, message.piece)
        else:
            _, covered = piece.partial.get(message.peer, (None, 0))
            if message.covered > covered:
                piece.partial[message.peer] = array, message.covered
            self._answer_partially(message.step, opened, message.piece)
        return self._messages()

    def answer_again(self, step: int) -> list[BestEffortMessage]:
        """What this rank answered in a step that isn't over: it may have been lost."""
        opened = self._open.get(step)
        for index, piece in enumerate(opened.piece_states if opened else ()):
            for move in self.pieces[index].moves[: piece.at]:
                if (
                    move.kind is MoveKind.ANSWER
                    and piece.result is None
                    and piece.value is not None
                ):
                    message = BestEffortMessage(
                        move.peer, MessageKind.ANSWER, step, index, array=piece.value
                    )
                    self._out.append(message)
        return self._messages()

    def skip_to(self, step: int) -> None:
        """Nothing before this step is of use."""
        self.floor = max(self.floor, step)
        for old in [old for old in self._open if old < self.floor]:
            del self._open[old]

    def request_partial(self, step: int) -> list[BestEffortMessage]:
        """Everybody below is to send what it has; at the root, before `settle`."""
        opened = self._step(step)
        if opened is not None and not opened.wants_partial:
            opened.wants_partial = True
            self._out += [
                BestEffortMessage(peer, MessageKind.REQUEST_PARTIAL, step) for peer in self._below
            ]
            for index in range(len(self.pieces)):
                self._answer_partially(step, opened, index)
        return self._messages()

    def finish_partial(self, step: int) -> list[BestEffortMessage] | None:
        """At the root: go on with what there is, scaled up; None if there is nothing."""
        opened = self._step(step)
        if opened is None:
            return []
        for index, piece in enumerate(opened.piece_states):
            if piece.result is None:
                total, covered = self._partial_sum(index, piece)
                if total is None:
                    return None
                scaled = np.empty_like(total)
                arithmetic = self.pieces[index].element_type.arithmetic
                arithmetic.weigh(scaled, [(self._cells / covered, total)], keep=False)
                self.finish(step, opened, index, scaled, covered)
        return self._messages()

    def missing(self, step: int) -> list[int]:
        """At the root: who hasn't answered, and has no replica that has."""
        opened = self._open.get(step)
        if opened is None:
            return []
        for piece, way in zip(self.pieces, opened.piece_states, strict=True):
            quorum = piece.moves[piece.final - 1].quorum
            if way.result is None and quorum is not None:
                own_is_there = way.at == piece.final - 1 and way.value is not None
                there = {*way.answers, *([self.rank] if own_is_there else [])}
                rows = {
                    peer: quorum.code.row(member).tobytes()
                    for member, peer in enumerate(quorum.peers)
                }
                known = {rows[peer] for peer in quorum.peers if peer in there}
                return sorted(peer for peer in quorum.peers if rows[peer] not in known)
        return []

    # How a piece goes on

    def _step(self, step: int) -> TreeStep | None:
        """None if it is over, or so old that newer ones need its place."""
        if step < self.floor:
            return None
        if step not in self._open:
            if len(self._open) >= MAX_OPEN_STEPS:
                oldest = min(self._open)
                if step < oldest:
                    return None
                del self._open[oldest]
            self._open[step] = TreeStep(len(self.pieces))
        return self._open[step]

    def advance(self, step: int, opened: TreeStep, index: int) -> None:
        """Up to the result, as far as it goes; the root may overtake its own worker."""
        way, piece = opened.piece_states[index], self.pieces[index]
        while way.at < piece.final:
            move = piece.moves[way.at]
            if move.kind is MoveKind.COPY:
                break
            if move.quorum is not None:
                total = self._decode(piece, way, move.quorum, arrived_at=way.at)
                if total is None:
                    break
                way.value = total
            elif way.value is None:
                break
            else:
                self._out.append(
                    BestEffortMessage(move.peer, MessageKind.ANSWER, step, index, 0, way.value)
                )
            way.at += 1
        if self.is_host and way.result is None:
            last = piece.final - 1
            if way.at <= last and (quorum := piece.moves[last].quorum) is not None:
                total = self._decode(piece, way, quorum, arrived_at=way.at)
                if total is None:
                    return
                way.value, way.at = total, piece.final
            assert way.value is not None
            self.finish(step, opened, index, way.value, 0)

    def _decode(
        self, piece: Piece, way: _PieceState, quorum: Quorum, arrived_at: int
    ) -> Array | None:
        """What this quorum's answers stand for, and this rank's own part; None if one is
        missing."""
        arrays = {
            m: way.answers[peer] for m, peer in enumerate(quorum.peers) if peer in way.answers
        }
        member = self.rank in quorum.peers
        own_is_complete = piece.moves[arrived_at].quorum is quorum and way.value is not None
        if member and own_is_complete and way.value is not None:
            arrays[quorum.peers.index(self.rank)] = way.value
        adds_own = not member and self._computes and not quorum.sent
        if adds_own and not own_is_complete:
            return None
        weights = quorum.code.decode(frozenset(arrays))
        if weights is None:
            return None
        terms = [(weight, arrays[m]) for m, weight in sorted(weights.items())]
        total = (
            way.value.copy() if adds_own and way.value is not None else np.empty_like(terms[0][1])
        )
        piece.element_type.arithmetic.weigh(total, terms, keep=adds_own)
        return total

    def finish(self, step: int, opened: TreeStep, index: int, result: Array, covered: int) -> None:
        way, piece = opened.piece_states[index], self.pieces[index]
        way.result, way.covered, way.at = result, covered, piece.final
        way.answers.clear()
        way.partial.clear()
        below = [move.peer for move in piece.moves[piece.final :]]
        for peer in dict.fromkeys((*below, *sorted(self.followers))):
            self._out.append(
                BestEffortMessage(peer, MessageKind.RESULT, step, index, covered, result)
            )
        opened.left -= 1
        if not opened.left:
            covers = [way.covered for way in opened.piece_states if way.covered]
            arrays = tuple(way.result for way in opened.piece_states if way.result is not None)
            self.finished[step] = Results(arrays, min(covers, default=0))
            while len(self.finished) > self.kept:
                del self.finished[min(self.finished)]
            self.skip_to(step + 1)

    def _follow(self, message: BestEffortMessage) -> None:
        """Results of this and all later steps, to somebody who lacks them."""
        if message.peer not in self._below:
            self.followers.add(message.peer)
        for step, results in sorted(self.finished.items()):
            if step >= message.step:
                for index, array in enumerate(results.arrays):
                    self._out.append(
                        BestEffortMessage(
                            message.peer, MessageKind.RESULT, step, index, results.covered, array
                        )
                    )
        for step, opened in sorted(self._open.items()):
            for index, piece in enumerate(opened.piece_states):
                if piece.result is not None and step >= message.step:
                    self._out.append(
                        BestEffortMessage(
                            message.peer,
                            MessageKind.RESULT,
                            step,
                            index,
                            piece.covered,
                            piece.result,
                        )
                    )

    # What there is, if it isn't all

    def _answer_partially(self, step: int, opened: TreeStep, index: int) -> None:
        """Once in a hurry: what this piece has so far, whenever it has more."""
        way, piece = opened.piece_states[index], self.pieces[index]
        waits_for_result = way.at == piece.final - 1
        if (
            not opened.wants_partial
            or self._above is None
            or way.result is not None
            or waits_for_result
        ):
            return
        total, covered = self._partial_sum(index, way)
        if total is not None:
            self._out.append(
                BestEffortMessage(self._above, MessageKind.PARTIAL, step, index, covered, total)
            )

    def _partial_sum(self, index: int, way: _PieceState) -> tuple[Array | None, int]:
        """The sum of what has come, and how many cells are in it."""
        piece = self.pieces[index]
        covered = self._cells_below[self.rank] if way.at else 1  # decoded, or its own alone
        parts: list[tuple[Array, int]] = [] if way.value is None else [(way.value, covered)]
        for at, move in enumerate(piece.moves[: piece.final]):
            if move.quorum is None or at < way.at:
                continue
            own = _summed(piece, parts) if self.rank in move.quorum.peers else None
            chosen = self._best_of_each_team(move.quorum, way, own)
            answered_for = self.rank in move.quorum.peers or move.quorum.sent
            parts = chosen if answered_for else [*parts, *chosen]
        return _summed(piece, parts) or (None, 0)

    def _best_of_each_team(
        self, quorum: Quorum, piece: _PieceState, own: tuple[Array, int] | None
    ) -> list[tuple[Array, int]]:
        code = quorum.code
        found: dict[int, tuple[Array, int]] = {}
        for member, peer in enumerate(quorum.peers):
            team = int(np.argmax(code.row(member)))
            if peer == self.rank:
                candidate = own
            elif peer in piece.answers:
                candidate = piece.answers[peer], self._cells_below[peer]
            else:
                candidate = piece.partial.get(peer)
            if candidate is not None and candidate[1] > found.get(team, (None, 0))[1]:
                found[team] = candidate
        return [found[team] for team in sorted(found)]

    def fitting(self, message: BestEffortMessage) -> Array:
        array, pieces = message.array, self.pieces[message.piece : message.piece + 1]
        expected = sum(piece.nbytes for piece in pieces)
        if array is None or not pieces or array.nbytes != expected:
            got = 0 if array is None else array.nbytes
            raise TransportError(
                f"rank {self.rank} expected {expected} bytes from rank {message.peer} at step "
                f"{message.step}, piece {message.piece}, and got {got}",
                "give all ranks the same model and plan",
            )
        [piece] = pieces
        return (
            array
            if array.dtype == piece.element_type.dtype
            else array.view(piece.element_type.dtype)
        )

    def _messages(self) -> list[BestEffortMessage]:
        out, self._out = self._out, []
        return out


def _summed(piece: Piece, parts: Sequence[tuple[Array, int]]) -> tuple[Array, int] | None:
    if not parts:
        return None
    total = np.empty_like(parts[0][0])
    piece.element_type.arithmetic.weigh(total, [(1.0, array) for array, _ in parts], keep=False)
    return total, sum(covered for _, covered in parts)


def _cells_below(allocation: Allocation) -> dict[int, int]:
    """How many cells a complete answer of each worker covers, its own included; for teams."""
    tree = allocation.tree
    found: dict[int, int] = {}
    for node in reversed(list(tree.top_down())):
        code = tree.codes.get(node)
        firsts: dict[int, int] = {}
        if code is not None and code.teams:
            for member, child in enumerate(tree.children[node]):
                firsts.setdefault(int(np.argmax(code.row(member))), child)
        found[node] = (node != TREE_ROOT) + sum(found[child] for child in firsts.values())
    return found
