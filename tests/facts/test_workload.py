from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thalweg.errors import WorkloadError
from thalweg.facts import Costs, Duration, Size, Tensor, Workload, format_workload, parse_workload

MIXED = Workload(
    name="mixed",
    costs=Costs(forward=Duration(0.01), backward=Duration(0.03)),
    tensors=(
        Tensor(name="a.weight", shape=(100, 10)),
        Tensor(name="a.bias", shape=(100,), dtype="bfloat16"),
        Tensor(name="b.weight", shape=(50, 10), ready=Duration(0.005)),
        Tensor(name="b.bias", shape=(50,), dtype="float16"),
        Tensor(name="scale", shape=()),
    ),
)


@given(st.integers(4, 10**8))
def test_bytes_are_cut_into_matrices_of_1024_columns(nbytes: int) -> None:
    workload = Workload.of_size(Size(nbytes))
    assert workload.nbytes == nbytes // 4 * 4
    matrices = [tensor for tensor in workload.tensors if len(tensor.shape) == 2]
    assert all(tensor.shape[1] == 1024 for tensor in matrices)
    assert sum(tensor.elements for tensor in workload.tensors if len(tensor.shape) == 1) < 1024


@given(st.integers(1, 6000))
def test_buckets_hold_everything_once_and_one_dtype(limit: int) -> None:
    buckets = MIXED.buckets(Size(limit))
    names = [tensor.name for bucket in buckets for tensor in bucket.tensors]
    assert sorted(names) == sorted(tensor.name for tensor in MIXED.tensors)
    assert [bucket.index for bucket in buckets] == list(range(len(buckets)))
    for bucket in buckets:
        assert len({tensor.dtype for tensor in bucket.tensors}) == 1
        assert sum(t.elements * t.itemsize for t in bucket.tensors[:-1]) < limit
    assert buckets[-1].tensors[-1] is MIXED.tensors[0]


def test_the_last_layer_comes_first() -> None:
    first = MIXED.buckets(Size(1))[0]
    assert first.tensors[0].name == "scale"


def test_ready_times_are_measured_or_follow_from_the_elements() -> None:
    ready = {bucket.tensors[0].name: bucket.ready_seconds for bucket in MIXED.buckets(Size(1))}
    assert ready["b.weight"] == 0.005
    assert ready["a.weight"] == pytest.approx(0.03)
    assert ready["a.bias"] == pytest.approx(0.03 * 651 / 1651)


def test_what_is_written_is_read_again() -> None:
    assert parse_workload(format_workload(MIXED)) == MIXED


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = 'x'", "the file has no list of tensors; add"),
        ("name = 'x'\ntensors = []", "workload x has no tensors; add at least one"),
        ("name = 'x'\ntensors = [{ name = 'a', shape = [-1] }]", "shape of tensor a is no list"),
        ("name = 'x'\ntensors = [{ name = 'a' }]", "shape of tensor a is no list"),
        (
            "name = 'x'\ntensors = [{ name = 'a', shape = [1], dtype = 'int3' }]",
            "tensor a has dtype",
        ),
        (
            "name = 'x'\ntensors = [{ name = 'a', shape = [1] }, { name = 'a', shape = [1] }]",
            "2 tensors are called 'a'; rename them",
        ),
        ("name = 'x'\nbackward = 3\ntensors = []", "backward of the file: '3' is not a duration"),
    ],
)
def test_bad_files(text: str, message: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        parse_workload(text)
    assert str(caught.value).startswith(message)


def test_nothing_to_send_is_refused() -> None:
    with pytest.raises(WorkloadError, match="3B holds no float32; give at least 4B"):
        Workload.of_size(Size.parse("3B"))
    with pytest.raises(WorkloadError, match="a bucket of 0B holds nothing"):
        MIXED.buckets(Size(0))
