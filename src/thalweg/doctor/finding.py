"""Findings of checks: a verdict, what there is, what to do about it, and which ranks it concerns.

Each rank checks itself; the same finding on several ranks becomes one line. What is fine is one
line per check, whatever the number of ranks.

Each rank publishes its `RankFacts` in the store, as JSON. Ranks may run different versions of this
file, which is one of the things to be found: missing fields have defaults, unknown ones are
dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Literal

from thalweg.errors import ranks_text
from thalweg.facts import grouped

Severity = Literal["fail", "warn", "ok"]
VERDICTS: tuple[Severity, ...] = ("fail", "warn", "ok")  # worst first
CHECKS = (
    *("environment", "ranks", "store", "interface", "host name", "meeting point", "name lookups"),
    *("reachability", "rates", "clocks", "versions", "secret", "open files", "backlog", "buffers"),
    *("threads", "bfloat16", "cluster file", "disk", "lab"),
)
"""The checks in the order in which they are printed."""
MAX_RANKS_PER_LINE = 8
HostKey = tuple[str, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """One rank's facts about itself: `name`, `machine` and `stack` identify its host; the other
    ranks ping it by `address`, `port` and `token`."""

    rank: int = 0
    name: str = ""
    machine: str = ""
    stack: str = ""
    cores: int = 1
    cpus: str = "0"  # the cores' numbers, as bits in hexadecimal
    threads: int = 1  # of torch, in this process
    address: str = ""
    interface: str = ""
    port: int = 0
    token: str = field(default="", repr=False)
    versions: dict[str, str] = field(default_factory=dict)
    resolved: list[str] | None = None  # addresses of the host's name; None if the lookup timed out
    gloo_interface: str = ""  # the value of GLOO_SOCKET_IFNAME
    secret: str | None = None  # its fingerprint; None if it couldn't be read
    buffers: dict[str, int] = field(default_factory=dict)  # bytes, by setting
    findings: list[Finding] = field(default_factory=list)

    @property
    def host(self) -> HostKey:
        return self.name, self.machine, self.stack

    @property
    def label(self) -> str:
        return f"rank {self.rank} on {self.name}"

    @classmethod
    def unpacked(cls, content: Mapping[str, Any]) -> RankFacts:
        known = {item.name: content[item.name] for item in fields(cls) if item.name in content}
        findings = [Finding.unpacked(packed) for packed in content.get("findings", ())]
        return cls(**known | {"findings": findings})


def by_host(ranks: Sequence[RankFacts]) -> dict[HostKey, list[RankFacts]]:
    """The ranks of each host: those with the same name, machine and network stack."""
    return grouped((facts.host, facts) for facts in ranks)


def ranks_and_hosts(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """`rank 3 on host1`, `ranks 0, 1 on host0`, `ranks 0, 1, 2 on 3 hosts`."""
    named = ranks_text(ranks)
    if len(ranks) > MAX_RANKS_PER_LINE:
        first = ", ".join(map(str, ranks[:MAX_RANKS_PER_LINE]))
        named = f"ranks {first} and {len(ranks) - MAX_RANKS_PER_LINE} more"
    where = hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts"
    return f"{named} on {where}" if hosts else named


def together(ranks: Sequence[RankFacts]) -> str:
    """The ranks and their hosts in words, such as `ranks 0, 1 on host0`."""
    return ranks_and_hosts([facts.rank for facts in ranks], _names(ranks))


def _names(ranks: Sequence[RankFacts]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(facts.name for facts in ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    check: str
    verdict: Severity
    detail: str
    remedy: str = ""
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    names_them: bool = False  # the detail names the ranks already

    @property
    def text(self) -> str:
        """The detail, preceded by the ranks that it concerns."""
        if self.names_them or not self.ranks:
            return self.detail
        return f"{ranks_and_hosts(self.ranks, self.hosts)}: {self.detail}"

    @property
    def line(self) -> str:
        """The finding as one line of a log."""
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
        """A copy of the finding, about this rank."""
        return replace(self, ranks=(rank,), hosts=(host,))

    @classmethod
    def unpacked(cls, content: Mapping[str, Any]) -> Finding:
        """The finding that another rank, perhaps of another version, has packed."""
        verdict = content.get("verdict")
        return cls(
            check=str(content.get("check", "unknown")),
            verdict=verdict if verdict in VERDICTS else "warn",
            detail=str(content.get("detail", "")),
            remedy=str(content.get("remedy", "")),
            ranks=tuple(content.get("ranks", ())),
            hosts=tuple(content.get("hosts", ())),
            names_them=bool(content.get("names_them", False)),
        )


def ok(check: str, detail: str) -> Finding:
    return Finding(check=check, verdict="ok", detail=detail)


def _problem(
    verdict: Severity,
    check: str,
    detail: str,
    remedy: str,
    ranks: Sequence[RankFacts] = (),
    *,
    named: bool = False,
) -> Finding:
    """A problem of these ranks; `named`: the detail names them already."""
    return Finding(
        check=check,
        verdict=verdict,
        detail=detail,
        remedy=remedy,
        ranks=tuple(facts.rank for facts in ranks),
        hosts=_names(ranks),
        names_them=named,
    )


warn, fail = partial(_problem, "warn"), partial(_problem, "fail")


def failed(findings: Iterable[Finding]) -> bool:
    return any(finding.verdict == "fail" for finding in findings)


def summed_up(findings: Iterable[Finding]) -> list[Finding]:
    """The findings, worst first: equal ones of several ranks merged, one per check that is fine."""
    groups = grouped(
        ((f.check, f.verdict, *(() if f.verdict == "ok" else (f.detail, f.remedy))), f)
        for f in findings
    )
    order = {check: place for place, check in enumerate(CHECKS)}
    return sorted(
        map(_merged, groups.values()),
        key=lambda line: (VERDICTS.index(line.verdict), order.get(line.check, len(CHECKS))),
    )


def _merged(findings: Sequence[Finding]) -> Finding:
    """One finding for all of them, with the detail of the first."""
    equal = [finding for finding in findings if finding.detail == findings[0].detail]
    first = _of_all(findings[0], equal)
    others = len({rank for finding in findings for rank in finding.ranks} - {*first.ranks})
    if others:
        detail = f"{first.text} ({others} more rank{'s' if others > 1 else ''} likewise)"
        first = replace(first, detail=detail, names_them=True)
    return _of_all(first, findings)


def _of_all(first: Finding, findings: Sequence[Finding]) -> Finding:
    """The first finding, as one about the ranks and hosts of all of them."""
    return replace(
        first,
        ranks=tuple(sorted({rank for finding in findings for rank in finding.ranks})),
        hosts=tuple(dict.fromkeys(host for finding in findings for host in finding.hosts)),
    )
