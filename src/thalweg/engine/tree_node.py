"""One rank of a coded tree, without I/O: it maps incoming messages to outgoing ones.

Every piece (a chunk of a round) advances independently through the rank's moves of the schedule.
No rank waits: a result, from the parent or decoded here, makes the remaining moves of its piece
unnecessary and is forwarded at once, whatever this rank's training thread does. So a rank may
receive the results of many steps to which it contributed nothing.

    own part ──┐
    answers ───┴─ decode and add ── answer to the parent ── result from there ── to the children

Arrays are immutable once sent: a received array is forwarded as it is, and sums are new arrays.

A result is exact, except after `finish_partial`: then it is the sum of the parts that arrived,
scaled up, with the number of cells that it covers.
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

RESULT_HISTORY_BYTES = 256 << 20  # results kept for ranks that are behind
MIN_RESULT_HISTORY_STEPS, MAX_RESULT_HISTORY_STEPS = 2, 64
MAX_OPEN_STEPS = 4  # unfinished steps; a further one replaces the oldest


@dataclass(frozen=True, slots=True)
class ElementType:
    """The numpy type of a round's elements, and their arithmetic."""

    dtype: np.dtype[np.generic] = np.dtype(np.float32)
    arithmetic: Arithmetic = NUMPY


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One chunk of one round: its place in the round's vector, and this rank's moves of it."""

    round: int
    start: int
    stop: int
    moves: tuple[Move, ...]
    final: int  # the moves from this index on forward the result
    element_type: ElementType

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * self.element_type.dtype.itemsize


@dataclass(slots=True, eq=False)
class PieceState:
    """The progress of one piece in one step."""

    step: int
    index: int
    piece: Piece
    at: int = 0
    value: Array | None = None
    answers: dict[int, Array] = field(default_factory=dict)
    partial: dict[int, tuple[Array, int]] = field(default_factory=dict)  # with cells covered
    result: Array | None = None
    covered: int = 0


@dataclass(slots=True, eq=False)
class TreeStep:
    """The progress of one step."""

    pieces: list[PieceState]
    left: int  # pieces without a result
    wants_partial: bool = False


@dataclass(frozen=True, slots=True)
class Results:
    """The results of all pieces of a step. `covered` is the least number of cells in a piece's
    result; 0 if all."""

    arrays: tuple[Array, ...]
    covered: int = 0


def pieces_of(
    schedules: Sequence[Schedule], element_types: Sequence[ElementType], rank: int
) -> tuple[Piece, ...]:
    """The pieces of one step's rounds, with the moves of this rank."""
    pieces = []
    for number, (schedule, kind) in enumerate(zip(schedules, element_types, strict=True)):
        moves: dict[int, list[Move]] = {}
        for move in schedule.moves(rank):
            assert move.stop == move.start + 1
            moves.setdefault(move.start, []).append(move)
        for chunk, own in sorted(moves.items()):
            gathers = [i for i, move in enumerate(own) if not move.kind.sends]
            pieces.append(
                Piece(
                    round=number,
                    start=schedule.offsets[chunk],
                    stop=schedule.offsets[chunk + 1],
                    moves=tuple(own),
                    final=gathers[-1] + 1,
                    element_type=kind,
                )
            )
    return tuple(pieces)


class Node:
    """The state of one rank in the tree. All steps before `floor` are over; `finished` holds the
    results of the last `kept` of them, for stragglers."""

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
        """Add this rank's part of a round, which must not change from now on; messages to send."""
        opened = self._step(step)
        for state in opened.pieces if opened else ():
            piece = state.piece
            if piece.round == round_number and state.result is None and state.value is None:
                state.value = vector[piece.start : piece.stop]
                self.advance(state)
                self._answer_partially(state)
        return self._messages()

    def arrive(self, message: BestEffortMessage) -> list[BestEffortMessage]:
        """Handle a received message; the messages to send."""
        if message.kind is MessageKind.FOLLOW:
            return self._follow(message)
        if message.kind is MessageKind.REQUEST_PARTIAL:
            return self.request_partial(message.step)
        opened = self._step(message.step)
        if opened is None:
            return []
        array = self.fitting(message)
        state = opened.pieces[message.piece]
        if state.result is not None:
            return []
        if message.kind is MessageKind.RESULT:
            self.finish(state, array, message.covered)
            return self._messages()
        if message.kind is MessageKind.ANSWER:
            state.answers.setdefault(message.peer, array)
            self.advance(state)
        elif message.covered > state.partial.get(message.peer, (array, 0))[1]:
            state.partial[message.peer] = array, message.covered
        self._answer_partially(state)
        return self._messages()

    def answer_again(self, step: int) -> list[BestEffortMessage]:
        """The answers of this rank in an unfinished step once more: they may have been lost."""
        opened = self._open.get(step)
        for state in opened.pieces if opened else ():
            if state.result is None and state.value is not None:
                for move in state.piece.moves[: state.at]:
                    if move.kind is MoveKind.ANSWER:
                        self._send(move.peer, MessageKind.ANSWER, state, state.value)
        return self._messages()

    def skip_to(self, step: int) -> None:
        """Drop all steps before this one."""
        self.floor = max(self.floor, step)
        for old in [old for old in self._open if old < self.floor]:
            del self._open[old]

    def request_partial(self, step: int) -> list[BestEffortMessage]:
        """Request partial sums from all descendants; at the root, before `finish_partial`."""
        opened = self._step(step)
        if opened is not None and not opened.wants_partial:
            opened.wants_partial = True
            self._out += [
                BestEffortMessage(peer, MessageKind.REQUEST_PARTIAL, step) for peer in self._below
            ]
            for state in opened.pieces:
                self._answer_partially(state)
        return self._messages()

    def finish_partial(self, step: int) -> list[BestEffortMessage] | None:
        """Finish the step at the root with the parts that arrived, scaled up; None if none did."""
        opened = self._step(step)
        if opened is None:
            return []
        for state in opened.pieces:
            if state.result is None:
                total, covered = self._partial_sum(state)
                if total is None:
                    return None
                scaled = np.empty_like(total)
                arithmetic = state.piece.element_type.arithmetic
                arithmetic.weigh(scaled, [(self._cells / covered, total)], keep=False)
                self.finish(state, scaled, covered)
        return self._messages()

    def missing(self, step: int) -> list[int]:
        """The root's children that haven't answered and have no replica that has."""
        opened = self._open.get(step)
        for state in opened.pieces if opened else ():
            last = state.piece.final - 1
            quorum = state.piece.moves[last].quorum
            if state.result is None and quorum is not None:
                there = set(state.answers)
                if state.at == last and state.value is not None:
                    there.add(self.rank)
                rows = [quorum.code.row(m).tobytes() for m in range(len(quorum.peers))]
                listed = list(zip(quorum.peers, rows, strict=True))
                known = {row for peer, row in listed if peer in there}
                return sorted(peer for peer, row in listed if row not in known)
        return []

    # Progress of a piece

    def _step(self, step: int) -> TreeStep | None:
        """The state of this step; None if it is over, or older than all open steps."""
        if step < self.floor:
            return None
        if step not in self._open:
            if len(self._open) >= MAX_OPEN_STEPS:
                oldest = min(self._open)
                if step < oldest:
                    return None
                del self._open[oldest]
            states = [PieceState(step, index, piece) for index, piece in enumerate(self.pieces)]
            self._open[step] = TreeStep(states, len(states))
        return self._open[step]

    def advance(self, state: PieceState) -> None:
        """Perform the moves of a piece that are possible now; the root may finish the piece before
        its own worker contributes."""
        piece = state.piece
        while state.at < piece.final:
            move = piece.moves[state.at]
            if move.kind is MoveKind.COPY:
                break
            if move.quorum is not None:
                total = self._decode(state, move.quorum)
                if total is None:
                    break
                state.value = total
            elif state.value is None:
                break
            else:
                self._send(move.peer, MessageKind.ANSWER, state, state.value)
            state.at += 1
        if self.is_host and state.result is None:
            last = piece.final - 1
            if state.at <= last and (quorum := piece.moves[last].quorum) is not None:
                total = self._decode(state, quorum)
                if total is None:
                    return
                state.value, state.at = total, piece.final
            assert state.value is not None
            self.finish(state, state.value, 0)

    def _decode(self, state: PieceState, quorum: Quorum) -> Array | None:
        """The sum that the quorum's answers encode, and this rank's part; None if incomplete."""
        answers = state.answers
        arrays = {m: answers[peer] for m, peer in enumerate(quorum.peers) if peer in answers}
        own = state.value if state.piece.moves[state.at].quorum is quorum else None
        member = self.rank in quorum.peers
        if member and own is not None:
            arrays[quorum.peers.index(self.rank)] = own
        adds_own = not member and self._computes and not quorum.sent
        if adds_own and own is None:
            return None
        weights = quorum.code.decode(frozenset(arrays))
        if weights is None:
            return None
        terms = [(weight, arrays[m]) for m, weight in sorted(weights.items())]
        total = own.copy() if adds_own and own is not None else np.empty_like(terms[0][1])
        state.piece.element_type.arithmetic.weigh(total, terms, keep=adds_own)
        return total

    def finish(self, state: PieceState, result: Array, covered: int) -> None:
        """Store the result of a piece, and send it to the children and followers."""
        state.result, state.covered, state.at = result, covered, state.piece.final
        state.answers.clear()
        state.partial.clear()
        below = [move.peer for move in state.piece.moves[state.piece.final :]]
        for peer in dict.fromkeys((*below, *sorted(self.followers))):
            self._send(peer, MessageKind.RESULT, state, result, covered)
        opened = self._open[state.step]
        opened.left -= 1
        if not opened.left:
            covers = [piece.covered for piece in opened.pieces if piece.covered]
            arrays = tuple(piece.result for piece in opened.pieces if piece.result is not None)
            self.finished[state.step] = Results(arrays, min(covers, default=0))
            while len(self.finished) > self.kept:
                del self.finished[min(self.finished)]
            self.skip_to(state.step + 1)

    def _follow(self, message: BestEffortMessage) -> list[BestEffortMessage]:
        """The results of this and all later steps, for a peer that lacks them."""
        peer, first = message.peer, message.step
        if peer not in self._below:
            self.followers.add(peer)
        for step, results in sorted(self.finished.items()):
            for index, array in enumerate(results.arrays if step >= first else ()):
                self._out.append(
                    BestEffortMessage(peer, MessageKind.RESULT, step, index, results.covered, array)
                )
        for step, opened in sorted(self._open.items()):
            for state in opened.pieces if step >= first else ():
                if state.result is not None:
                    self._send(peer, MessageKind.RESULT, state, state.result, state.covered)
        return self._messages()

    # Partial results

    def _answer_partially(self, state: PieceState) -> None:
        """Send the parent the sum of a piece so far, if it has requested partial sums, and the
        complete answer hasn't been sent."""
        is_over = state.result is not None or state.at == state.piece.final - 1
        if not is_over and self._above is not None and self._open[state.step].wants_partial:
            total, covered = self._partial_sum(state)
            if total is not None:
                self._send(self._above, MessageKind.PARTIAL, state, total, covered)

    def _partial_sum(self, state: PieceState) -> tuple[Array | None, int]:
        """The sum of the parts that have arrived, and the number of cells in it."""
        piece = state.piece
        covered = self._cells_below[self.rank] if state.at else 1  # decoded, or its own alone
        parts: list[tuple[Array, int]] = [] if state.value is None else [(state.value, covered)]
        for move in piece.moves[state.at : piece.final]:
            if move.quorum is not None:
                own = _summed(piece, parts) if self.rank in move.quorum.peers else None
                chosen = self._best_replicas(move.quorum, state, own)
                answered_for = self.rank in move.quorum.peers or move.quorum.sent
                parts = chosen if answered_for else [*parts, *chosen]
        return _summed(piece, parts) or (None, 0)

    def _best_replicas(
        self, quorum: Quorum, state: PieceState, own: tuple[Array, int] | None
    ) -> list[tuple[Array, int]]:
        """The sum that covers the most cells, for each replicated part."""
        code = quorum.code
        best: dict[int, tuple[Array, int]] = {}
        for member, peer in enumerate(quorum.peers):
            team = int(np.argmax(code.row(member)))
            if peer == self.rank:
                candidate = own
            elif peer in state.answers:
                candidate = state.answers[peer], self._cells_below[peer]
            else:
                candidate = state.partial.get(peer)
            if candidate is not None and candidate[1] > best.get(team, (None, 0))[1]:
                best[team] = candidate
        return [best[team] for team in sorted(best)]

    def fitting(self, message: BestEffortMessage) -> Array:
        """The message's array in the piece's element type; TransportError if its size differs."""
        array, pieces = message.array, self.pieces[message.piece : message.piece + 1]
        expected = sum(piece.nbytes for piece in pieces)
        if array is None or not pieces or array.nbytes != expected:
            nbytes = 0 if array is None else array.nbytes
            raise TransportError(
                f"rank {self.rank} expected {expected} bytes from rank {message.peer} at step "
                f"{message.step}, piece {message.piece}, and got {nbytes}",
                "give all ranks the same model and plan",
            )
        dtype = pieces[0].element_type.dtype
        return array if array.dtype == dtype else array.view(dtype)

    def _send(
        self, peer: int, kind: MessageKind, state: PieceState, array: Array, covered: int = 0
    ) -> None:
        self._out.append(BestEffortMessage(peer, kind, state.step, state.index, covered, array))

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
    """The number of cells in each worker's complete answer, including its own cell."""
    tree = allocation.tree
    counts: dict[int, int] = {}
    for node in reversed(list(tree.top_down())):
        code = tree.codes.get(node)
        firsts: dict[int, int] = {}
        if code is not None and code.teams:
            for member, child in enumerate(tree.children[node]):
                firsts.setdefault(int(np.argmax(code.row(member))), child)
        counts[node] = (node != TREE_ROOT) + sum(counts[child] for child in firsts.values())
    return counts
