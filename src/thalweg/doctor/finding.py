"""What a check found: a verdict, what there is, what to do about it, and whom it concerns.

A rank finds things out about itself; the same on several ranks becomes one line. What is fine is
one line a check, whatever the number of ranks.

What a rank publishes about itself in the store are `RankFacts`: small, and JSON. Ranks may run
different versions of this file, which is one of the things to be found out: what is missing has a
default, what is unknown is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from thalweg.errors import ranks_text

Severity = Literal["fail", "warn", "ok"]
VERDICTS: tuple[Severity, ...] = ("fail", "warn", "ok")  # worst first
CHECKS = (
    *("environment", "ranks", "store", "interface", "host name", "meeting point", "name lookups"),
    *("reachability", "rates", "clocks", "versions", "secret", "open files", "backlog", "buffers"),
    *("threads", "bfloat16", "cluster file", "disk", "lab"),
)
"""In the order in which they are told."""
MAX_RANKS_PER_LINE = 8  # ranks in a line
HostKey = tuple[str, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    check: str
    verdict: Severity
    detail: str
    remedy: str = ""
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    names_them: bool = False  # the detail says whom it concerns

    @property
    def text(self) -> str:
        """The detail, and before it whom it concerns."""
        if self.names_them or not self.ranks:
            return self.detail
        return f"{whom(self.ranks, self.hosts)}: {self.detail}"

    @property
    def line(self) -> str:
        """For a log."""
        return f"{self.check}: {self.text}" + (f"; {self.remedy}" if self.remedy else "")

    def row(self) -> dict[str, Any]:
        return {
            "check": self.check,
            "verdict": self.verdict,
            "detail": self.text,
            "remedy": self.remedy,
            "ranks": list(self.ranks),
            "hosts": list(self.hosts),
        }

    def at(self, rank: int, host: str) -> Finding:
        """The same, found by this rank about itself."""
        return replace(self, ranks=(rank,), hosts=(host,))

    def packed(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def unpacked(cls, content: Mapping[str, Any]) -> Finding:
        """Another version may have written it."""
        said = content.get("verdict")
        return cls(
            check=str(content.get("check", "unknown")),
            verdict=said if said in VERDICTS else "warn",
            detail=str(content.get("detail", "")),
            remedy=str(content.get("remedy", "")),
            ranks=tuple(content.get("ranks", ())),
            hosts=tuple(content.get("hosts", ())),
            names_them=bool(content.get("names_them", False)),
        )


def failed(findings: Iterable[Finding]) -> bool:
    return any(finding.verdict == "fail" for finding in findings)


def whom(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """`rank 3 on host1`, `ranks 0, 1 on host0`, `ranks 0, 1, 2 on 3 hosts`."""
    named = ranks_text(ranks)
    if len(ranks) > MAX_RANKS_PER_LINE:
        first = ", ".join(map(str, ranks[:MAX_RANKS_PER_LINE]))
        named = f"ranks {first} and {len(ranks) - MAX_RANKS_PER_LINE} more"
    where = hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts"
    return f"{named} on {where}" if hosts else named


def summed_up(findings: Iterable[Finding]) -> list[Finding]:
    """Worst first; the same about several ranks in one, and one for all that is fine in a check."""
    merged = _merged(findings)
    lines = [finding for finding in merged if finding.verdict != "ok"]
    fine: dict[str, list[Finding]] = {}
    for finding in merged:
        if finding.verdict == "ok":
            fine.setdefault(finding.check, []).append(finding)
    lines += map(_one_for_all, fine.values())
    return sorted(lines, key=lambda line: (VERDICTS.index(line.verdict), _place(line.check)))


def _place(check: str) -> int:
    return CHECKS.index(check) if check in CHECKS else len(CHECKS)


def _merged(findings: Iterable[Finding]) -> list[Finding]:
    found: dict[tuple[object, ...], Finding] = {}
    for finding in findings:
        key: tuple[object, ...] = (finding.check, finding.verdict, finding.detail, finding.remedy)
        before = found.get(key)
        if before is not None:
            finding = replace(
                before,
                ranks=tuple(sorted({*before.ranks, *finding.ranks})),
                hosts=tuple(dict.fromkeys((*before.hosts, *finding.hosts))),
            )
        found[key] = finding
    return list(found.values())


def _one_for_all(fine: Sequence[Finding]) -> Finding:
    first = fine[0]
    if len(fine) == 1:
        return first
    others = len({rank for finding in fine for rank in finding.ranks} - set(first.ranks))
    detail = f"{first.text} ({others} more rank{'s' if others > 1 else ''} likewise)"
    return replace(
        first,
        detail=detail,
        names_them=True,
        ranks=tuple(sorted({rank for finding in fine for rank in finding.ranks})),
        hosts=tuple(dict.fromkeys(host for finding in fine for host in finding.hosts)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
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
    def label(self) -> str:
        return f"rank {self.rank} on {self.name}"

    def packed(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def unpacked(cls, content: Mapping[str, Any]) -> RankFacts:
        known = {item.name for item in fields(cls)}
        return cls(**{name: value for name, value in content.items() if name in known})

    def own_findings(self) -> list[Finding]:
        return [Finding.unpacked(packed).at(self.rank, self.name) for packed in self.findings]


def by_host(ranks: Sequence[RankFacts]) -> dict[HostKey, list[RankFacts]]:
    """Ranks with the same name, machine and network stack are on one."""
    hosts: dict[HostKey, list[RankFacts]] = {}
    for facts in ranks:
        hosts.setdefault(facts.host, []).append(facts)
    return hosts


def concerning(*ranks: RankFacts, named: bool = False) -> dict[str, Any]:
    """The fields of a finding that say whom it concerns; `named`: its detail says that already."""
    hosts = tuple(dict.fromkeys(facts.name for facts in ranks))
    return {"ranks": tuple(f.rank for f in ranks), "hosts": hosts, "names_them": named}


def together(ranks: Sequence[RankFacts]) -> str:
    """`ranks 0, 1 on host0`."""
    names = tuple(dict.fromkeys(facts.name for facts in ranks))
    return whom([facts.rank for facts in ranks], names)
