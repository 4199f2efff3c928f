"""A run's state from another rank: what was sent, or one error that says that it isn't one."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save
from torch import nn

from tests.examples import examples
from tests.training.conftest import InOneCrew
from tests.training.workers import TIMEOUT, listen, one_value, raised
from thalweg.compress import Combine, Kept
from thalweg.engine.collectives import Collectives
from thalweg.errors import RunError
from thalweg.training import attach
from thalweg.training.data.position import BatchIndex
from thalweg.training.snapshot import MESSAGE_PREFIX_STRUCT, Snapshot, _digest_of_bytes
from thalweg.training.state_encoding import unpack
from thalweg.transports import Array


def a_state() -> Snapshot:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return Snapshot(
        step=7,
        position=BatchIndex(epoch=1, batch=2),
        collectives=4,
        changes=5,
        plan="ring",
        model=model.state_dict(),
        optimizer=optimizer.state_dict(),
        objects=[{"last": 0.1}],
        kept={"factor": Kept(combine=Combine.EQUAL, arrays={"weight": np.ones((2, 3))})},
    )


WHOLE = a_state().in_bytes(2)


def message(head: bytes, tensors: bytes) -> Array:
    """With the digest of these bytes."""
    rest = head + tensors
    prefix = MESSAGE_PREFIX_STRUCT.pack(2, _digest_of_bytes(rest), len(head))
    return np.frombuffer(prefix + rest, np.uint8)


def refused_or_read(array: Array) -> None:
    """Nothing else happens."""
    with suppress(RunError):
        Snapshot.of_bytes(array)


def test_what_was_sent() -> None:
    came = Snapshot.of_bytes(WHOLE)
    assert (came.step, came.position, came.plan) == (7, BatchIndex(epoch=1, batch=2), "ring")
    assert came.in_bytes(2).tobytes() == WHOLE.tobytes()


def test_cut_short_anywhere() -> None:
    for length in range(0, len(WHOLE), 7):
        with pytest.raises(RunError, match="can't be read"):
            Snapshot.of_bytes(WHOLE[:length])


@given(st.binary(max_size=300))
def test_anything_else(data: bytes) -> None:
    refused_or_read(np.frombuffer(data, np.uint8))


@examples(300)
@given(st.integers(0, 2**32))
def test_with_some_bytes_changed(seed: int) -> None:
    """The digest finds it, and the error says who sent it."""
    draw = random.Random(seed)
    data = bytearray(WHOLE.tobytes())
    for _ in range(draw.choice([1, 2, 5, 50])):
        data[draw.randrange(MESSAGE_PREFIX_STRUCT.size, len(data))] = draw.randrange(256)
    if data != WHOLE.tobytes():
        with pytest.raises(RunError, match=r"that rank 2 sent can't be read .*its digest"):
            Snapshot.of_bytes(np.frombuffer(bytes(data), np.uint8))


TAGS = st.sampled_from(
    [
        *("dict", "tuple", "set", "frozenset", "Size", "Counter", "OrderedDict", "items"),
        *("defaultdict", "attributes", "tensor", "complex tensor", "array", "bytes", "bytearray"),
        *("complex", "device", "dtype", "float", "int", "str", "numpy", "another"),
    ]
)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.sampled_from(["t", "<f4", "|O", "float32", "nn", "load", "cpu", "0x1f"])
)
trees = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TAGS, inner, max_size=2),
    max_leaves=12,
)


@examples(500)
@given(trees)
def test_a_tree_that_nobody_packed(tree: Any) -> None:
    """It is read as something, or refused; and torch is what it was."""
    before = dict(vars(torch.nn))
    with suppress(ValueError):
        unpack(tree, {"t": torch.arange(4.0)})
    assert vars(torch.nn).keys() == before.keys()


@pytest.mark.parametrize(
    "tree",
    [
        {"attributes": [{"dtype": "nn"}, {"dict": {"Linear": 1}}]},  # a module, to write into
        {"dtype": "load"},
        {"array": ["t", "|O", [2]]},  # addresses
        {"numpy": ["|O", "AAAAAAAAAAA="]},
        {"tuple": 5},
        {"one": 1, "two": 2},
        {},
    ],
)
def test_what_pack_never_makes(tree: Any) -> None:
    linear = torch.nn.Linear
    with pytest.raises(ValueError, match=r"Error: "):
        unpack(tree, {"t": torch.arange(16, dtype=torch.uint8)})
    assert torch.nn.Linear is linear


@pytest.mark.parametrize(
    "changed", [{"step": -1}, {"step": "7"}, {"position": [1]}, {"ended": 0}, {"plan": None}]
)
def test_a_head_of_the_wrong_kind(changed: dict[str, Any]) -> None:
    _, _, length = MESSAGE_PREFIX_STRUCT.unpack_from(WHOLE.tobytes())
    rest = WHOLE.tobytes()[MESSAGE_PREFIX_STRUCT.size :]
    head = json.loads(rest[:length])
    head["tree"]["dict"] |= changed
    with pytest.raises(RunError, match="rank 2 sent can't be read"):
        Snapshot.of_bytes(message(json.dumps(head).encode(), rest[length:]))


def test_nested_without_end() -> None:
    for opening, closing in (("[", "]"), ('{"tuple": [', "]}")):
        text = (opening * 5000 + closing * 5000).encode()
        with pytest.raises(RunError, match="can't be read"):
            Snapshot.of_bytes(message(text, save({})))


@pytest.mark.parametrize("times", [1, 100])
def test_a_broadcast_that_changes_on_its_way(times: int, in_one_crew: InOneCrew) -> None:
    """It is repeated, and refused with the names of both ranks if that doesn't help."""

    def work(rank: int, times: int) -> dict[str, Any]:
        model = nn.Linear(3, 2)
        run = attach(model, torch.optim.SGD(model.parameters(), 0.1), timeout=TIMEOUT)
        session, broadcast, spoilt = run._session, Collectives.broadcast, []
        said: list[str] = []
        listen(said)

        def spoiling(self: Collectives, root: int, tensors: Iterable[torch.Tensor]) -> None:
            own = list(tensors)
            broadcast(self, root, own)
            if rank == 1 and own[0].dtype is torch.uint8 and len(spoilt) < times:
                spoilt.append(own[0][0].bitwise_xor_(1))

        own = replace(session.snapshot(), plan="ring" if rank else "tree")
        received: list[Snapshot] = []
        with patch.object(Collectives, "broadcast", spoiling):
            error = raised(
                lambda: received.append(own.broadcast(session.collectives, 0, overwrites=False))
            )
        run.close()
        plans = [snapshot.plan for snapshot in received]
        return {"error": error["text"], "plans": plans, "said": said}

    results = in_one_crew(2, work)
    changed = "the snapshot that rank 0 sent changed on"
    if times == 1:
        assert one_value(results, "plans") == ["tree"]
        assert one_value(results, "said") == [f"{changed} rank 1"]
    else:
        assert one_value(results, "error").startswith(f"{changed} its way to rank 1, 3 times")
