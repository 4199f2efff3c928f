"""What a program's standard error says of its failure."""

from __future__ import annotations

from thalweg.launch.root_cause import StderrFailure


def heard(text: str) -> tuple[str, str] | None:
    words = StderrFailure()
    for line in text.splitlines():
        words.read_line(line)
    return None if words.failure is None else (words.failure.kind, words.failure.problem)


def test_our_own_line_without_the_rank_that_is_printed_anyway() -> None:
    assert heard("a warning\nthalweg: rank 3: no file x; name another\n") == ("", "no file x")


def test_what_follows_from_another_rank_is_known_as_that() -> None:
    assert heard("thalweg: rank 3: rank 1 aborted: no file x; look there\n") == (
        "PeerFailed",
        "rank 1 aborted: no file x",
    )


def test_the_last_line_of_a_traceback() -> None:
    traceback = """Traceback (most recent call last):
  File "train.py", line 1, in <module>
    raise torch.cuda.OutOfMemoryError("no room")

torch.cuda.OutOfMemoryError: no room
then this
"""
    assert heard(traceback) == ("OutOfMemoryError", "OutOfMemoryError: no room")


def test_a_traceback_as_torch_prefixes_it() -> None:
    traceback = "Traceback (most recent call last):\n  x\nValueError: y"
    prefixed = "\n".join(f"[rank2]: {line}" for line in traceback.splitlines())
    assert heard(prefixed) == heard(traceback) == ("ValueError", "ValueError: y")


def test_the_last_of_several() -> None:
    text = "Traceback (most recent call last):\nKeyError: 'a'\nthalweg: no plan x; see plans\n"
    assert heard(text) == ("", "no plan x")


def test_lines_that_tell_of_no_failure() -> None:
    assert heard("epoch 1\nValueError: this is only talked about\n") is None
