"""Sparsifiers: which elements they choose, that nothing is lost, and what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.compress.simulated import Ranks, compressor, exchange, lay_out, maker, tensors
from tests.examples import examples
from thalweg.compress.codec import Array, GatheredCodec, SummableCodec
from thalweg.compress.compressor import kept_elements
from thalweg.compress.generators import generator
from thalweg.compress.mstopk import mean_and_most, search
from thalweg.compress.randomk import Strata
from thalweg.compress.sparse import parts

SHAPES = [(40, 50), (16, 3, 7, 7), (300, 4), (5, 1000)]
ALL: list[tuple[str, dict[str, Any]]] = [
    ("topk", {"ratio": 0.05, "exact": False}),
    ("topk", {"ratio": 0.05, "exact": True}),
    ("mstopk", {"ratio": 0.05, "samplings": 20}),
    ("dgc", {"ratio": 0.05, "momentum": 0.9}),
    ("randomk", {"ratio": 0.05}),
    ("randomblock", {"ratio": 0.05}),
]
CONSERVING = [case for case in ALL if case[0] != "dgc"]  # whose velocity counts a gradient often
GATHERED = [case for case in ALL if case[0] in ("topk", "mstopk", "dgc")]
SUMMED = [case for case in ALL if case[0] in ("randomk", "randomblock")]

LARGE = 200_000


def heavy(n: int, seed: int = 0) -> Array:
    source = np.random.default_rng(seed)
    return (source.standard_normal(n) * np.exp(2 * source.standard_normal(n))).astype(np.float32)


def gaussian(n: int) -> Array:
    return np.random.default_rng(1).standard_normal(n).astype(np.float32)


def sparse(n: int) -> Array:
    values = np.zeros(n, np.float32)
    values[:: n // 50] = 1 + np.arange(len(values[:: n // 50]))
    return values


VECTORS = {
    "heavy-tailed": heavy(LARGE),
    "gaussian": gaussian(LARGE),
    "constant": np.full(LARGE, -0.25, np.float32),
    "zero": np.zeros(LARGE, np.float32),
    "mostly zero": sparse(LARGE),
    "two values": np.where(np.arange(LARGE) % 3, 1, -2).astype(np.float32),
    "ascending": np.sort(heavy(LARGE)),
    "large every 100th": gaussian(LARGE) + 100 * (np.arange(LARGE) % 100 == 0).astype(np.float32),
    "large at the end": np.concatenate((gaussian(LARGE - 3000), 50 + gaussian(3000))),
    "denormal": heavy(LARGE) * np.float32(1e-42),
    "huge": np.clip(heavy(LARGE), -3, 3) * np.float32(1e38),
}


def encoded(name: str, values: Array, step: int = 0, **arguments: Any) -> tuple[Array, Array]:
    """Values and indices that the codec sends for one tensor."""
    codec = maker(name, lay_out([(1, len(values))]), **arguments)()
    assert isinstance(codec, GatheredCodec)
    payload = np.empty(codec.nbytes, np.uint8)
    codec.encode(values.copy(), payload, step, 0, keep=False)
    return parts(payload)


def magnitudes(values: Array) -> Array:
    return np.sort(np.abs(values))[::-1]


@given(
    shapes=st.lists(
        st.lists(st.integers(1, 12), min_size=2, max_size=4).map(tuple), min_size=1, max_size=5
    ),
    ratio=st.sampled_from([0.001, 0.01, 0.1, 0.5, 1.0]),
    case=st.sampled_from(ALL),
)
def test_payloads_are_of_the_declared_size(
    shapes: list[tuple[int, ...]], ratio: float, case: tuple[str, dict[str, Any]]
) -> None:
    name, arguments = case
    arguments = {**arguments, "ratio": ratio}
    layout = lay_out(shapes)
    declared = compressor(name).sizes(tensors(layout), 0, **arguments)
    codec = maker(name, layout, **arguments)()
    if isinstance(codec, GatheredCodec):
        assert [codec.nbytes] == [payload.nbytes for payload in declared]
    else:
        assert isinstance(codec, SummableCodec)
        values = heavy(layout.length)
        [sent] = list(codec.rounds(values, np.empty_like(values), 0, keep=False))
        assert [sent.nbytes] == [payload.nbytes for payload in declared]


@pytest.mark.parametrize("kind", VECTORS)
@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.3])
def test_exact_topk_is_the_naive_one(kind: str, ratio: float) -> None:
    values = VECTORS[kind]
    k = kept_elements(len(values), ratio)
    sent, indices = encoded("topk", values, ratio=ratio, exact=True)
    assert len(set(indices.tolist())) == k
    np.testing.assert_array_equal(values[indices], sent)
    np.testing.assert_array_equal(magnitudes(sent), magnitudes(values)[:k])


@pytest.mark.parametrize("kind", VECTORS)
@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.3])
@pytest.mark.parametrize("step", [0, 1])
def test_sampled_topk_is_within_five_percent(kind: str, ratio: float, step: int) -> None:
    """The largest are among those that are sent, and at most 5 % of k are missing."""
    values = VECTORS[kind]
    k = kept_elements(len(values), ratio)
    sent, indices = encoded("topk", values, step, ratio=ratio, exact=False)
    count = len(set(indices[sent != 0].tolist()))
    assert count <= k
    largest = magnitudes(values)
    assert count >= min(0.95 * k, float(np.count_nonzero(values)))
    np.testing.assert_array_equal(magnitudes(sent)[:count], largest[:count])


@pytest.mark.parametrize("kind", VECTORS)
@pytest.mark.parametrize("samplings", [1, 3, 20])
@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.6])
def test_multi_sampling_sends_exactly_k(kind: str, samplings: int, ratio: float) -> None:
    values = VECTORS[kind]
    k = kept_elements(len(values), ratio)
    sent, indices = encoded("mstopk", values, ratio=ratio, samplings=samplings)
    assert len(set(indices.tolist())) == k
    np.testing.assert_array_equal(values[indices], sent)


@given(
    kind=st.sampled_from(["heavy-tailed", "gaussian", "mostly zero", "two values"]),
    k=st.integers(1, LARGE // 2),
    beyond=st.integers(1, 5000),
    samplings=st.integers(1, 30),
)
@examples(30)
def test_counting_among_candidates_finds_the_same_thresholds(
    kind: str, k: int, beyond: int, samplings: int
) -> None:
    """As counting among all does, from which on there are more than k."""
    every = np.abs(VECTORS[kind])
    mean, most = mean_and_most(every)
    least = np.sort(every)[-(k + beyond)]
    candidates = every[every >= least]
    among = search(candidates, float(least), mean, most, k, samplings)
    assert among == search(every, 0.0, mean, most, k, samplings)


@pytest.mark.parametrize("kind", ["heavy-tailed", "gaussian", "ascending"])
def test_multi_sampling_with_enough_passes_is_topk_but_for_a_few(kind: str) -> None:
    values = VECTORS[kind]
    sent, _ = encoded("mstopk", values, ratio=0.01, samplings=30)
    largest = magnitudes(values)[: len(sent)]
    assert np.count_nonzero(np.abs(sent) >= largest[-1]) >= 0.99 * len(sent)


@given(
    values=st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=60),
    ratio=st.floats(0.01, 1.0),
    step=st.integers(0, 1000),
)
def test_small_tensors_of_any_values(values: list[float], ratio: float, step: int) -> None:
    vector = np.array(values, np.float32)
    k = kept_elements(len(vector), ratio)
    sent, _ = encoded("topk", vector, step, ratio=ratio, exact=True)
    np.testing.assert_array_equal(magnitudes(sent), magnitudes(vector)[:k])
    wide = vector.astype(np.float64)
    missed = (wide**2).sum() - (sent.astype(np.float64) ** 2).sum()
    assert missed <= (1 - k / len(vector) + 1e-12) * (wide**2).sum()
    _, indices = encoded("mstopk", vector, step, ratio=ratio, samplings=5)
    assert len(set(indices.tolist())) == k


@pytest.mark.parametrize(("name", "arguments"), CONSERVING)
def test_result_and_what_is_left_are_the_input(name: str, arguments: dict[str, Any]) -> None:
    layout = lay_out(SHAPES)
    ranks = Ranks(maker(name, layout, **arguments), 1)
    gradient = heavy(layout.length)
    result = ranks.reduce([gradient])
    assert np.count_nonzero(result)
    np.testing.assert_array_equal(result + ranks.feedback[0].residual, gradient)


@examples(10)
@given(
    case=st.sampled_from(CONSERVING),
    count=st.integers(2, 5),
    seed=st.integers(0, 1000),
)
def test_nothing_is_lost_over_ranks_and_steps(
    case: tuple[str, dict[str, Any]], count: int, seed: int
) -> None:
    name, arguments = case
    layout = lay_out(SHAPES)
    ranks = Ranks(maker(name, layout, **arguments), count)
    given_in = np.zeros(layout.length)
    came_out = np.zeros(layout.length)
    for step in range(6):
        gradients = [heavy(layout.length, seed + 100 * step + r) for r in range(count)]
        came_out += ranks.reduce(gradients)
        given_in += np.sum(gradients, axis=0, dtype=np.float64)
    np.testing.assert_allclose(came_out + ranks.left, given_in, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("name", "arguments"), CONSERVING)
def test_the_running_mean_converges(name: str, arguments: dict[str, Any]) -> None:
    """For the same gradient at every step, results are right on average: the error of the mean is
    what is left, over the number of steps."""
    layout = lay_out(SHAPES)
    ranks = Ranks(maker(name, layout, **{**arguments, "ratio": 0.2}), 2)
    gradients = [gaussian(layout.length), heavy(layout.length).clip(-3, 3)]
    mean = np.sum(gradients, axis=0)
    total = np.zeros(layout.length)
    errors = []
    for step in range(1, 81):
        total += ranks.reduce(gradients)
        errors.append(np.linalg.norm(total / step - mean) / np.linalg.norm(mean))
    assert errors[-1] < 0.12
    assert errors[-1] < errors[9] / 3


@pytest.mark.parametrize(("name", "arguments"), ALL)
def test_same_inputs_same_results(name: str, arguments: dict[str, Any]) -> None:
    """And numpy's own random state isn't touched."""
    layout = lay_out(SHAPES)
    before: Any = np.random.get_state(legacy=False)
    results = []
    for _ in range(2):
        ranks = Ranks(maker(name, layout, **arguments), 2)
        results.append([ranks.reduce([heavy(layout.length, r) for r in (1, 2)]) for _ in range(3)])
    np.testing.assert_array_equal(results[0], results[1])
    after: Any = np.random.get_state(legacy=False)
    np.testing.assert_array_equal(before["state"]["key"], after["state"]["key"])
    assert before["state"]["pos"] == after["state"]["pos"]


@pytest.mark.parametrize(("name", "arguments"), SUMMED)
def test_result_may_replace_the_values(name: str, arguments: dict[str, Any]) -> None:
    layout = lay_out(SHAPES)
    values = heavy(layout.length)
    [apart] = exchange([maker(name, layout, **arguments)()], [values.copy()], 3, keep=False)
    codec = maker(name, layout, **arguments)()
    assert isinstance(codec, SummableCodec)
    list(codec.rounds(values, values, 3, keep=False))
    np.testing.assert_array_equal(values, apart)


@given(n=st.integers(1, 500), share=st.floats(0.001, 1.0), step=st.integers(0, 10_000))
def test_strata_give_distinct_places(n: int, share: float, step: int) -> None:
    k = max(1, round(n * share))
    places = Strata(n, k).draw(generator(step, "a"))
    assert len(set(places.tolist())) == k
    assert 0 <= places.min() <= places.max() < n


@pytest.mark.parametrize(("name", "arguments"), SUMMED)
@pytest.mark.parametrize("ratio", [0.1, 0.7])
def test_every_element_is_as_likely(name: str, arguments: dict[str, Any], ratio: float) -> None:
    layout = lay_out([(3, 21)])
    codec = maker(name, layout, ratio=ratio)()
    ones = np.ones(layout.length, np.float32)
    steps = 3000
    counts = np.zeros(layout.length)
    for step in range(steps):
        counts += exchange([codec], [ones], step, keep=False)[0]
    expected = kept_elements(layout.length, ratio) / layout.length * steps
    assert counts.sum() == kept_elements(layout.length, ratio) * steps
    assert np.abs(counts - expected).max() < 5 * np.sqrt(expected)


def test_tensors_of_one_size_draw_differently() -> None:
    layout = lay_out([(10, 100), (10, 100)])
    codec = maker("randomk", layout, ratio=0.1)()
    [out] = exchange([codec], [np.ones(layout.length, np.float32)], 0, keep=False)
    assert (out[:1000] != out[1000:]).any()


def test_dgc_that_sends_everything_sends_the_gradient() -> None:
    """What is sent is cleared in both, so nothing goes on."""
    layout = lay_out(SHAPES)
    ranks = Ranks(maker("dgc", layout, ratio=1.0, momentum=0.9), 2)
    for step in range(3):
        gradients = [heavy(layout.length, 10 * step + r) for r in range(2)]
        np.testing.assert_array_equal(ranks.reduce(gradients), gradients[0] + gradients[1])
        assert not ranks.left.any()


def test_dgc_gathers_the_velocities_of_momentum_sgd() -> None:
    """Until an element is sent, v is the sum of all velocities of SGD with momentum."""
    layout = lay_out([(50, 40)])
    ranks = Ranks(maker("dgc", layout, ratio=0.001, momentum=0.9), 1)
    velocity = np.zeros(layout.length)
    wanted = np.zeros(layout.length)
    sent = np.zeros(layout.length, bool)
    for step in range(6):
        gradient = heavy(layout.length, step)
        velocity = 0.9 * velocity + gradient
        wanted += velocity
        sent |= ranks.reduce([gradient]) != 0
    assert 0 < sent.sum() <= 12
    np.testing.assert_allclose(ranks.left[~sent], wanted[~sent], rtol=1e-4, atol=1e-4)
    codec_velocity = ranks.codecs[0].state["velocity"].arrays["t0"]
    np.testing.assert_allclose(codec_velocity[~sent], velocity[~sent], rtol=1e-4, atol=1e-4)


def test_dgc_clears_the_velocity_of_what_was_sent() -> None:
    layout = lay_out([(50, 40)])
    ranks = Ranks(maker("dgc", layout, ratio=0.1, momentum=0.9), 1)
    sent = ranks.reduce([gaussian(layout.length)]) != 0
    velocity = ranks.codecs[0].state["velocity"].arrays["t0"]
    assert sent.sum() == 200
    assert not velocity[sent].any()
    assert velocity[~sent].all()
