"""What a check found: a verdict, what there is, what to do about it, and whom it concerns.

A rank finds things out about itself; the same on several ranks becomes one line. What is fine is
one line a check, whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from thalweg.errors import ranks_text

Verdict = Literal["fail", "warn", "ok"]
VERDICTS: tuple[Verdict, ...] = ("fail", "warn", "ok")  # worst first
CHECKS = (
    *("environment", "ranks", "store", "interface", "host name", "meeting point", "name lookups"),
    *("reachability", "rates", "clocks", "versions", "secret", "open files", "backlog", "buffers"),
    *("threads", "bfloat16", "cluster file", "disk", "lab"),
)
"""In the order in which they are told."""
MOST_NAMED = 8  # ranks in a line


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    check: str
    verdict: Verdict
    detail: str
    remedy: str = ""
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    names_them: bool = False  # the detail says whom it concerns

    @property
    def told(self) -> str:
        """The detail, and before it whom it concerns."""
        if self.names_them or not self.ranks:
            return self.detail
        return f"{whom(self.ranks, self.hosts)}: {self.detail}"

    @property
    def line(self) -> str:
        """For a log."""
        return f"{self.check}: {self.told}" + (f"; {self.remedy}" if self.remedy else "")

    def row(self) -> dict[str, Any]:
        return {
            "check": self.check,
            "verdict": self.verdict,
            "detail": self.told,
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
    if len(ranks) > MOST_NAMED:
        named = (
            f"ranks {', '.join(map(str, ranks[:MOST_NAMED]))} and {len(ranks) - MOST_NAMED} more"
        )
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
    detail = f"{first.told} ({others} more rank{'s' if others > 1 else ''} likewise)"
    return replace(
        first,
        detail=detail,
        names_them=True,
        ranks=tuple(sorted({rank for finding in fine for rank in finding.ranks})),
        hosts=tuple(dict.fromkeys(host for finding in fine for host in finding.hosts)),
    )
