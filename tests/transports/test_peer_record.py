"""Peer records: what is written is read, and nothing else is, whatever lies in the store."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thalweg.transports.peer_record import PeerRecord, RecordSigner

SIGNER = RecordSigner(purpose="tcp", run="run/1", secret=b"known to all workers", encrypted=True)
RECORD = PeerRecord(rank=3, endpoint="tcp://10.0.0.1:4711", key=bytes(range(32)))


@given(
    rank=st.integers(0, 2**40),
    port=st.integers(0, 65535),
    host=st.sampled_from(["127.0.0.1", "[::1]", "[fe80::1]", "node-7.rack2"]),
    key=st.binary(min_size=32, max_size=32),
    secret=st.none() | st.binary(min_size=16),
)
def test_what_is_written_is_read(
    rank: int, port: int, host: str, key: bytes, secret: bytes | None
) -> None:
    signer = replace(SIGNER, secret=secret)
    record = PeerRecord(rank=rank, endpoint=f"tcp://{host}:{port}", key=key)
    assert signer.read(signer.write(record).encode()) == record


def test_only_holders_of_the_secret_write_records() -> None:
    text = SIGNER.write(RECORD).encode()
    assert SIGNER.read(text) == RECORD
    for other in (
        replace(SIGNER, secret=b"known to others only"),
        replace(SIGNER, run="run/2"),
        replace(SIGNER, purpose="post"),
        replace(SIGNER, encrypted=False),
    ):
        assert other.read(text) is None
    assert SIGNER.read(replace(SIGNER, secret=None).write(RECORD).encode()) is None


@pytest.mark.parametrize(
    "changed",
    [
        {"rank": 4},
        {"rank": "3"},
        {"rank": -1},
        {"endpoint": "tcp://10.0.0.2:4711"},
        {"endpoint": "ipc:///tmp/there"},
        {"endpoint": "tcp://10.0.0.1:65536"},
        {"key": bytes(32).hex()},
        {"key": ""},
        {"seal": ""},
        {"seal": None},
    ],
)
def test_a_record_that_was_changed_is_none(changed: dict[str, object]) -> None:
    parts = json.loads(SIGNER.write(RECORD))
    assert SIGNER.read(json.dumps({**parts, **changed}).encode()) is None


@given(st.binary() | st.text().map(str.encode))
def test_anything_else_is_none(text: bytes) -> None:
    assert SIGNER.read(text) is None
    assert replace(SIGNER, secret=None).read(text) is None


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=20,
)


@given(rank=json_like, endpoint=json_like, key=json_like, seal=json_like)
def test_nor_is_json_of_the_wrong_kind(
    rank: object, endpoint: object, key: object, seal: object
) -> None:
    parts = {"rank": rank, "endpoint": endpoint, "key": key, "seal": seal}
    for signer in (SIGNER, replace(SIGNER, secret=None), replace(SIGNER, encrypted=False)):
        assert signer.read(json.dumps(parts).encode()) is None


def test_nested_without_end() -> None:
    assert SIGNER.read(b"[" * 1000) is None
    assert SIGNER.read(b"[" * 100_000) is None


def test_the_secret_is_not_shown() -> None:
    assert "known" not in repr(SIGNER)
