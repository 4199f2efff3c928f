"""The page about the architecture names files, functions and tests that exist, and its drawing has
the packages in the rows of the import contract."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "thalweg"
PAGE = ROOT / "docs" / "architecture.md"
DRAWING = ROOT / "docs" / "pictures" / "architecture-packages.svg"
ITEM = re.compile(r"^(?:\d+\. |- |\| )")
QUOTED = re.compile(r"`([^`]+)`")
NAME = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")
MIN_STEPS = 5  # of the longest walk


def items(text: str) -> list[str]:
    """The list items, table rows and paragraphs of a page, each in one line."""
    found = [""]
    for line in text.splitlines():
        if ITEM.match(line) or not found[-1]:
            found.append(line)
        elif line:
            found[-1] += f" {line.strip()}"
        else:
            found.append("")
    return found


def file_of(path: str) -> Path:
    """The file that the page means: of the package, or of the repository."""
    return next((file for file in (PACKAGE / path, ROOT / path) if file.exists()), PACKAGE / path)


@cache
def defined(file: Path) -> frozenset[str]:
    """The classes, functions, methods, fields and constants that a file defines."""
    return frozenset(_names(ast.parse(file.read_text()).body))


def _names(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
    for node in body:
        match node:
            case ast.ClassDef():
                yield prefix + node.name
                yield from _names(node.body, f"{prefix}{node.name}.")
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield prefix + node.name
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                yield prefix + name


def problems(item: str) -> Iterator[str]:
    """What an item names that doesn't exist."""
    quoted = QUOTED.findall(item)
    files = [file_of(text) for text in quoted if text.endswith(".py")]
    known: set[str] = set()
    for file in files:
        if file.exists():
            known |= defined(file)
        else:
            yield f"{file.relative_to(ROOT)} doesn't exist"
    for text in quoted:
        if NAME.fullmatch(text) and not text.endswith(".py") and text not in known:
            names = ", ".join(file.name for file in files) or "no file"
            yield f"{text} isn't defined: {names}"


@pytest.mark.parametrize("item", [item for item in items(PAGE.read_text()) if ".py`" in item])
def test_what_the_page_names_exists(item: str) -> None:
    assert not [*problems(item)]


def test_each_step_of_a_walk_names_code() -> None:
    steps = [item for item in items(PAGE.read_text()) if item[:1].isdigit()]
    assert max(int(step.partition(".")[0]) for step in steps) >= MIN_STEPS
    assert [step for step in steps if not re.search(r"`[\w/]+\.py`", step)] == []


@pytest.mark.parametrize(
    "wrong",
    [
        "1. `training/absent.py` `make` makes a source",
        "1. `training/factory.py` `made` makes a source",
        "1. `training/run.py` `Run.absent`",
        "| a row | `tests/absent.py` |",
        "A paragraph with `training/factory.py`,\nand `made` in the next line",
    ],
)
def test_a_wrong_name_is_found(wrong: str) -> None:
    assert [problem for item in items(wrong) for problem in problems(item)]


def test_the_drawing_has_the_rows_of_the_import_contract() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    [contract] = [each for each in settings["contracts"] if each["type"] == "layers"]
    layers = [set(layer.split(" | ")) for layer in contract["layers"] if layer != "__main__"]
    rows: dict[float, set[str]] = {}
    for text in ElementTree.parse(DRAWING).iter("{http://www.w3.org/2000/svg}text"):
        if "package" in text.get("class", "").split():
            rows.setdefault(float(text.get("y", "")), set()).add(text.text or "")
    assert [rows[y] for y in sorted(rows)] == layers


def test_the_drawing_frames_what_needs_no_torch() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    [contract] = [
        each for each in settings["contracts"] if "torch" in each.get("forbidden_modules", "")
    ]
    free = {name.removeprefix("thalweg.") for name in contract["source_modules"]}
    boxes = {"box pure": set[str](), "box partly": set[str](), "box": set[str]()}
    kind = "box"
    for shape in ElementTree.parse(DRAWING).iter():
        if shape.tag.endswith("rect"):
            kind = shape.get("class", "")
        elif "package" in shape.get("class", "").split():
            boxes[kind].add(shape.text or "")
    assert boxes["box pure"] == {name for name in free if "." not in name} | {"errors"}
    assert boxes["box partly"] == {"observe"}
