"""How a worker's sockets are protected, and what they have refused.

CURVE (curvezmq.org: Curve25519 keys on both sides, encrypted and authenticated frames) costs a pass
over every byte. It is on where others than this host can listen in, and off on the loopback
interface; THALWEG_CURVE forces one of them.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address

import zmq

from thalweg.errors import LaunchError
from thalweg.transports.card import Sealer
from thalweg.transports.refusal import Tally

CURVE_VARIABLE = "THALWEG_CURVE"
ON, OFF = "on", "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class Protection:
    """`run` is the run's name in the store: a card of one isn't a card of another."""

    curve: bool = False
    secret: bytes | None = field(default=None, repr=False)
    run: str = ""
    refused: Tally = field(default_factory=lambda: Tally(0))

    def sealer(self, purpose: str) -> Sealer:
        return Sealer(purpose=purpose, run=self.run, secret=self.secret, curve=self.curve)

    @property
    def mode(self) -> str:
        return ON if self.curve else OFF

    @property
    def fingerprint(self) -> str:
        """By which ranks see that they have the same secret, and nobody sees which."""
        if self.secret is None:
            return "absent"
        return hmac.digest(self.secret, f"same/{self.run}".encode(), "sha256").hex()[:8]


def wants_curve(environment: Mapping[str, str], address: str) -> bool:
    """For a worker that listens at this address."""
    said = environment.get(CURVE_VARIABLE, "").lower()
    if said not in ("", ON, OFF):
        raise LaunchError(f"{CURVE_VARIABLE} is {said!r}", f"set it to {ON} or {OFF}, or unset it")
    wanted = said == ON or (not said and not is_loopback(address))
    if wanted and not zmq.has("curve"):
        raise LaunchError(
            "this ZeroMQ was built without CURVE, so nothing would be encrypted",
            f"install pyzmq from its wheels, or set {CURVE_VARIABLE}={OFF} on all workers",
        )
    return wanted


def is_loopback(address: str) -> bool:
    try:
        return ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return address == "localhost"
