from __future__ import annotations

import numpy as np
import pytest
import torch

from thalweg.engine.arithmetic import arithmetic_of

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def array_of(tensor: torch.Tensor) -> np.ndarray:
    """The bits of it, as they travel."""
    return (tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor).numpy()


@each_dtype
def test_sums_are_torchs_to_the_bit(dtype: torch.dtype) -> None:
    target, incoming = torch.randn(2, 1000).to(dtype)
    expected = target + incoming
    arithmetic_of(dtype).add(array_of(target), array_of(incoming))
    assert torch.equal(target, expected)


@each_dtype
def test_what_came_is_read_where_it_lies_and_stays_as_it_was(dtype: torch.dtype) -> None:
    """Read-only, and at an odd address, as network buffers may be."""
    values = torch.randn(1000).to(dtype)
    raw = b"\0" + values.view(torch.uint8).numpy().tobytes()
    incoming = np.frombuffer(raw, np.uint8)[1:].view(array_of(values).dtype)
    assert not incoming.flags.writeable
    target = torch.zeros(1000, dtype=dtype)
    arithmetic_of(dtype).add(array_of(target), incoming)
    assert torch.equal(target, values)
    assert incoming.tobytes() == raw[1:]


@each_dtype
@pytest.mark.parametrize("keep", [True, False])
def test_weighed_sums(dtype: torch.dtype, keep: bool) -> None:
    own, *terms = (torch.randint(-8, 8, (100,)).to(dtype) for _ in range(4))
    weights = (1.0, -2.0, 0.5)
    weighed = sum(weight * term.double() for weight, term in zip(weights, terms, strict=True))
    expected = weighed + own.double() if keep else weighed
    arrays = [(weight, array_of(term)) for weight, term in zip(weights, terms, strict=True)]
    before = [term.clone() for term in terms]
    arithmetic_of(dtype).weigh(array_of(own), arrays, keep=keep)
    assert torch.equal(own.double(), torch.as_tensor(expected))
    assert all(map(torch.equal, terms, before))


@each_dtype
@pytest.mark.parametrize("place", [0, 1])
def test_the_target_may_be_one_of_the_terms(dtype: torch.dtype, place: int) -> None:
    """A member of a quorum has an answer of its own, where the result goes."""
    terms = [torch.full((10,), float(value)).to(dtype) for value in (3, 4)]
    target = terms[place]
    arrays = [(2.0, array_of(terms[0])), (1.0, array_of(terms[1]))]
    arithmetic_of(dtype).weigh(array_of(target), arrays, keep=False)
    assert torch.equal(target, torch.full((10,), 10.0).to(dtype))


@each_dtype
def test_nothing_to_add(dtype: torch.dtype) -> None:
    empty = array_of(torch.empty(0, dtype=dtype))
    arithmetic_of(dtype).add(empty, empty)
