"""What is said of late workers, against every set of them."""

from __future__ import annotations

from functools import cache
from itertools import combinations

import pytest

from thalweg.catalog import default_catalog
from thalweg.codes import TREE_ROOT, CodedTree
from thalweg.codes.tolerance import chance_of_waiting, tolerance

SMALL = [
    ("cyclic", 12, 3, 1),
    ("cyclic", 10, 4, 2),
    ("cyclic", 9, 9, 2),
    ("cyclic", 7, 2, 0),
    ("cyclic_mds", 12, 4, 1),
    ("fractional", 12, 4, 1),
    ("fractional", 11, 4, 1),
    ("fractional", 12, 3, 1),
    ("fractional", 12, 3, 2),
    ("fractional", 12, 12, 3),
    ("fractional", 6, 2, 1),
    ("fractional", 6, 2, 0),
    ("fractional", 1, 2, 0),
]


def planted(code: str, workers: int, fanout: int, stragglers: int) -> CodedTree:
    return default_catalog().codes[code].build_tree(range(workers), fanout, stragglers)


def delivers(tree: CodedTree, late: frozenset[int], node: int = TREE_ROOT) -> bool:
    """By the codes' own decoding."""
    if node in late:
        return False
    code, children = tree.codes.get(node), tree.children[node]
    there = frozenset(i for i, child in enumerate(children) if delivers(tree, late, child))
    return code is None or code.decode(there) is not None


@cache
def outcomes(case: tuple[str, int, int, int]) -> dict[frozenset[int], bool]:
    tree = planted(*case)
    sets = (frozenset(s) for n in range(case[1] + 1) for s in combinations(range(case[1]), n))
    return {late: delivers(tree, late) for late in sets}


@pytest.mark.parametrize("case", SMALL)
def test_numbers_are_those_of_all_sets(case: tuple[str, int, int, int]) -> None:
    tree, found = planted(*case), outcomes(case)
    said = tolerance(tree)
    fewest = min(len(late) for late, done in found.items() if not done)
    assert said.anywhere == fewest - 1
    assert said.at_best == max(len(late) for late, done in found.items() if done)
    leaves = {worker for worker in tree.workers if not tree.children[worker]}
    assert said.leaves + 1 == min(
        len(late) for late, done in found.items() if not done and late <= leaves
    )


@pytest.mark.parametrize("case", SMALL)
def test_the_workers_named_are_examples(case: tuple[str, int, int, int]) -> None:
    found, said = outcomes(case), tolerance(planted(*case))
    assert not found[frozenset(said.breaking)]
    assert not found[frozenset(said.breaking_leaves)]
    assert found[frozenset(range(case[1])) - frozenset(said.enough)]


@pytest.mark.parametrize("case", SMALL)
def test_so_many_under_every_parent(case: tuple[str, int, int, int]) -> None:
    tree, said = planted(*case), tolerance(planted(*case))
    assert said.per_parent == case[3]
    last = [c for kids in tree.children.values() for c in kids[len(kids) - case[3] :] if kids]
    assert said.under_every_parent == len(last)
    assert outcomes(case)[frozenset(last)]


@pytest.mark.parametrize("case", SMALL)
def test_the_chance_is_that_of_all_sets(case: tuple[str, int, int, int]) -> None:
    late = {worker: 0.02 + 0.03 * worker for worker in range(case[1])}
    expected = 0.0
    for who, done in outcomes(case).items():
        chance = 1.0
        for worker, own in late.items():
            chance *= own if worker in who else 1 - own
        expected += 0.0 if done else chance
    assert chance_of_waiting(planted(*case), late) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("code", "workers", "fanout", "stragglers", "done"),
    [("fractional", 84, 4, 1, 0.994), ("cyclic", 84, 4, 1, 0.973),
     ("fractional", 156, 12, 1, 0.976), ("cyclic", 156, 12, 1, 0.397),
     ("fractional", 156, 12, 3, 1.0), ("cyclic", 156, 12, 3, 0.997)],
)  # fmt: skip
def test_the_chance_is_what_was_found_by_drawing(
    code: str, workers: int, fanout: int, stragglers: int, done: float
) -> None:
    """By an independent program, of each worker late with a chance of 5 %."""
    tree = planted(code, workers, fanout, stragglers)
    late = dict.fromkeys(tree.workers, 0.05)
    assert 1 - chance_of_waiting(tree, late) == pytest.approx(done, abs=0.005)


@pytest.mark.parametrize(
    ("fanout", "layers", "stragglers", "code"),
    [(3, 2, 1, "cyclic"), (4, 2, 2, "cyclic"), (4, 3, 1, "cyclic"), (4, 3, 2, "cyclic"),
     (12, 2, 3, "cyclic_mds"), (4, 3, 1, "fractional"), (12, 2, 3, "fractional")],
)  # fmt: skip
def test_regular_trees(fanout: int, layers: int, stragglers: int, code: str) -> None:
    number = sum(fanout**layer for layer in range(1, layers + 1))
    said = tolerance(planted(code, number, fanout, stragglers))
    assert said.anywhere == stragglers
    assert said.leaves == (stragglers + 1) ** layers - 1
    assert said.under_every_parent == stragglers * number // fanout
    least = sum((fanout - stragglers) ** layer for layer in range(1, layers + 1))
    if code == "fractional":  # one of each team is enough
        least = sum((fanout // (stragglers + 1)) ** layer for layer in range(1, layers + 1))
    assert said.at_best == number - least
