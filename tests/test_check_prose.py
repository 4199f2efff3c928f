"""`scripts/check-prose` finds what it is there to find."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CLEAR = '"""A module."""\n\n\nclass Payload:\n    """The bytes of one round."""\n'


def checked(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "check-prose"), str(folder)]
    return subprocess.run(command, capture_output=True, text=True)


def test_this_package_is_fine() -> None:
    done = checked(ROOT / "src")
    assert (done.returncode, done.stdout) == (0, "names, docstrings and modules: fine\n")


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("size.py", CLEAR.replace("The bytes of", "Of all bytes in"), "begins with 'of'"),
        ("size.py", CLEAR.replace("The bytes of one round", "Bytes"), "begins with 1 words"),
        ("size.py", CLEAR.replace("The bytes of", "The same for"), "begins with 'the'"),
        ("verdict.py", CLEAR.replace("Payload", "Cause"), "a retired word as a module's name"),
        ("other.py", CLEAR, "the class name Payload is taken twice"),
    ],
)
def test_what_is_unclear(tmp_path: Path, name: str, text: str, problem: str) -> None:
    (tmp_path / "payload.py").write_text(CLEAR)
    assert checked(tmp_path).returncode == 0
    (tmp_path / name).write_text(text)
    done = checked(tmp_path)
    assert done.returncode == 1
    assert problem in done.stdout
