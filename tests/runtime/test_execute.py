from __future__ import annotations

from time import monotonic

import numpy as np
import pytest

from tests.schedules.test_topologies import build
from thalweg.errors import PeerLate
from thalweg.facts import Cluster
from thalweg.runtime import Part, execute, flat, run_threads
from thalweg.schedules import Group
from thalweg.transports import Array, Transport

GROUP = Group.everybody(Cluster.flat(4))


def test_rounds_do_not_mix() -> None:
    """A fast rank may be a round ahead; labels keep the rounds apart."""
    schedule = build("ring", GROUP, 100)

    def work(transport: Transport) -> list[Array]:
        results = []
        for number in range(5):
            vector = np.full(100, float(transport.rank + 10 * number))
            part = Part.of(schedule, transport.rank)
            execute(part, transport, flat(schedule, vector), round_number=number, timeout=10)
            results.append(vector)
        return results

    for results in run_threads(GROUP.ranks, work).values():
        for number, result in enumerate(results):
            np.testing.assert_array_equal(result, 0 + 1 + 2 + 3 + 40.0 * number)


def test_a_rank_that_never_comes_is_named_by_the_deadline() -> None:
    schedule = build("ring", GROUP, 100)

    def work(transport: Transport) -> None:
        if transport.rank != 2:
            vector = np.ones(100)
            execute(
                Part.of(schedule, transport.rank), transport, flat(schedule, vector), timeout=0.3
            )

    start = monotonic()
    with pytest.raises(PeerLate, match=r"waited at step 0, round 0, for"):
        run_threads(GROUP.ranks, work)
    assert monotonic() - start < 5


def test_an_error_on_one_rank_stops_the_others_at_once() -> None:
    schedule = build("ring", GROUP, 100)

    def work(transport: Transport) -> None:
        if transport.rank == 2:
            raise ValueError("mine")
        vector = np.ones(100)
        execute(Part.of(schedule, transport.rank), transport, flat(schedule, vector), timeout=60)

    start = monotonic()
    with pytest.raises(ValueError, match="mine"):
        run_threads(GROUP.ranks, work)
    assert monotonic() - start < 10


def test_every_dtype_that_numpy_adds() -> None:
    schedule = build("hierarchical", GROUP, 100)
    for dtype in (np.float16, np.float32, np.float64, np.int32):

        def work(transport: Transport, dtype: type = dtype) -> Array:
            vector = np.full(100, transport.rank, dtype=dtype)
            execute(
                Part.of(schedule, transport.rank), transport, flat(schedule, vector), timeout=10
            )
            return vector

        for result in run_threads(GROUP.ranks, work).values():
            assert result.dtype == dtype
            np.testing.assert_array_equal(result, np.full(100, 6, dtype=dtype))
