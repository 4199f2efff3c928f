"""Authenticated encryption of one connection: AES-256-GCM over a sequence of records.

Each connection has a key of its own and carries messages in one direction, so the number of a
record serves as its nonce and cannot repeat. A record that was changed, left out, repeated or moved
does not authenticate, because the receiver expects the next number and no other. After
`RECORDS_PER_KEY` records both ends derive the next key from the present one by HKDF (RFC 5869) and
forget the present one.
"""

from __future__ import annotations

import struct

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

RECORD_NBYTES = 1 << 18  # plaintext bytes of a full record
TAG_NBYTES = 16
KEY_NBYTES = 32
RECORDS_PER_KEY = 1 << 20
_NONCE = struct.Struct("<4xQ")
Buffer = bytes | bytearray | memoryview


def derived(material: bytes, salt: bytes, info: bytes, nbytes: int = KEY_NBYTES) -> bytes:
    """Key bytes from key material (HKDF with SHA-256)."""
    return HKDF(algorithm=SHA256(), length=nbytes, salt=salt, info=info).derive(material)


class RecordCipher:
    """One end of a connection's encryption, which either seals or opens, never both."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._aead = AESGCM(key)
        self._number = 0

    def seal(self, plain: memoryview, header: Buffer, out: memoryview) -> None:
        """Write the ciphertext and its tag; `header` is authenticated along with it."""
        self._aead.encrypt_into(self._next_nonce(), plain, header, out)

    def open(self, sealed: memoryview, header: Buffer, out: memoryview) -> bool:
        """Write the plaintext; False if the record is not the next one of the other end."""
        try:
            self._aead.decrypt_into(self._next_nonce(), sealed, header, out)
        except InvalidTag:
            return False
        return True

    def _next_nonce(self) -> bytes:
        number = self._number
        if number and number % RECORDS_PER_KEY == 0:
            self._key = derived(self._key, b"", b"thalweg next key")
            self._aead = AESGCM(self._key)
        self._number = number + 1
        return _NONCE.pack(number)
