"""The page of the API is what the script makes of the sources, and leaves out nothing public."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

import thalweg

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "reference"))


def test_the_page_is_up_to_date(script: dict[str, Any]) -> None:
    written = (ROOT / "docs" / "reference.md").read_text()
    assert written == script["page"](), "run scripts/reference"


def test_every_public_name_is_in_one_group(script: dict[str, Any]) -> None:
    names = [name for group in script["GROUPS"].values() for name in group]
    public = [name for name in names if "." not in name]
    assert sorted([*public, "__version__"]) == sorted(thalweg.__all__)
    assert set(names) <= set(script["PAGES"])


def test_everything_says_what_it_is(script: dict[str, Any]) -> None:
    names = [name for group in script["GROUPS"].values() for name in group]
    things = {name: script["found"](name) for name in names}
    things |= {f"{name}.{of}": thing for name in names for of, thing in script["members"](name)}
    assert [name for name, thing in things.items() if not script["described"](thing)] == []


def test_pages_are_of_what_is_there(script: dict[str, Any]) -> None:
    """No entry outlives what it explains."""
    names = [name for group in script["GROUPS"].values() for name in group]
    inside = [f"{name}.{of}" for name in names for of, _ in script["members"](name)]
    assert set(script["PAGES"]) <= {*names, *inside}
    assert all(
        (ROOT / "docs" / page.partition("#")[0]).exists() for page in script["PAGES"].values()
    )
