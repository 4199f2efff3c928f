"""A member dies while all of them save: the others' checkpoint is complete, and they go on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from time import sleep
from typing import Any

import pytest

from tests.training.test_checkpoint import latest, names
from tests.training.under_fire import EPOCHS, STEPS, Act, train
from tests.training.workers import SECONDS, on_ranks, one_value
from thalweg.engine.collectives import Collectives
from thalweg.launch.supervisor import SendMessage, run_workers
from thalweg.training import Run, checkpoint, checkpoint_io, run
from thalweg.training.checkpoint import read

SIZE, AT = 4, 3


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dying(module: Any, name: str, calls: int, *, after: bool) -> Callable[[], None]:
    """Arm this process: it dies at a call of that function."""

    def arm() -> None:
        original = getattr(module, name)
        left = calls

        def deadly(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0 and not after:
                die()
            result = original(*arguments, **options)
            if left == 0:
                die()
            return result

        setattr(module, name, deadly)

    return arm


MOMENTS = {
    "before all": dying(run, "save", 1, after=False),
    "it has published its random state": dying(checkpoint_io, "_random_states", 1, after=True),
    "all is done": dying(run, "save", 1, after=True),
    "a file is half written": dying(checkpoint, "save_file", 2, after=False),
    "its files are there": dying(checkpoint, "_fill", 1, after=True),
    "it is renamed": dying(checkpoint, "_rename", 1, after=True),
    "old ones go": dying(checkpoint, "_remove", 1, after=False),
}
OF_ANY = ["before all", "it has published its random state", "all is done"]
CASES = [(3, moment) for moment in OF_ANY] + [(0, moment) for moment in MOMENTS]


@pytest.mark.slow
@pytest.mark.parametrize(("dead", "moment"), CASES)
def test_one_dies_in_a_save(dead: int, moment: str, tmp_path: Path) -> None:
    def act(run: Run, when: str) -> None:
        if (run.rank, run.step, when) == (dead, AT, "after"):
            MOMENTS[moment]()

    goes_on_without(dead, "ring", act, tmp_path)


@pytest.mark.parametrize("sync", ["ring", pytest.param("dssync", marks=pytest.mark.slow)])
def test_others_know_of_it_before_the_writer_is_through(sync: str, tmp_path: Path) -> None:
    """The writer goes on with its next step then, and nobody writes that checkpoint again."""

    def act(run: Run, when: str) -> None:
        if (run.step, when) != (AT, "after"):
            return
        if run.rank == 3:
            dying(Collectives, "gather", 1, after=False)()
        elif run.rank == 0:
            fill = checkpoint._fill

            def slow(*arguments: Any) -> None:
                if run.step == AT and run.members.epoch == 1:
                    membership = run._recovery.membership
                    assert membership is not None
                    while not membership.rendezvous_pending:
                        sleep(0.01)
                    sleep(0.5)  # for the others to be there
                fill(*arguments)

            checkpoint._fill = slow

    goes_on_without(3, sync, act, tmp_path)


@pytest.mark.parametrize(
    ("moment", "how"), [("its files are there", "Interrupted"), ("it is through", "went on")]
)
def test_a_writer_that_was_stopped_leaves_the_newer_ones_alone(
    moment: str, how: str, tmp_path: Path
) -> None:
    """It goes on after others have formed anew and saved: it isn't the writer any more."""
    folder, notes, marks = (tmp_path / name for name in ("folder", "notes", "marks"))
    for path in (notes, marks):
        path.mkdir()

    def stop_in_the_save() -> None:
        fill, write = checkpoint._fill, checkpoint.write

        def stop(now: str) -> None:
            if now == moment:
                put(marks / "pid", str(os.getpid()))
                os.kill(os.getpid(), signal.SIGSTOP)

        def stopping(*arguments: Any) -> None:
            fill(*arguments)
            stop("its files are there")

        def noting(*arguments: Any, **options: Any) -> Any:
            checkpoint.write = write
            try:
                path = write(*arguments, **options)
                stop("it is through")
            except BaseException as error:
                put(marks / "over", type(error).__name__)
                raise
            finally:
                checkpoint._fill = fill
            put(marks / "over", "went on")
            return path

        checkpoint._fill, checkpoint.write = stopping, noting

    def work(rank: int, report: SendMessage) -> dict[str, Any]:
        seen: dict[str, Any] = {}

        def act(run: Run, when: str) -> None:
            if not (marks / "pid").exists() and (rank, run.step, when) == (0, AT, "after"):
                stop_in_the_save()  # once: its next step is interrupted, and comes again
            if not seen and (rank, run.step, when) == (3, AT + 3, "after"):
                seen["before"] = names(folder)
                os.kill(int((marks / "pid").read_text()), signal.SIGCONT)
                while not (marks / "over").exists():
                    sleep(0.01)
                seen["after"] = names(folder)
            if "after" in seen and len(run.members) == SIZE:  # it is back
                run.stop()

        return train("ring", notes, act, folder=folder, save=True, epochs=10_000) | seen

    results = run_workers(SIZE, work, timeout=SECONDS, spare=range(SIZE), debug=True)
    assert (marks / "over").read_text() == how
    newest = [f"step-{step:08d}" for step in (AT + 1, AT + 2)]
    assert [name for name in results[3]["before"] if name.startswith("step")] == newest
    assert results[3]["after"] == newest
    last = one_value(results, "steps")
    assert one_value(results, "members") == list(range(SIZE))
    assert names(folder) == [f"step-{step:08d}" for step in (last - 1, last)]


def put(path: Path, text: str) -> None:
    """All of it at once."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.rename(path)


def goes_on_without(dead: int, sync: str, act: Act, tmp_path: Path) -> None:
    folder, notes = tmp_path / "folder", tmp_path / "notes"
    notes.mkdir()

    def work(rank: int, report: SendMessage) -> dict[str, Any]:
        return train(sync, notes, act, folder=folder, save=True)

    results = run_workers(SIZE, work, timeout=SECONDS, spare=range(SIZE), debug=True)
    assert [rank for rank, result in enumerate(results) if not result] == [dead]
    lived = [result for result in results if result]
    assert one_value(lived, "steps") == STEPS
    assert one_value(lived, "members") == [rank for rank in range(SIZE) if rank != dead]
    assert names(folder) == [f"step-{step:08d}" for step in (STEPS - 1, STEPS)]
    newest = latest(folder)
    assert newest is not None
    assert (len(read(newest).ranks), read(newest).step) == (SIZE - 1, STEPS)
    if sync == "ring":
        calm = tmp_path / "calm"
        calm.mkdir()
        wanted = on_ranks(1, lambda rank: train("ring", calm, epochs=EPOCHS))
        assert one_value(lived, "values") == wanted[0]["values"]
