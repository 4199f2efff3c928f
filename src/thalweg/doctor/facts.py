"""What a rank tells the others about itself, through the store: small, and JSON.

Ranks may run different versions of this file, which is one of the things to be found out: what is
missing has a default, what is unknown is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from thalweg.doctor.finding import Finding, whom

HostKey = tuple[str, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """`name`, `machine` and `stack` tell hosts apart; `address`, `port` and `token` are where and
    how this rank can be called."""

    rank: int = 0
    name: str = ""
    machine: str = ""
    stack: str = ""
    cores: int = 1
    cpus: str = "0"  # which those are, as bits in hexadecimal
    threads: int = 1  # of torch, in this process
    address: str = ""
    interface: str = ""
    port: int = 0
    token: str = field(default="", repr=False)
    versions: dict[str, str] = field(default_factory=dict)
    resolved: list[str] | None = None  # what the host's name resolves to; None: nobody answered
    gloo_interface: str = ""  # as GLOO_SOCKET_IFNAME says
    secret: str | None = None  # its fingerprint; None: it couldn't be read
    buffers: dict[str, int] = field(default_factory=dict)  # bytes, by setting
    findings: list[dict[str, Any]] = field(default_factory=list)

    @property
    def host(self) -> HostKey:
        return self.name, self.machine, self.stack

    @property
    def called(self) -> str:
        return f"rank {self.rank} on {self.name}"

    def packed(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def unpacked(cls, content: Mapping[str, Any]) -> Facts:
        known = {item.name for item in fields(cls)}
        return cls(**{name: value for name, value in content.items() if name in known})

    def own_findings(self) -> list[Finding]:
        return [Finding.unpacked(packed).at(self.rank, self.name) for packed in self.findings]


def by_host(ranks: Sequence[Facts]) -> dict[HostKey, list[Facts]]:
    """Ranks with the same name, machine and network stack are on one."""
    hosts: dict[HostKey, list[Facts]] = {}
    for facts in ranks:
        hosts.setdefault(facts.host, []).append(facts)
    return hosts


def together(ranks: Sequence[Facts]) -> str:
    """`ranks 0, 1 on host0`."""
    names = tuple(dict.fromkeys(facts.name for facts in ranks))
    return whom([facts.rank for facts in ranks], names)
