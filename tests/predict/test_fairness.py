"""Max-min fair rates, and token buckets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thalweg.facts.machine import FittedValue, TransportCosts
from thalweg.predict.fairness import FluidFlow, SharedResource, fair_rates, neighbours
from thalweg.predict.flow_simulator import burst_through

CROWDED = TransportCosts(crowding=((1, FittedValue(1.0)), (4, FittedValue(0.6))))


def flow(*channels: SharedResource, left: float = 0.0) -> FluidFlow:
    made = FluidFlow(channels)
    made.left = left
    for channel in channels:
        channel.flows[made] = None
    return made


@given(
    capacities=st.lists(st.floats(1, 1e9), min_size=1, max_size=8),
    paths=st.lists(st.sets(st.integers(0, 7), min_size=1, max_size=4), min_size=1, max_size=20),
)
def test_everybody_is_held_back_where_nobody_has_more(
    capacities: list[float], paths: list[set[int]]
) -> None:
    """That is what max-min fair means, and there is only one such sharing."""
    channels = [SharedResource(capacity, CROWDED) for capacity in capacities]
    crossed = [{i % len(channels) for i in path} for path in paths]
    flows = [flow(*(channels[i] for i in path)) for path in crossed]
    rates = fair_rates(flows, channels)
    full = {}
    for channel in channels:
        used, capacity = sum(rates[f] for f in channel.flows), channel.capacity(len(channel.flows))
        assert used <= capacity * (1 + 1e-9)
        full[channel] = used >= capacity * (1 - 1e-9)
    for one in flows:
        assert any(
            full[channel] and rates[one] >= max(rates[f] for f in channel.flows) * (1 - 1e-9)
            for channel in one.channels
        )


def test_only_who_shares_something_is_reached() -> None:
    a, b, c, d = (SharedResource(1.0) for _ in range(4))
    first, second, _ = flow(a, b), flow(b, c), flow(d)
    flows, channels = neighbours([a])
    assert set(flows) == {first, second}
    assert set(channels) == {a, b, c}


def test_a_crowd_loses_some_of_a_link() -> None:
    """Half way between 1 and 4 flows, in logarithms, are 2."""
    link = SharedResource(10.0, CROWDED)
    flows = [flow(link), flow(link)]
    assert fair_rates(flows, [link]) == dict.fromkeys(flows, pytest.approx(10.0 * 0.8 / 2))


def test_tokens_are_shared_as_far_as_they_are_needed() -> None:
    """Three tokens: the small one takes one, the large one two."""
    link, wide = SharedResource(1.0, burst=3.0), SharedResource(1.0, burst=9.0)
    small, large = flow(link, left=1.0), flow(link, wide, left=4.0)
    burst_through([small, large])
    assert (small.left, large.left) == (0.0, 2.0)
    assert (link.tokens, wide.tokens) == (0.0, 7.0)
