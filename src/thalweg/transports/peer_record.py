"""The record of a rank in the store: its endpoint, and the public key that authenticates it.

Anybody who reaches the store can write there. So a record has a signature, which only holders of
the job secret can make:

    HMAC-SHA256(secret, [purpose, run, rank, endpoint, public key])      (RFC 2104)

The secret itself and private keys are never in the store. Without a secret there are no signatures,
and all records are trusted.
"""

from __future__ import annotations

import hmac
import json
import re
from dataclasses import dataclass, field

from thalweg.transports.cipher import KEY_NBYTES

MAX_RECORD_BYTES = 1024
MAX_PORT = 65535
_ENDPOINT = re.compile(r"tcp://(\[[0-9a-fA-F:.]+(%[\w.-]+)?\]|[\w.-]+):(\d{1,5})", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRecord:
    rank: int
    endpoint: str
    key: bytes  # public; empty where connections are plain


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordSigner:
    """Writes and reads the records of one run for one purpose."""

    purpose: str
    run: str
    secret: bytes | None = field(repr=False)
    encrypted: bool

    def write(self, record: PeerRecord) -> str:
        return json.dumps(
            {
                "rank": record.rank,
                "endpoint": record.endpoint,
                "key": record.key.hex(),
                "seal": self._signature(record),
            }
        )

    def read(self, text: bytes) -> PeerRecord | None:
        """The record in this text; None if it isn't one, or wasn't signed with the secret."""
        try:
            parts = json.loads(text) if len(text) <= MAX_RECORD_BYTES else {}
            record = PeerRecord(
                rank=parts["rank"], endpoint=parts["endpoint"], key=bytes.fromhex(parts["key"])
            )
            if not self._is_sound(record) or not isinstance(parts["seal"], str):
                return None
            signature = self._signature(record).encode()
            is_signed = hmac.compare_digest(parts["seal"].encode(), signature)
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        return record if is_signed or self.secret is None else None

    def key_of(self, rank: int) -> str:
        """The store key of a rank's record."""
        return f"{self.purpose}/{rank}"

    def _is_sound(self, record: PeerRecord) -> bool:
        endpoint = _ENDPOINT.fullmatch(record.endpoint)
        return (
            type(record.rank) is int
            and record.rank >= 0
            and endpoint is not None
            and int(endpoint[3]) <= MAX_PORT
            and len(record.key) == (KEY_NBYTES if self.encrypted else 0)
        )

    def _signature(self, record: PeerRecord) -> str:
        if self.secret is None:
            return ""
        parts = [self.purpose, self.run, record.rank, record.endpoint, record.key.hex()]
        return hmac.digest(self.secret, json.dumps(parts).encode(), "sha256").hex()
