"""`scripts/golden-runs`: what it calls equal, and that a revision trains as itself."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "scripts" / "golden-runs"
Digests = dict[str, dict[str, str]]
Difference = Callable[[Digests | None, Digests | None], str]


@pytest.fixture(scope="module")
def difference() -> Difference:
    found: Difference = runpy.run_path(str(SCRIPT))["difference"]
    return found


def two_ranks(**changed: str) -> Digests:
    """Ten steps of two ranks with equal digests, but for some: `r1s9` is that of rank 1, step 9."""
    return {
        str(rank): {str(step): changed.get(f"r{rank}s{step}", "same") for step in range(1, 11)}
        for rank in range(2)
    }


def test_equal_digests_do_not_differ(difference: Difference) -> None:
    assert difference(two_ranks(), two_ranks()) == ""


def test_the_first_step_is_told_before_the_first_rank(difference: Difference) -> None:
    """Step 9 comes before step 10, though its text doesn't."""
    new = two_ranks(r0s10="other", r1s9="another")
    assert difference(two_ranks(), new) == "step 9, rank 1: same, then another"


def test_a_step_that_only_one_revision_takes_differs(difference: Difference) -> None:
    shorter = two_ranks()
    del shorter["1"]["10"]
    assert difference(two_ranks(), shorter) == "step 10, rank 1: same, then not taken"
    assert difference(shorter, two_ranks()) == "step 10, rank 1: not taken, then same"


def test_a_case_that_failed_or_did_nothing_is_not_equal_to_itself(difference: Difference) -> None:
    failed: Any = {"failed": "rank 1 was killed"}
    assert difference(failed, failed) == "old: rank 1 was killed"
    assert difference(two_ranks(), failed) == "new: rank 1 was killed"
    assert difference(two_ranks(), None) == "new: has no such case"
    assert difference({"0": {}}, {"0": {}}) == "no step was taken"


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *options],
        env={**os.environ, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
    )


def test_a_revision_trains_as_itself_and_not_as_a_changed_record(tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("these sources aren't in a repository of git")
    file = tmp_path / "golden.json"
    recorded = run("HEAD", "--record", str(file), "--only", "own-loader", "asp")
    assert recorded.returncode == 0, recorded.stderr
    document = json.loads(file.read_text())
    document["cases"]["asp"]["2"]["7"] = "other"
    file.write_text(json.dumps(document))
    compared = run("HEAD", "--against", str(file))
    assert compared.returncode == 1
    own_loader, asp = sorted(compared.stdout.splitlines()[1:], reverse=True)
    assert asp.startswith("asp         20     step 7, rank 2: other, then ")
    assert own_loader == "own-loader  20     equal"


@pytest.mark.parametrize("options", [(), ("",), ("HEAD", "HEAD", "HEAD")])
def test_wrong_numbers_of_revisions_are_refused(options: tuple[str, ...]) -> None:
    refused = run(*options)
    assert refused.returncode == 2
    assert "give REV, REV NEW, REV --record FILE, or --against FILE [NEW]" in refused.stderr
