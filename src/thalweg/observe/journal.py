"""A rank's records in a file, a line each, that doesn't grow without bound.

`rank-0003.jsonl` is written until it has half of the allowed size; then it replaces
`rank-0003.old.jsonl`, and a new file begins. So the newest records are always there, at least half
of the allowed size. The first lines of a file are its rank and the offset of its clock.

If the disk is full or the folder is gone, recording ends and training continues.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from thalweg.errors import UsageError
from thalweg.facts import Size, grouped
from thalweg.observe.records import ClockSample, Record, RunHeader, parsed, written

MAX_JOURNAL_SIZE = Size.parse("64MB")  # a rank's, in all
JOURNAL_NAME_PATTERN = re.compile(r"rank-(\d+)(\.old)?\.jsonl")
log = logging.getLogger("thalweg")


class Journal:
    """The journal of one rank, for one thread. A restarted rank appends to its file."""

    def __init__(
        self, folder: Path, rank: int, *, again: bool = False, largest: Size = MAX_JOURNAL_SIZE
    ) -> None:
        self.path = folder / f"rank-{rank:04}.jsonl"
        self._old = folder / f"rank-{rank:04}.old.jsonl"
        self._half = largest.nbytes // 2
        self._nbytes = 0
        self._heads: dict[type, Record] = {}  # the first records of each file
        self._file: TextIO | None = None
        with self._logging_failure():
            folder.mkdir(parents=True, exist_ok=True)
            if again and self.path.exists():
                self.path.replace(self._old)
            elif not again:
                self._old.unlink(missing_ok=True)
            self._begin()

    def add(self, records: Iterable[Record]) -> None:
        """Append these records and flush the file."""
        if self._file is None:
            return
        with self._logging_failure():
            for record in records:
                if isinstance(record, RunHeader | ClockSample):
                    self._heads[type(record)] = record
                self._write(record)
            self._file.flush()

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # what was in the buffer is lost with the disk
                file.close()

    @contextmanager
    def _logging_failure(self) -> Iterator[None]:
        """Log once that writing failed, and stop recording."""
        try:
            yield
        except OSError as error:
            self.close()
            log.warning(
                "%s can't be written (%s): recording has stopped, training continues",
                self.path,
                error.strerror,
            )

    def _write(self, record: Record) -> None:
        assert self._file is not None
        line = written(record) + "\n"
        if self._nbytes and self._nbytes + len(line) > self._half:
            self._file.close()
            self.path.replace(self._old)
            self._begin()
            for head in self._heads.values():
                self._write(head)
        self._file.write(line)
        self._nbytes += len(line)

    def _begin(self) -> None:
        self._file = self.path.open("w", encoding="utf-8")
        self._nbytes = 0


def read_records(folder: Path) -> Mapping[int, list[Record]]:
    """The records in the folder by rank, oldest first. Lines that the end of a process truncated,
    or that a newer version wrote, are skipped."""
    remedy = "name the folder that was given as records= or --records"
    try:
        files = grouped(
            (int(match[1]), path)
            for path in folder.iterdir()
            if (match := JOURNAL_NAME_PATTERN.fullmatch(path.name)) is not None
        )
    except OSError as reason:
        raise UsageError(f"no records can be read in {folder}: {reason.strerror}", remedy) from None
    if not files:
        raise UsageError(f"there are no records in {folder}", remedy)
    return {
        # In reverse order the name of the older file comes first.
        rank: [record for path in sorted(paths, reverse=True) for record in _lines(path)]
        for rank, paths in sorted(files.items())
    }


def _lines(path: Path) -> Iterator[Record]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as reason:
        raise UsageError(
            f"can't read {path}: {reason.strerror}", "look at its permissions"
        ) from None
    for line in text.splitlines():
        with suppress(ValueError):
            if (record := parsed(line)) is not None:
                yield record
