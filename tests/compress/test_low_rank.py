"""PowerSGD and ACP-SGD: what factors stand for, that nothing is lost, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.compress.simulated import Ranks, compressor, exchange, lay_out, maker, tensors
from tests.examples import examples
from thalweg.compress.codec import Array, SummableCodec
from thalweg.compress.powersgd import orthonormalise
from thalweg.errors import NotFinite

SHAPES = [(40, 50), (16, 3, 7, 7), (300, 4), (5, 1000), (2, 3)]
BOTH = ["powersgd", "acpsgd"]


def gaussian(n: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


def of_rank(rows: int, columns: int, rank: int, seed: int = 0) -> Array:
    left = gaussian(rows * rank, seed).reshape(rows, rank)
    right = gaussian(rank * columns, seed + 1).reshape(rank, columns)
    return (left @ right).reshape(-1)


def distance(result: Array, wanted: Array) -> float:
    wide = wanted.astype(np.float64)
    return float(np.linalg.norm(result - wide) / np.linalg.norm(wide))


@given(
    shapes=st.lists(
        st.lists(st.integers(1, 12), min_size=2, max_size=4).map(tuple), min_size=1, max_size=5
    ),
    rank=st.integers(1, 6),
    step=st.integers(0, 3),
    name=st.sampled_from(BOTH),
)
def test_payloads_are_of_the_declared_size(
    shapes: list[tuple[int, ...]], rank: int, step: int, name: str
) -> None:
    layout = lay_out(shapes)
    declared = compressor(name).sizes(tensors(layout), step, rank=rank)
    codec = maker(name, layout, rank=rank)()
    assert isinstance(codec, SummableCodec)
    values = gaussian(layout.length)
    out = np.empty_like(values)
    sent = [payload.nbytes for payload in codec.rounds(values, out, step, keep=False)]
    assert sent == [payload.nbytes for payload in declared]
    assert np.isfinite(out).all()


@examples(30)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 40),
    rank=st.integers(1, 12),
    seed=st.integers(0, 100),
    scale=st.sampled_from([1e-30, 1e-6, 1.0, 1e15]),
    name=st.sampled_from(BOTH),
)
def test_a_matrix_of_low_rank_is_exact_after_the_first_steps(
    rows: int, columns: int, rank: int, seed: int, scale: float, name: str
) -> None:
    matrix = of_rank(rows, columns, rank, seed) * np.float32(scale)
    codec = maker(name, lay_out([(rows, columns)]), rank=rank)()
    for step in range(3):
        [out] = exchange([codec], [matrix.copy()], step, keep=False)
    assert distance(out, matrix) < 1e-3


@examples(30)
@given(seed=st.integers(0, 100), rank=st.integers(1, 12), name=st.sampled_from(BOTH))
def test_a_result_is_a_projection(seed: int, rank: int, name: str) -> None:
    """Never longer than the matrix, and never further from it than zero is."""
    layout = lay_out(SHAPES)
    codec = maker(name, layout, rank=rank)()
    for step in range(4):
        values = gaussian(layout.length, seed + step)
        [out] = exchange([codec], [values.copy()], step, keep=False)
        for segment in layout.compressed:
            whole = np.linalg.norm(values[segment.place])
            left = np.linalg.norm(values[segment.place] - out[segment.place])
            part = np.linalg.norm(out[segment.place])
            assert part <= whole * (1 + 1e-5)
            assert left <= whole * (1 + 1e-5)
            assert part**2 + left**2 == pytest.approx(whole**2, rel=1e-4)


@pytest.mark.parametrize("name", BOTH)
def test_the_same_matrix_again_and_again_gets_its_best_approximation(name: str) -> None:
    """The iteration goes on from step to step, to the singular vectors (Eckart and Young)."""
    rows, columns, rank = 60, 40, 3
    source = np.random.default_rng(0)
    u = np.linalg.qr(source.standard_normal((rows, columns)))[0]
    v = np.linalg.qr(source.standard_normal((columns, columns)))[0]
    singular = 2.0 ** -np.arange(columns)
    matrix = ((u * singular) @ v).astype(np.float32).reshape(-1)
    codec = maker(name, lay_out([(rows, columns)]), rank=rank)()
    for step in range(12):
        [out] = exchange([codec], [matrix.copy()], step, keep=False)
    best = np.sqrt((singular[rank:] ** 2).sum())
    assert np.linalg.norm(out - matrix) == pytest.approx(best, rel=1e-3)


@pytest.mark.parametrize("name", BOTH)
def test_result_and_what_is_left_are_the_input(name: str) -> None:
    layout = lay_out(SHAPES)
    ranks = Ranks(maker(name, layout, rank=2), 1)
    gradient = gaussian(layout.length)
    result = ranks.reduce([gradient])
    np.testing.assert_allclose(result + ranks.left, gradient, atol=1e-5)


@examples(10)
@given(name=st.sampled_from(BOTH), count=st.integers(2, 5), seed=st.integers(0, 1000))
def test_nothing_is_lost_over_ranks_and_steps(name: str, count: int, seed: int) -> None:
    layout = lay_out(SHAPES)
    ranks = Ranks(maker(name, layout, rank=2), count)
    given_in, came_out = np.zeros(layout.length), np.zeros(layout.length)
    for step in range(6):
        gradients = [gaussian(layout.length, seed + 100 * step + r) for r in range(count)]
        came_out += ranks.reduce(gradients)
        given_in += np.sum(gradients, axis=0, dtype=np.float64)
    np.testing.assert_allclose(came_out + ranks.left, given_in, atol=1e-3)


@pytest.mark.parametrize("name", BOTH)
def test_the_running_mean_converges(name: str) -> None:
    """And what a rank keeps stays bounded, though the ranks' gradients are opposed."""
    layout = lay_out([(12, 16), (8, 5, 3)])
    ranks = Ranks(maker(name, layout, rank=2), 2)
    apart = 5 * gaussian(layout.length, 1)
    mean = gaussian(layout.length, 2)
    gradients = [mean / 2 + apart, mean / 2 - apart]
    total = np.zeros(layout.length)
    errors, lengths = [], []
    for step in range(1, 121):
        total += ranks.reduce(gradients)
        errors.append(distance(total / step, mean))
        lengths.append(np.linalg.norm(ranks.feedback[0].residual))
    assert errors[-1] < 0.15
    assert errors[-1] < errors[9] / 4
    assert max(lengths[60:]) < 2 * max(lengths[:60])


@examples(10)
@given(order=st.permutations(range(4)), name=st.sampled_from(BOTH))
def test_the_order_of_the_ranks_does_not_matter(order: list[int], name: str) -> None:
    layout = lay_out(SHAPES)
    gradients = [gaussian(layout.length, seed) for seed in range(4)]
    first, second = (Ranks(maker(name, layout, rank=2), 4) for _ in range(2))
    for _ in range(3):
        one = first.reduce(gradients)
        other = second.reduce([gradients[i] for i in order])
        assert distance(other, one) < 1e-3


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-38, 1e30])
def test_constant_matrices_of_any_size(name: str, value: float) -> None:
    """Zeros too, and what comes after them."""
    layout = lay_out(SHAPES)
    ranks = Ranks(maker(name, layout, rank=4), 2)
    constant = np.full(layout.length, value, np.float32)
    for _ in range(3):
        result = ranks.reduce([constant, constant])
        assert np.isfinite(result).all()
    for _ in range(2):
        gradient = gaussian(layout.length)
        result = ranks.reduce([gradient, gradient])
        assert np.isfinite(result).all()
        assert np.count_nonzero(result)


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_what_is_not_finite_is_refused_by_name(name: str, wrong: float) -> None:
    """And the codec goes on with the next gradient."""
    layout = lay_out(SHAPES)
    codec = maker(name, layout, rank=2)()
    for step in range(2):
        values = gaussian(layout.length)
        values[layout.compressed[1].start + 7] = wrong
        with pytest.raises(NotFinite) as refused:
            exchange([codec], [values], step, keep=False)
        assert refused.value.names == ("t1",)
    for step in range(2, 4):
        [out] = exchange([codec], [gaussian(layout.length)], step, keep=False)
        assert np.isfinite(out).all()


@pytest.mark.parametrize("name", BOTH)
def test_result_may_replace_the_values(name: str) -> None:
    layout = lay_out(SHAPES)
    values = gaussian(layout.length)
    [apart] = exchange([maker(name, layout, rank=2)()], [values.copy()], 0, keep=False)
    codec = maker(name, layout, rank=2)()
    assert isinstance(codec, SummableCodec)
    list(codec.rounds(values, values, 0, keep=False))
    np.testing.assert_array_equal(values, apart)


@pytest.mark.parametrize("name", BOTH)
def test_state_is_by_parameter_and_can_be_put_back(name: str) -> None:
    """Into a codec with another layout."""
    one, other = lay_out([(40, 50), (300, 4)]), lay_out([(40, 50)])
    values = gaussian(one.length)
    first, second = maker(name, one, rank=2)(), maker(name, other, rank=2)()
    exchange([first], [values.copy()], 0, keep=False)
    for kind, kept in second.state.items():
        for parameter, state in kept.arrays.items():
            state[:] = first.state[kind].arrays[parameter]
    [whole] = exchange([first], [values.copy()], 1, keep=False)
    [part] = exchange([second], [values[:2000].copy()], 1, keep=False)
    np.testing.assert_allclose(part, whole[:2000], atol=1e-5)


@pytest.mark.parametrize("name", BOTH)
def test_the_global_random_state_is_not_touched(name: str) -> None:
    layout = lay_out(SHAPES)
    before: Any = np.random.get_state(legacy=False)
    exchange([maker(name, layout, rank=2)()], [gaussian(layout.length)], 0, keep=False)
    after: Any = np.random.get_state(legacy=False)
    np.testing.assert_array_equal(before["state"]["key"], after["state"]["key"])
    assert before["state"]["pos"] == after["state"]["pos"]


@given(
    rows=st.integers(1, 6),
    extra=st.integers(0, 50),
    seed=st.integers(0, 1000),
    exponent=st.integers(-40, 30),
    nearly=st.sampled_from([0.0, 1e-7, 1e-4, 1e-2, 1.0]),
)
def test_rows_are_orthonormal_however_dependent(
    rows: int, extra: int, seed: int, exponent: int, nearly: float
) -> None:
    """Rows are close to multiples of one, and lie in the space that the result spans."""
    source = np.random.default_rng(seed)
    columns = rows + extra
    matrix = np.outer(source.standard_normal(rows), source.standard_normal(columns))
    matrix += nearly * source.standard_normal((rows, columns))
    made = (matrix * 10.0**exponent).astype(np.float32)
    before = made.astype(np.float64)
    several = [made, np.zeros((rows, columns), np.float32)]
    orthonormalise(several)
    for result in several:
        wide = result.astype(np.float64)
        np.testing.assert_allclose(wide @ wide.T, np.eye(rows), atol=1e-5)
    wide = made.astype(np.float64)
    outside = np.linalg.norm(before - before @ wide.T @ wide, axis=1)
    assert (outside <= 1e-5 * np.linalg.norm(before, axis=1)).all()
