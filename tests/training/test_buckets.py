from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thalweg.engine.arithmetic import as_array
from thalweg.errors import WorkloadError
from thalweg.facts import Size
from thalweg.training.buckets import DTYPES, Layout, scaled_into

SHAPES = st.lists(st.integers(1, 5), max_size=3).map(tuple)
TENSORS = st.lists(st.tuples(SHAPES, st.sampled_from(sorted(DTYPES, key=str))), min_size=1)


@given(TENSORS, st.integers(1, 200))
def test_every_tensor_has_its_place(
    kinds: list[tuple[tuple[int, ...], torch.dtype]], limit: int
) -> None:
    """Views have their tensor's shape and type, don't overlap, and fill the bucket."""
    tensors = {str(i): torch.empty(shape, dtype=dtype) for i, (shape, dtype) in enumerate(kinds)}
    layout = Layout.of(tensors, Size(limit))
    for number, (name, tensor) in enumerate(tensors.items(), start=1):
        (bucket,) = (b for b in layout.buckets if name in b.views)
        assert bucket.views[name].shape == tensor.shape
        assert bucket.views[name].dtype == tensor.dtype
        bucket.views[name].fill_(number % 100)
    for bucket in layout.buckets:
        assert sum(view.numel() for view in bucket.views.values()) == len(bucket.vector)
    for number, name in enumerate(tensors, start=1):
        (bucket,) = (b for b in layout.buckets if name in b.views)
        assert (bucket.views[name] == number % 100).all()


@given(TENSORS, st.integers(1, 200))
def test_the_layout_follows_from_names_and_shapes_alone(
    kinds: list[tuple[tuple[int, ...], torch.dtype]], limit: int
) -> None:
    def names() -> list[list[str]]:
        tensors = {str(i): torch.rand(shape).to(dtype) for i, (shape, dtype) in enumerate(kinds)}
        return [list(bucket.views) for bucket in Layout.of(tensors, Size(limit)).buckets]

    assert names() == names()


@pytest.mark.parametrize("dtype", sorted(DTYPES, key=str))
def test_the_array_is_the_same_memory(dtype: torch.dtype) -> None:
    tensor = torch.zeros(3, dtype=dtype)
    array = as_array(tensor)
    array[1] = array[0] + 1  # whatever its bits mean
    assert tensor.view(torch.uint8).any()
    assert array.nbytes == tensor.nbytes


def test_scaling_copes_with_strides() -> None:
    view = torch.zeros(2, 3)
    scaled_into(view, torch.arange(6.0).reshape(3, 2).t(), 0.5)
    assert view.tolist() == [[0, 1, 2], [0.5, 1.5, 2.5]]


def test_a_type_that_does_not_travel() -> None:
    with pytest.raises(WorkloadError, match=r"parameter w is complex64; Thalweg averages"):
        Layout.of({"w": torch.zeros(2, dtype=torch.complex64)}, Size(100))
