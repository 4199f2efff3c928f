from __future__ import annotations

import json

from tests.cli.command import thalweg
from thalweg.catalog import default_catalog


def test_all_that_there_is_is_listed() -> None:
    done = thalweg("plans", "--json", "-")
    rows = json.loads(done.stdout)["rows"]
    catalog = default_catalog()
    assert {row["name"] for row in rows if row["kind"] == "plan"} == set(catalog.presets)
    assert {row["name"] for row in rows if row["kind"] == "compressor"} == set(catalog.compressors)
    [tree] = [row for row in rows if row["name"] == "tree"]
    assert [a["name"] for a in tree["arguments"]] == ["fanout"]
    assert all(row["summary"] for row in rows)


def test_it_is_a_table_too() -> None:
    done = thalweg("plans")
    assert (done.returncode, done.stderr) == (0, "")
    assert "codedreduce" in done.stdout
    assert "Compressors, after +" in done.stdout
