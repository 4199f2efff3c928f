from __future__ import annotations

import numpy as np

from thalweg.engine.state_requests import Lending
from thalweg.transports.best_effort import Letter, Sort

STATE = np.arange(3)


def ask(peer: int) -> Letter:
    return Letter(peer, Sort.ASK, 0)


def answers(letters: list[Letter]) -> list[tuple[int, bool]]:
    """To whom, and whether there is a state in it."""
    assert all(letter.sort is Sort.STATE for letter in letters)
    return [(letter.peer, letter.array is not None) for letter in letters]


def test_who_asks_is_answered_once_when_the_state_is_known() -> None:
    lending = Lending()
    assert lending.arrive(ask(5)) == lending.arrive(ask(3)) == []
    assert lending.wanted_by == {3, 5}
    assert answers(lending.give(STATE, from_now_on=False)) == [(3, True), (5, True)]
    assert lending.give(STATE, from_now_on=False) == []
    assert lending.arrive(ask(3)) == []


def test_one_whose_state_stands_answers_at_once() -> None:
    lending = Lending()
    lending.give(STATE, from_now_on=True)
    assert answers(lending.arrive(ask(4))) == [(4, True)]


def test_who_asks_itself_is_of_no_help_and_says_so() -> None:
    lending = Lending()
    lending.arrive(ask(2))
    lending.begin(1)
    request, refusal = lending.ask(1)
    assert (request.peer, request.sort) == (1, Sort.ASK)
    assert answers([refusal]) == [(2, False)]
    assert answers(lending.arrive(ask(7))) == [(7, False)]
    lending.end()
    assert lending.arrive(ask(7)) == []


def test_a_refusal_counts_if_it_is_of_whom_was_asked_and_a_state_of_anybody() -> None:
    lending = Lending()
    lending.begin(1)
    lending.arrive(Letter(2, Sort.STATE, 0))
    assert not lending.refused
    lending.arrive(Letter(1, Sort.STATE, 0))
    assert lending.refused
    lending.begin(3)
    assert not lending.refused
    lending.arrive(Letter(1, Sort.STATE, 0, array=STATE))
    assert lending.has_come
    assert lending.take() is STATE
    assert lending.take() is None
