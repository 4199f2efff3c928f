"""Values by a key."""

from __future__ import annotations

from thalweg.facts import grouped


def test_keys_and_values_keep_the_order_of_the_pairs() -> None:
    pairs = (("b", 1), ("a", 2), ("b", 0))
    assert list(grouped(pairs).items()) == [("b", [1, 0]), ("a", [2])]
