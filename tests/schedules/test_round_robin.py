"""Everybody meets everybody, nobody twice at a time."""

from __future__ import annotations

from itertools import combinations

import pytest

from thalweg.schedules.shuffle.group_table import circle_pairs, circle_turns


@pytest.mark.parametrize("number", range(10))
def test_everybody_meets_everybody_once(number: int) -> None:
    turns = circle_turns(number)
    met = [frozenset(pair) for turn in range(turns) for pair in circle_pairs(range(number), turn)]
    assert sorted(map(sorted, met)) == [list(pair) for pair in combinations(range(number), 2)]


@pytest.mark.parametrize("number", range(1, 10))
def test_at_most_one_has_a_bye(number: int) -> None:
    for turn in range(2 * number):
        met = [one for pair in circle_pairs(range(number), turn) for one in pair]
        assert len(met) == len(set(met)) == number - number % 2


@pytest.mark.parametrize("number", range(1, 10))
def test_it_begins_anew(number: int) -> None:
    turns = circle_turns(number)
    for turn in range(turns):
        again = circle_pairs(range(number), turn + turns)
        assert circle_pairs(range(number), turn) == again


def test_a_bye_goes_round() -> None:
    idle = [
        set(range(5)) - {one for pair in circle_pairs(range(5), turn) for one in pair}
        for turn in range(5)
    ]
    assert sorted(map(min, idle)) == [0, 1, 2, 3, 4]
