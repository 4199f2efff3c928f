"""Layers that depend on more than the sample: under a code a warning, an error, or neither."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

from tests.codes.trees import planted
from tests.training.coded import SIZE, TREE, Script, all_of, late, train_together
from tests.training.workers import one_value, same_bits
from thalweg.errors import PlanError
from thalweg.training.coded_model_check import refuse_what_differs, warn_of_what_differs

TROUBLE = all_of(late(6, at=2, until=6), late(1, at=7, until=10), late(3, at=8, until=15))


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 3))


def with_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


@pytest.mark.parametrize("make", [with_dropout, with_norm])
@pytest.mark.parametrize("code", ["cyclic", "cyclic_mds"])
def test_refused_where_replicas_have_different_samples(
    code: str, make: Callable[[], nn.Module]
) -> None:
    with pytest.raises(
        PlanError, match=r"batch norm or dropout \(1\) makes workers with different"
    ):
        refuse_what_differs(make(), planted(code, 6, 2, 1))
    refuse_what_differs(make(), planted("fractional", 6, 2, 1))
    refuse_what_differs(nn.Sequential(nn.Dropout(0.0)), planted(code, 6, 2, 1))


def test_a_warning_where_they_have_the_same() -> None:
    with pytest.warns(UserWarning, match=r"batch norm \(1\) normalises over each worker's own sam"):
        warn_of_what_differs(with_norm(), random=True)
    with pytest.warns(UserWarning, match=r"dropout \(1\) drops something else on each worker, so"):
        warn_of_what_differs(with_dropout(), random=True)
    warn_of_what_differs(with_dropout(), random=False)  # and warnings are errors here
    layers = nn.Sequential(*(nn.Dropout() for _ in range(5)))
    with pytest.warns(UserWarning, match=r"dropout \(0, 1, 2 and 2 more\)"):
        warn_of_what_differs(layers, random=True)


def test_dropout_in_shared_random_is_the_same_whoever_is_late() -> None:
    script = Script(sync=TREE, make=with_dropout, shares_random=True)
    calm, troubled = train_together(
        script, Script(sync=TREE, make=with_dropout, shares_random=True, act=TROUBLE)
    )
    assert same_bits(calm + troubled)
    assert one_value(calm + troubled, "random_untouched") is True


def test_one_rank_tells_of_a_real_run() -> None:
    """The root, after its first step: the others would say the same."""
    (results,) = train_together(Script(sync=TREE, make=with_dropout, epochs=1), warns=True)
    warnings_by_rank = [result["warnings"] for result in results]
    assert [len(lines) for lines in warnings_by_rank] == [1] + [0] * (SIZE - 1)
    assert warnings_by_rank[0][0].startswith("dropout (1) drops something else on each worker")
