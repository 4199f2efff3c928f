from __future__ import annotations

import numpy as np

from thalweg.engine.tree_relay import StateRequests
from thalweg.transports.best_effort import BestEffortMessage, MessageKind

STATE = np.arange(3)


def ask(peer: int) -> BestEffortMessage:
    return BestEffortMessage(peer, MessageKind.REQUEST, 0)


def answers(messages: list[BestEffortMessage]) -> list[tuple[int, bool]]:
    """To whom, and whether there is a state in it."""
    assert all(message.kind is MessageKind.STATE for message in messages)
    return [(message.peer, message.array is not None) for message in messages]


def test_who_asks_is_answered_once_when_the_state_is_known() -> None:
    requests = StateRequests()
    assert requests.arrive(ask(5)) == requests.arrive(ask(3)) == []
    assert requests.requesters == {3, 5}
    assert answers(requests.answer(STATE)) == [(3, True), (5, True)]
    assert requests.answer(STATE) == []
    assert requests.arrive(ask(3)) == []


def test_one_whose_state_stands_answers_at_once() -> None:
    requests = StateRequests()
    requests.final_state = STATE
    assert answers(requests.arrive(ask(4))) == [(4, True)]


def test_who_asks_itself_is_of_no_help_and_says_so() -> None:
    requests = StateRequests()
    requests.arrive(ask(2))
    requests.start(1)
    assert answers(requests.answer(None)) == [(2, False)]
    assert answers(requests.arrive(ask(7))) == [(7, False)]
    requests.asking = None
    assert requests.arrive(ask(7)) == []


def test_a_refusal_counts_if_it_is_of_whom_was_asked_and_a_state_of_anybody() -> None:
    requests = StateRequests()
    requests.start(1)
    requests.arrive(BestEffortMessage(2, MessageKind.STATE, 0))
    assert not requests.refused
    requests.arrive(BestEffortMessage(1, MessageKind.STATE, 0))
    assert requests.refused
    requests.start(3)
    assert not requests.refused
    requests.arrive(BestEffortMessage(1, MessageKind.STATE, 0, array=STATE))
    assert requests.received is not None
    assert requests.pop_state() is STATE
    assert requests.pop_state() is None
