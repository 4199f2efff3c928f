from __future__ import annotations

import json
import math
import random
import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, load_file, save, save_file
from torch.optim import lr_scheduler

from thalweg.errors import CheckpointError
from thalweg.training.state_encoding import MAX_NESTING_COUNT, pack, unpack


def through_bytes(state: Any) -> Any:
    """As through a file: JSON text and safetensors."""
    tree, tensors = pack(state, "state")
    return unpack(json.loads(json.dumps(tree, allow_nan=False)), load(save(tensors)))


def assert_same(a: Any, b: Any) -> None:
    """Of one type and equal bit by bit, NaNs, signs of zero and the order of dicts included."""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert raw(a) == raw(b)
    elif isinstance(a, np.ndarray | np.generic):
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    elif isinstance(a, float):
        assert struct.pack("d", a) == struct.pack("d", b)
    elif isinstance(a, complex):
        assert_same((a.real, a.imag), (b.real, b.imag))
    elif isinstance(a, dict):
        assert_same(list(a.items()), list(b.items()))
        assert_same(getattr(a, "__dict__", None), getattr(b, "__dict__", None))
        if isinstance(a, defaultdict):
            assert a.default_factory is b.default_factory
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_same(one, other)
    else:
        assert a == b


def raw(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes()


DTYPES = [
    *(torch.bool, torch.uint8, torch.uint16, torch.int8, torch.int64, torch.float8_e5m2),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.complex128),
]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any bits, 0 to 3 dimensions, some of them empty, transposed, or windows into a larger one."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    count = math.prod(shape) * dtype.itemsize
    data = draw(st.binary(min_size=count, max_size=count))
    values = torch.tensor(list(data), dtype=torch.uint8)
    tensor = (values % 2 if dtype is torch.bool else values).view(dtype).reshape(shape)
    match draw(st.integers(0, 3)):
        case 1:
            return tensor.permute(list(reversed(range(len(shape)))))
        case 2 if shape and shape[0]:
            return tensor[1:]
        case 3 if dtype.is_complex:
            return tensor.conj()
    return tensor


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    dtype = np.dtype(draw(st.sampled_from(["?", "u1", "<i8", ">i4", "<f8", "<c16", "<M8[ms]"])))
    shape = draw(st.lists(st.integers(0, 3), max_size=2))
    count = math.prod(shape) * dtype.itemsize
    data = draw(st.binary(min_size=count, max_size=count))
    return np.ndarray(shape, dtype, bytes(b % 2 for b in data) if dtype == "?" else data)


KEYS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(st.characters(exclude_categories=())),
    st.binary(max_size=9),
    st.complex_numbers(),
    st.sampled_from([torch.float32, torch.device("cpu"), np.float32(0.1), np.int16(-3)]),
)
NESTED_KEYS = KEYS | st.tuples(KEYS, KEYS) | st.frozensets(st.integers(), max_size=3)
LEAVES = st.one_of(
    KEYS,
    tensors(),
    arrays(),
    st.builds(bytearray, st.binary(max_size=9)),
    st.sets(st.integers() | st.text(), max_size=3),
    st.builds(torch.Size, st.lists(st.integers(0, 9), max_size=3)),
    st.builds(Counter, st.lists(st.integers(), max_size=4)),
)


def containers(inside: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    dicts = st.dictionaries(NESTED_KEYS, inside, max_size=4)
    return st.one_of(
        st.lists(inside, max_size=4),
        st.lists(inside, max_size=4).map(tuple),
        st.dictionaries(st.text(), inside, max_size=4),
        dicts,
        st.builds(OrderedDict, dicts),
        st.builds(defaultdict, st.sampled_from([None, int, list]), dicts),
    )


@given(st.recursive(LEAVES, containers, max_leaves=12))
def test_a_round_trip_changes_no_bit(state: Any) -> None:
    assert_same(through_bytes(state), state)


def test_whole_numbers_of_any_length() -> None:
    state = [10**5000, -(10**5000), 2**63, -(2**63), 2**63 - 1]
    assert through_bytes(state) == state


def test_a_tensor_in_one_file_with_all_the_others(tmp_path: Path) -> None:
    """Of odd lengths, so that complex ones don't lie where they would like to."""
    state = [torch.ones(3), torch.tensor(True), torch.full((3,), 1 - 2j, dtype=torch.complex128)]
    state.append(torch.arange(5.0).double())
    tree, named = pack(state, "state")
    save_file(named, tmp_path / "x")
    assert_same(unpack(tree, load_file(tmp_path / "x")), state)


def test_tensors_that_share_memory_come_back_apart() -> None:
    whole = torch.arange(6.0)
    state = {"all": whole, "again": whole, "part": whole[2:4], "grid": whole.reshape(2, 3).T}
    state["wide"] = torch.tensor([1.0]).expand(4)
    back = through_bytes(state)
    assert_same(back, state)
    back["all"].zero_()
    assert_same(back["again"], whole)


def test_what_needs_no_copy_is_not_copied() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    named = pack({"weight": weight}, "model")[1]
    assert named["weight"].data_ptr() == weight.data_ptr()
    assert not named["weight"].requires_grad


def test_names_of_tensors_tell_their_place_and_never_collide() -> None:
    one = torch.ones(1)
    state = {"a": {"b": one}, "a.b": one * 2, "__metadata__": one * 3, "": one * 4, 0: {"0": one}}
    names = list(pack(state, "state")[1])
    assert names == ["a.b", "a.b~2", "__metadata__~2", "", "0.0"]
    assert_same(through_bytes(state), state)
    assert list(pack(one, "whole")[1]) == ["whole"]


def test_a_set_is_packed_the_same_in_every_process() -> None:
    tree, _ = pack({"b", "a", "c"}, "state")
    assert tree == {"set": ["a", "b", "c"]}


def test_a_module_keeps_the_versions_of_its_format() -> None:
    state = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)).state_dict()
    back = through_bytes(state)
    assert back._metadata == state._metadata
    assert back._metadata["1"] == {"version": 2}


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), amsgrad=True),
        lambda p: torch.optim.Adagrad(p),
        lambda p: torch.optim.LBFGS(p),
        lambda p: torch.optim.Rprop(p),
    ],
)
def test_optimizers_go_on_as_if_nothing_had_happened(
    make: Callable[[Any], torch.optim.Optimizer],
) -> None:
    def steps(weight: torch.nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
        def loss() -> torch.Tensor:
            optimizer.zero_grad()
            value = (weight**2).sum()
            value.backward()
            return value

        for _ in range(3):
            optimizer.step(loss)

    first = torch.nn.Parameter(torch.arange(4.0))
    one = make([first])
    steps(first, one)
    second = torch.nn.Parameter(first.detach().clone())
    other = make([second])
    other.load_state_dict(through_bytes(one.state_dict()))
    steps(first, one)
    steps(second, other)
    assert_same(second, first)


@pytest.mark.parametrize(
    "make",
    [
        lambda o: lr_scheduler.MultiStepLR(o, [3, 3, 5]),
        lambda o: lr_scheduler.StepLR(o, 3),
        lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
        lambda o: lr_scheduler.OneCycleLR(o, 1.0, 20),
        lambda o: lr_scheduler.CyclicLR(o, 0.1, 1.0),
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [3]
        ),
    ],
)
def test_schedulers_go_on_as_if_nothing_had_happened(make: Callable[[Any], Any]) -> None:
    def optimizer() -> torch.optim.Optimizer:
        return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)

    def rates(scheduler: Any) -> list[float]:
        seen = []
        for _ in range(4):
            scheduler.optimizer.step()
            scheduler.step()
            seen += scheduler.get_last_lr()
        return seen

    one, other = make(optimizer()), make(optimizer())
    rates(one)
    other.optimizer.load_state_dict(through_bytes(one.optimizer.state_dict()))
    other.load_state_dict(through_bytes(one.state_dict()))
    assert rates(one) == rates(other)


def test_random_states() -> None:
    state = {
        "python": random.Random(1).getstate(),
        "numpy": np.random.default_rng(1).bit_generator.state,
        "numpy, old": np.random.RandomState(1).get_state(),
        "torch": torch.Generator().manual_seed(1).get_state(),
    }
    back = through_bytes(state)
    assert_same(back, state)
    one, other = random.Random(), random.Random(1)
    one.setstate(back["python"])
    assert one.random() == other.random()


class Strange:
    pass


class Label(str):
    __slots__ = ()


@pytest.mark.parametrize(
    ("inside", "what"),
    [
        (math.sin, "is a builtin_function_or_method"),
        (lambda x: x, "is a function"),
        (Strange(), "is a Strange"),
        (Ellipsis, "is an ellipsis"),
        (Label("x"), "is a Label"),
        (np.array([None]), "is a ndarray"),
        (defaultdict(Strange), "is a defaultdict"),
        (torch.ones(2).to_sparse(), r"is a tensor of torch.float32, torch.sparse_coo, on cpu"),
        (torch.ones(2, device="meta"), r"is a tensor of torch.float32, torch.strided, on meta"),
    ],
)
def test_what_cannot_be_packed_is_named_with_its_path(inside: Any, what: str) -> None:
    path = r"state\[1\]\['x'\]\[\(2, 3\)\]\[0\]"
    with pytest.raises(CheckpointError, match=rf"^{path} {what}; (keep|make)"):
        pack([0, {"x": {(2, 3): (inside,)}}], "state")


@pytest.mark.parametrize("key", [torch.ones(1), Strange(), (1, torch.ones(1))])
def test_keys_that_would_not_be_found_again(key: Any) -> None:
    for state in ({"x": {key: 1}}, {"x": {key}}):
        with pytest.raises(CheckpointError, match=r"^state\['x'\] has a key of type "):
            pack(state, "state")


def test_what_contains_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append({"x": endless})
    with pytest.raises(CheckpointError, match="state is nested more than 100 deep, or contains"):
        pack(endless, "state")


def test_the_deepest_that_is_packed_comes_back() -> None:
    state: Any = 1.5
    for _ in range(MAX_NESTING_COUNT):
        state = {(0,): state}
    assert_same(through_bytes(state), state)
