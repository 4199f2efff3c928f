"""One rank of a star that sums the first k workers' gradients, and the others' one step later.

Live gradient compensation (Xu et al., INFOCOM 2021). Of N workers the first k make the step:

    result(t) = g(t) + c(t),    g = N/k times the sum of the first k
    c(t+1) = (N-k)/N (h(t) - g(t)),    h = the same of those that arrived later, up to now

so that g + c covers all workers, with the stragglers' part one step old. Older parts are dropped.
Each piece has its own first k workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from thalweg.codes import Allocation
from thalweg.engine.tree_node import Node, Piece, PieceState
from thalweg.transports import Array
from thalweg.transports.best_effort import BestEffortMessage, MessageKind


@dataclass(slots=True)
class _Decided:
    """The last finished step of one piece: its estimate, the workers in it, and the stragglers."""

    step: int
    estimate: Array  # g
    used: frozenset[int]
    stragglers: dict[int, Array] = field(default_factory=dict)


class FirstKNode(Node):
    """A node whose step needs `k` answers, including this rank's own."""

    def __init__(
        self, rank: int, pieces: Sequence[Piece], allocation: Allocation, *, k: int
    ) -> None:
        super().__init__(rank, pieces, allocation)
        self._k = k
        self._workers = len(allocation.workers)
        self._host = allocation.host
        self._decided: dict[int, _Decided] = {}  # by piece

    def contribute(self, step: int, round_number: int, vector: Array) -> list[BestEffortMessage]:
        messages = super().contribute(step, round_number, vector)
        if step == self.floor - 1:  # too late for its own step, but in time for the next
            for index, piece in enumerate(self.pieces):
                if piece.round == round_number:
                    part = vector[piece.start : piece.stop]
                    peer = self.rank if self.is_host else self._host
                    late = BestEffortMessage(peer, MessageKind.ANSWER, step, index, array=part)
                    messages += self.arrive(late) if self.is_host else [late]
        return messages

    def arrive(self, message: BestEffortMessage) -> list[BestEffortMessage]:
        decided = self._decided.get(message.piece) if message.kind is MessageKind.ANSWER else None
        if decided is not None and decided.step == message.step:
            if message.peer not in decided.used:
                decided.stragglers[message.peer] = self.fitting(message)
            return []
        return super().arrive(message)

    def advance(self, state: PieceState) -> None:
        if not self.is_host:
            super().advance(state)
            return
        answers = dict(state.answers)
        if state.value is not None:
            answers[self.rank] = state.value
        if state.result is None and len(answers) >= self._k:
            estimate = self._estimate(state.piece, answers)
            result = self._compensated(state, estimate)
            self._decided[state.index] = _Decided(state.step, estimate, frozenset(answers))
            self.finish(state, result, 0)

    def _estimate(self, piece: Piece, answers: dict[int, Array]) -> Array:
        """An estimate of the sum over all workers from these answers."""
        arrays = [answers[rank] for rank in sorted(answers)]
        scale = self._workers / len(arrays)
        total = np.empty_like(arrays[0])
        terms = [(scale, array) for array in arrays]
        piece.element_type.arithmetic.weigh(total, terms, keep=False)
        return total

    def _compensated(self, state: PieceState, estimate: Array) -> Array:
        before, step = self._decided.get(state.index), state.step
        if before is None or before.step != step - 1 or not before.stragglers:
            return estimate
        share = (self._workers - len(before.used)) / self._workers
        rest = self._estimate(state.piece, before.stragglers)
        result = estimate.copy()
        terms = [(share, rest), (-share, before.estimate)]
        state.piece.element_type.arithmetic.weigh(result, terms, keep=True)
        return result
