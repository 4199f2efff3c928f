"""The job secret: where it may come from, and where it never goes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from thalweg.errors import LaunchError
from thalweg.launch.place import HERE
from thalweg.launch.secret import find_secret, new_secret
from thalweg.launch.supervisor import SendMessage, run_command, run_workers
from thalweg.launch.worker_process import WorkerSpec

SECRET = "nobody guesses this one"


def written(path: Path, text: str = SECRET + "\n", mode: int = 0o600) -> dict[str, str]:
    path.write_text(text)
    path.chmod(mode)
    return {"THALWEG_SECRET_FILE": str(path)}


def test_from_the_environment_or_a_file(tmp_path: Path) -> None:
    assert find_secret({}) is None
    assert find_secret({"THALWEG_SECRET": ""}) is None
    assert find_secret({"THALWEG_SECRET": SECRET}) == SECRET.encode()
    assert find_secret(written(tmp_path / "secret")) == SECRET.encode()
    assert find_secret(written(tmp_path / "read-only", mode=0o400)) == SECRET.encode()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o620, 0o601, 0o777])
def test_a_file_that_others_may_read_or_write(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "secret"
    with pytest.raises(LaunchError, match=rf"permissions for {path}; run chmod 600 {path}"):
        find_secret(written(path, mode=mode))


def test_what_cannot_be_one(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo, 0o600)
    for environment, problem in (
        ({"THALWEG_SECRET": "short"}, r"THALWEG_SECRET has 5 characters; use at least 16"),
        ({"THALWEG_SECRET": " " * 20}, "has 0 characters"),
        (written(tmp_path / "empty", ""), r"which has 0 characters; use at least 16"),
        ({"THALWEG_SECRET_FILE": str(tmp_path / "none")}, "No such file or directory; name a"),
        ({"THALWEG_SECRET_FILE": str(tmp_path)}, "isn't a regular file"),
        ({"THALWEG_SECRET_FILE": str(fifo)}, "isn't a regular file"),
        ({"THALWEG_SECRET": SECRET, **written(tmp_path / "two")}, "both set; unset one"),
    ):
        with pytest.raises(LaunchError, match=problem) as raised:
            find_secret(environment)
        assert SECRET not in str(raised.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_of_another_user(tmp_path: Path) -> None:
    environment = written(tmp_path / "secret")
    os.chown(tmp_path / "secret", 12345, -1)
    with pytest.raises(LaunchError, match="belongs to another user; make a copy"):
        find_secret(environment)


def test_every_job_has_one_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("THALWEG_SECRET", raising=False)
    monkeypatch.delenv("THALWEG_SECRET_FILE", raising=False)

    def work(rank: int, report: SendMessage) -> dict[str, str]:
        return {"secret": os.environ["THALWEG_SECRET"]}

    first, second = (run_workers(2, work, timeout=60) for _ in range(2))
    assert first[0] == first[1]
    assert second[0] == second[1]
    assert first[0] != second[0]
    assert len(first[0]["secret"]) >= 32
    assert "THALWEG_SECRET" not in os.environ


def test_one_that_is_given_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def work(rank: int, report: SendMessage) -> dict[str, str]:
        return {"secret": (find_secret(os.environ) or b"").decode()}

    for name, value in (
        {"THALWEG_SECRET": SECRET}.items()
        | written(tmp_path / "secret").items()  # one after the other
    ):
        with monkeypatch.context() as environment:
            environment.setenv(name, value)
            assert run_workers(2, work, timeout=60) == [{"secret": SECRET}] * 2


def test_it_is_on_no_command_line_and_in_no_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("THALWEG_SECRET", raising=False)
    lines: list[str] = []
    look = (
        "import os, sys; secret = os.environ['THALWEG_SECRET'];"
        "every = [open(f'/proc/{p}/cmdline', errors='replace').read() for p in os.listdir('/proc')"
        " if p.isdigit() and os.path.exists(f'/proc/{p}/cmdline')];"
        "print(len(secret) >= 32, any(secret in line for line in every))"
    )
    run_command(
        2,
        [sys.executable, "-c", look],
        on_line=lambda rank, stream, line: lines.append(line),
        timeout=60,
    )
    assert lines == ["True False"] * 2
    job = WorkerSpec(
        entry_point=lambda *_: None, place=HERE, environment={"x": new_secret()}, debug=False
    )
    assert job.environment["x"] not in repr(job)
