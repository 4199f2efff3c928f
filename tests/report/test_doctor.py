from __future__ import annotations

from io import StringIO

from rich.console import Console

from thalweg.doctor import Finding
from thalweg.report.doctor import outcome_text, paste_text, table

FINE = Finding(check="disk", verdict="ok", detail="9 GB free [or so]")
WRONG = Finding(check="open files", verdict="fail", detail="few", remedy="ulimit").at(3, "node2")
ODD = Finding(check="clocks", verdict="warn", detail="off", remedy="ntp").at(1, "node1")


def test_a_table_has_the_remedy_below_what_was_found() -> None:
    out = StringIO()
    Console(file=out, width=100).print(table([WRONG, FINE], "2 workers"))
    lines = [line.strip() for line in out.getvalue().splitlines()]
    assert lines[0] == "2 workers"
    assert lines[2].split() == ["fail", "open", "files", "rank", "3", "on", "node2:", "few"]
    assert lines[3] == "-> ulimit"
    assert lines[4].endswith("9 GB free [or so]")  # brackets are no markup


def test_the_outcome_in_a_line() -> None:
    assert outcome_text([FINE]) == "All 1 checks are fine."
    assert outcome_text([WRONG, ODD, FINE, FINE]) == "1 failed, 1 to look at, 2 fine."


def test_a_block_to_paste_has_what_is_wrong_in_full() -> None:
    lines = paste_text(["- torch: 2"], [WRONG, FINE]).splitlines()
    assert lines[1] == "- torch: 2"
    assert "- fail open files: rank 3 on node2: few; ulimit" in lines
    assert "- ok: disk" in lines
