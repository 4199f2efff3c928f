"""When connections are encrypted."""

from __future__ import annotations

import logging

import pytest

from thalweg.errors import LaunchError
from thalweg.transports import RejectionReason
from thalweg.transports.rejections import RejectionCounter
from thalweg.transports.security import SecurityConfig, is_loopback, wants_encryption


@pytest.mark.parametrize(
    ("said", "address", "wanted"),
    [
        (None, "127.0.0.1", False),
        (None, "127.0.1.1", False),
        (None, "::1", False),
        (None, "10.1.2.3", True),
        (None, "fe80::1%eth0", True),
        (None, "node7", True),
        ("on", "127.0.0.1", True),
        ("ON", "::1", True),
        ("off", "10.1.2.3", False),
        ("", "10.1.2.3", True),
    ],
)
def test_across_hosts_unless_set_otherwise(said: str | None, address: str, wanted: bool) -> None:
    environment = {} if said is None else {"THALWEG_ENCRYPTION": said}
    assert wants_encryption(environment, address) is wanted


def test_the_former_name_counts_where_the_new_one_is_not_set() -> None:
    assert wants_encryption({"THALWEG_CURVE": "on"}, "127.0.0.1")
    assert not wants_encryption({"THALWEG_CURVE": "off"}, "10.1.2.3")
    assert not wants_encryption({"THALWEG_CURVE": "on", "THALWEG_ENCRYPTION": "off"}, "10.1.2.3")
    assert wants_encryption({"THALWEG_CURVE": "on", "THALWEG_ENCRYPTION": ""}, "127.0.0.1")


@pytest.mark.parametrize("name", ["THALWEG_ENCRYPTION", "THALWEG_CURVE"])
def test_a_mode_that_there_is_not(name: str) -> None:
    with pytest.raises(LaunchError, match=rf"{name} is 'yes'; set it to on or off"):
        wants_encryption({name: "yes"}, "127.0.0.1")


def test_loopback() -> None:
    assert is_loopback("localhost")
    assert not is_loopback("0.0.0.0")


def test_fingerprints_tell_secrets_apart_and_do_not_show_them() -> None:
    one = SecurityConfig(secret=b"known to all workers", run="run/1")
    assert (
        one.fingerprint == SecurityConfig(secret=b"known to all workers", run="run/1").fingerprint
    )
    assert (
        one.fingerprint != SecurityConfig(secret=b"known to all worker5", run="run/1").fingerprint
    )
    assert SecurityConfig().fingerprint == "absent"
    assert "known" not in repr(one)


def test_what_is_suspicious_is_said_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    counter = RejectionCounter(3)
    with caplog.at_level(logging.WARNING, "thalweg"):
        counter.count(RejectionReason.STALE)
        assert not caplog.records
        for _ in range(100):
            counter.count(RejectionReason.STRANGER)
        counter.count(RejectionReason.FORGED, 2)
    [record] = caplog.records
    assert record.getMessage().startswith(
        "rank 3 rejected connections from processes outside the job (1 so far)"
    )
    assert dict(counter) == {
        RejectionReason.STALE: 1,
        RejectionReason.STRANGER: 100,
        RejectionReason.FORGED: 2,
    }
