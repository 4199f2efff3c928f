"""The handshake of a connection: authentication of both ranks, and the derivation of a key.

The side that connects is the sender of messages; it knows the receiver's record from the store.
With S a rank's key pair (its public half is in its record) and E a pair made for this connection
alone:

    sender -> receiver   scope, receiver's rank, E_s, sender's record, MAC under DH(S_s, S_r)
    receiver -> sender   E_r, MAC under the session's keys

    session keys = HKDF(DH(E_s, S_r), DH(S_s, E_r), DH(E_s, E_r)), salted with both messages

This is the KK pattern of the Noise framework (noiseprotocol.org): each side proves that it has the
private half of its record's key, and a recording of an earlier connection is of no use. A record is
trusted if it is signed with the job's secret; without a secret, if the store has the same record.
Without encryption only scope, ranks and records are exchanged.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from thalweg.transports.cipher import KEY_NBYTES, RecordCipher, derived
from thalweg.transports.peer_record import MAX_RECORD_BYTES, PeerRecord, RecordSigner

WIRE_MAGIC, WIRE_VERSION = b"thlw", 4
WIRE_PREFIX_STRUCT = struct.Struct("<4sHH")  # magic, version, bytes that follow
HELLO_STRUCT = struct.Struct("<8sI32s")  # scope, receiver's rank, the sender's ephemeral key
MAC_NBYTES = 32
HELLO_NBYTES = HELLO_STRUCT.size + MAX_RECORD_BYTES + MAC_NBYTES  # at most, after the prefix
REPLY_NBYTES = KEY_NBYTES + MAC_NBYTES
_PLAIN_REPLY = WIRE_MAGIC.ljust(REPLY_NBYTES, b"\0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The keys with which a rank opens and accepts connections. `private` is None where connections
    are not encrypted; `scope` is their purpose, the same at both ends."""

    record: PeerRecord
    private: X25519PrivateKey | None = field(repr=False)
    signer: RecordSigner
    scope: bytes

    @property
    def text(self) -> bytes:
        return self.signer.write(self.record).encode()

    def shared_with(self, record: PeerRecord) -> bytes:
        """The key under which a hello between these two is authenticated."""
        assert self.private is not None
        material = self.private.exchange(X25519PublicKey.from_public_bytes(record.key))
        return derived(material, self.signer.secret or b"", b"thalweg hello" + self.scope)


class Hello:
    """The sender's side of one handshake, with the peer of this record."""

    def __init__(self, identity: Identity, peer: PeerRecord) -> None:
        self._identity = identity
        self._peer = peer
        self._ephemeral = X25519PrivateKey.generate() if identity.private else None
        public = self._ephemeral.public_key().public_bytes_raw() if self._ephemeral else b""
        body = HELLO_STRUCT.pack(identity.scope, peer.rank, public) + identity.text
        if identity.private is not None:
            body += hmac.digest(identity.shared_with(peer), body, "sha256")
        self.text = WIRE_PREFIX_STRUCT.pack(WIRE_MAGIC, WIRE_VERSION, len(body)) + body

    def finish(self, reply: bytes) -> RecordCipher | None:
        """The cipher to send under, None on a plain connection; ValueError if the reply does not
        come from the peer."""
        own, ephemeral = self._identity.private, self._ephemeral
        if own is None or ephemeral is None:
            if reply != _PLAIN_REPLY:
                raise ValueError("not a reply to a plain hello")
            return None
        theirs = X25519PublicKey.from_public_bytes(reply[:KEY_NBYTES])
        material = (
            ephemeral.exchange(X25519PublicKey.from_public_bytes(self._peer.key))
            + own.exchange(theirs)
            + ephemeral.exchange(theirs)
        )
        key, mac = _session(material, self.text, reply[:KEY_NBYTES])
        if not hmac.compare_digest(mac, reply[KEY_NBYTES:]):
            raise ValueError("the reply does not authenticate")
        return RecordCipher(key)


def answered(
    identity: Identity, hello: bytes, sender: PeerRecord
) -> tuple[bytes, RecordCipher | None]:
    """The receiver's reply to a hello of this sender, and the cipher to receive under; ValueError
    if the sender does not have its record's key."""
    if identity.private is None:
        return _PLAIN_REPLY, None
    body, mac = hello[WIRE_PREFIX_STRUCT.size : -MAC_NBYTES], hello[-MAC_NBYTES:]
    if not hmac.compare_digest(hmac.digest(identity.shared_with(sender), body, "sha256"), mac):
        raise ValueError("the hello does not authenticate")
    sender_ephemeral = X25519PublicKey.from_public_bytes(HELLO_STRUCT.unpack_from(body)[2])
    ephemeral = X25519PrivateKey.generate()
    public = ephemeral.public_key().public_bytes_raw()
    material = (
        identity.private.exchange(sender_ephemeral)
        + ephemeral.exchange(X25519PublicKey.from_public_bytes(sender.key))
        + ephemeral.exchange(sender_ephemeral)
    )
    key, mac = _session(material, hello, public)
    return public + mac, RecordCipher(key)


def sender_of(identity: Identity, hello: bytes) -> PeerRecord | None:
    """The record in a hello; None if the hello is not for this rank, or the record is not one of
    this job."""
    end = -MAC_NBYTES if identity.private is not None else None
    body = hello[WIRE_PREFIX_STRUCT.size : end]
    if len(body) < HELLO_STRUCT.size:
        return None
    scope, rank, _ = HELLO_STRUCT.unpack_from(body)
    if (scope, rank) != (identity.scope, identity.record.rank):
        return None
    return identity.signer.read(body[HELLO_STRUCT.size :])


def scope_of(*names: str) -> bytes:
    """Eight bytes that identify the purpose of a connection."""
    return hashlib.sha256("\0".join(names).encode()).digest()[:8]


def _session(material: bytes, hello: bytes, public: bytes) -> tuple[bytes, bytes]:
    """The key of the cipher's records, and the MAC that proves that the receiver has it."""
    transcript = hashlib.sha256(hello + public).digest()
    keys = derived(material, transcript, b"thalweg records", 2 * KEY_NBYTES)
    return keys[:KEY_NBYTES], hmac.digest(keys[KEY_NBYTES:], transcript, "sha256")
