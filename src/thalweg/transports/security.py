"""The security configuration of a worker's sockets.

Connections are encrypted (`cipher`) between hosts, and plain on the loopback interface;
THALWEG_ENCRYPTION forces one of them.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address

from thalweg.errors import LaunchError
from thalweg.transports.peer_record import RecordSigner
from thalweg.transports.rejections import RejectionCounter

ENCRYPTION_VARIABLE = "THALWEG_ENCRYPTION"
FORMER_VARIABLE = "THALWEG_CURVE"  # its name when ZeroMQ encrypted; still understood
ON, OFF = "on", "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class SecurityConfig:
    """Encryption and secret of a run; `run` is its name in the store: runs don't share records."""

    encrypted: bool = False
    secret: bytes | None = field(default=None, repr=False)
    run: str = ""
    refused: RejectionCounter = field(default_factory=lambda: RejectionCounter(0))

    def signer(self, purpose: str) -> RecordSigner:
        return RecordSigner(
            purpose=purpose, run=self.run, secret=self.secret, encrypted=self.encrypted
        )

    @property
    def mode(self) -> str:
        return ON if self.encrypted else OFF

    @property
    def fingerprint(self) -> str:
        """A hash by which ranks compare their secrets without revealing them."""
        if self.secret is None:
            return "absent"
        return hmac.digest(self.secret, f"same/{self.run}".encode(), "sha256").hex()[:8]


def wants_encryption(environment: Mapping[str, str], address: str) -> bool:
    """True if a worker that listens at this address encrypts its connections."""
    name = ENCRYPTION_VARIABLE if environment.get(ENCRYPTION_VARIABLE) else FORMER_VARIABLE
    value = environment.get(name, "").lower()
    if value not in ("", ON, OFF):
        raise LaunchError(f"{name} is {value!r}", f"set it to {ON} or {OFF}, or unset it")
    return value == ON or (not value and not is_loopback(address))


def is_loopback(address: str) -> bool:
    try:
        return ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return address == "localhost"
