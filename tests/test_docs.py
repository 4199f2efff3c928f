"""Every console block of the documentation is run, and prints what it says; Python blocks run;
diffs are those of the files that they name."""

from __future__ import annotations

import re
import shlex
from difflib import unified_diff
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark import ParameterSet

from tests.cli.command import spent_by_commands, thalweg
from thalweg.errors import LabError

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "examples" / "README.md",
]
MEASURES = ("probe", "doctor")  # links, which may be found wanting on a busy machine
ATTEMPTS = 3
MOST = 5.0  # CPU seconds of a console block
LONG = (  # each worker of a script loads torch; and a model with many tensors has many buckets
    "run --workers 4 examples/attach.py",
    "lab run --lab 2x2 --nic 1gbit --uplink 200mbit -- examples/attach.py",
    "advise --lab 2x4 --nic 10gbit --uplink 1gbit --model bert-base",
)
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT)).removeprefix("docs/")


def blocks(page: Path, language: str) -> list[str]:
    return [text for kind, text in BLOCK.findall(page.read_text()) if kind == language]


def sessions() -> list[ParameterSet]:
    """Page, command, the lines that it must print in this order, and the page's TOML files.

    Lines that a block leaves out are shown there as `...`."""
    found = []
    for page in PAGES:
        files = blocks(page, "toml")
        for block in blocks(page, "console"):
            first, *printed = block.splitlines()
            assert first.startswith("$ thalweg "), first
            command = first.removeprefix("$ thalweg ")
            marks = [pytest.mark.slow] if command.startswith(LONG) else []
            values = (name_of(page), command, printed, files)
            found.append(pytest.param(*values, marks=marks, id=f"{name_of(page)}: {command}"))
    return found


@pytest.mark.parametrize(("page", "command", "printed", "files"), sessions())
def test_console_blocks(
    page: str, command: str, printed: list[str], files: list[str], tmp_path: Path
) -> None:
    for name, text in zip(("cluster.toml", "model.toml"), files, strict=False):
        (tmp_path / name).write_text(text)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    absent: str | None = ""
    for _ in range(ATTEMPTS if command.startswith(MEASURES) else 1):
        before = spent_by_commands()
        done = thalweg(*shlex.split(command), cwd=tmp_path)
        spent = spent_by_commands() - before
        if done.returncode == 2 and "the lab" in done.stderr:
            pytest.skip(done.stderr.strip())
        assert done.returncode in (0, 2), done.stderr  # some show what is refused
        assert spent < MOST or command.startswith(LONG), f"{spent:.1f} s; is it LONG?"
        absent = _absent(printed, [*_plain(done.stdout), *_plain(done.stderr)])
        if absent is None:
            break
    assert absent is None, f"{page}: `{command}` doesn't print {absent!r} (in this order)"


@pytest.mark.parametrize("long", LONG)
def test_long_blocks_are_there(long: str) -> None:
    assert any(f"\n$ thalweg {long}" in page.read_text() for page in PAGES)


def _absent(printed: list[str], told: list[list[str]]) -> str | None:
    """The first line that isn't there, or not after those before it."""
    actual = iter(told)
    shown = (line for line in printed if line != "...")  # lines left out
    return next((line for line in shown if line.split() not in actual), None)


def _plain(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


@pytest.mark.parametrize(
    "page",
    PAGES,
    ids=name_of,
)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for block in blocks(page, "python"):
        names: dict[str, Any] = {"__name__": "docs"}
        try:
            exec(compile(block, str(page), "exec"), names)
        except LabError as error:
            pytest.skip(str(error))
        if "run" in names:
            names["run"].close()  # as the end of a script does


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_diffs_are_those_of_the_files(page: Path) -> None:
    for block in blocks(page, "diff"):
        before, after = re.findall(r"^(?:---|\+\+\+) (\S+)$", block, re.MULTILINE)
        texts = [(ROOT / name).read_text().splitlines() for name in (before, after)]
        assert block.splitlines() == list(unified_diff(*texts, before, after, n=1, lineterm="")), (
            page
        )


def anchors(page: Path) -> set[str]:
    """What GitHub calls the headings of a page."""
    text = BLOCK.sub("", page.read_text())
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    shown = [re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", title).lower() for title in titles]
    return {re.sub(r"[^\w -]", "", title).replace(" ", "-") for title in shown}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    text = BLOCK.sub("", page.read_text())
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", text):
        found = page.parent / target if target else page
        assert found.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(found), f"{page.name} links to {target}#{anchor}"


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=name_of)
def test_the_readme_leads_to_every_page(page: Path) -> None:
    assert f"](docs/{page.name})" in (ROOT / "README.md").read_text()


def named_tests() -> list[tuple[str, str, bool]]:
    """Page, what it names, and whether it says that it is slow."""
    named = re.compile(r"`tests/([\w/.]+::\w+)`( \(slow\))?")
    return [
        (name_of(page), f"tests/{test}", bool(slow))
        for page in PAGES
        for test, slow in named.findall(page.read_text())
    ]


@pytest.mark.parametrize(("page", "test", "slow"), named_tests())
def test_tests_that_a_page_names_are_there(page: str, test: str, slow: bool) -> None:
    path, name = test.split("::")
    text = (ROOT / path).read_text()
    before, found, _ = text.partition(f"\ndef {name}(")
    assert found, f"{page} names {test}"
    decorators = before.rpartition("\n\n")[2].splitlines()
    all_are = re.search(r"^pytestmark = .*mark\.slow", text, re.MULTILINE)
    is_slow = "@pytest.mark.slow" in decorators or all_are is not None
    assert is_slow == slow, f"{page} says that {test} is {'slow' if slow else 'not slow'}"
