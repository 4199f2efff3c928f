"""Versions that differ between ranks: which rank has which, and what follows."""

from __future__ import annotations

from collections.abc import Sequence

from thalweg.doctor.finding import Finding, RankFacts, concerning, together

EQUAL_VERSION_PACKAGES = ("thalweg",)  # what ranks send each other changes with it
CHECKED_PACKAGES = (*EQUAL_VERSION_PACKAGES, "torch", "python", "cryptography", "numpy")


def differences(ranks: Sequence[RankFacts]) -> list[Finding]:
    """Of Python the minor version counts."""
    found = []
    for name in CHECKED_PACKAGES:
        held: dict[str, list[RankFacts]] = {}
        for facts in ranks:
            if name in facts.versions:
                held.setdefault(_compared(name, facts.versions[name]), []).append(facts)
        if len(held) > 1:
            found.append(_finding(name, held))
    return found


def version_findings(ranks: Sequence[RankFacts]) -> list[Finding]:
    told = ", ".join(f"{name} {version}" for name, version in ranks[0].versions.items())
    same = Finding(check="versions", verdict="ok", detail=f"the same on all ranks: {told}")
    return differences(ranks) or [same]


def secrets(ranks: Sequence[RankFacts]) -> list[Finding]:
    """By fingerprints, of those who could read theirs."""
    held: dict[str, list[RankFacts]] = {}
    for facts in ranks:
        if facts.secret is not None:
            held.setdefault(facts.secret, []).append(facts)
    if len(held) < 2:
        has = "none is set" if set(held) == {"absent"} else "the same on all ranks"
        return [Finding(check="secret", verdict="ok", detail=has)] if held else []
    usual = max(held, key=lambda fingerprint: len(held[fingerprint]))
    odd = [facts for fingerprint, who in held.items() if fingerprint != usual for facts in who]
    lacking = {facts.secret for facts in odd} == {"absent"}
    return [
        Finding(
            check="secret",
            verdict="fail",
            detail="no job secret, and the others have one"
            if lacking
            else "another job secret than the others",
            remedy="set THALWEG_SECRET, or THALWEG_SECRET_FILE, to the same on all workers",
            **concerning(*odd),
        )
    ]


def _compared(name: str, version: str) -> str:
    return ".".join(version.split(".")[:2]) if name == "python" else version


def _finding(name: str, held: dict[str, list[RankFacts]]) -> Finding:
    """Who is in the minority is named first; of two halves the one without the first rank."""
    fewest_first = sorted(held.items(), key=lambda pair: (len(pair[1]), -pair[1][0].rank))
    told = "; ".join(f"{together(who)}: {version}" for version, who in fewest_first)
    odd = fewest_first[0][1]
    usual = fewest_first[-1][0]
    return Finding(
        check="versions",
        verdict="fail" if name in EQUAL_VERSION_PACKAGES else "warn",
        detail=f"{name} differs: {told}",
        remedy=f"install {name} {usual} on {' and '.join(dict.fromkeys(f.name for f in odd))}, or "
        "make the environment anew from the same lock file on all hosts",
        **concerning(*odd, named=True),
    )
