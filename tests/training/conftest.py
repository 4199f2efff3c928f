"""Test functions whose cases are run one after the other by the same processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch

from tests.training.workers import SECONDS
from thalweg.errors import ThalwegError
from thalweg.launch.supervisor import SendMessage, run_workers

# Two threads that wait for each other on busy cores cost more than a small model takes.
torch.set_num_threads(1)

Work = Callable[..., dict[str, Any]]
Outcome = list[dict[str, Any]] | ThalwegError


class InOneCrew(Protocol):
    """What the fixture of this name is."""

    def __call__(
        self, size: int, work: Work, **made: Callable[[], Any]
    ) -> list[dict[str, Any]]: ...


@dataclass(frozen=True, kw_only=True)
class Case:
    """One case of a test function, and what its work may ask for."""

    name: str
    parameters: dict[str, Any]

    def run(self, rank: int, work: Work) -> dict[str, Any]:
        named = signature(work).parameters
        return work(rank, **{key: x for key, x in self.parameters.items() if key in named})


class Shared:
    """What the cases of a module have in common: the outcomes so far, and a folder a case."""

    def __init__(self, make_folder: Callable[[str], Path]) -> None:
        self.outcomes: dict[str, Outcome] = {}
        self._folders: dict[str, Path] = {}
        self._make_folder = make_folder

    def folder(self, case: str) -> Path:
        if case not in self._folders:
            self._folders[case] = self._make_folder("case")
        return self._folders[case]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Shared:
    return Shared(tmp_path_factory.mktemp)


@pytest.fixture
def folder(request: pytest.FixtureRequest, shared: Shared) -> Path:
    """The folder that `in_one_crew` gives to the work of this case."""
    return shared.folder(request.node.name)


@pytest.fixture
def in_one_crew(request: pytest.FixtureRequest, shared: Shared) -> InOneCrew:
    """Like `on_ranks(size, work)`, for all selected cases of this test function at once.

    The first case that asks has the work of all cases done, one after the other by the same
    processes; the others find their results. The work gets the rank, and, as far as it has
    arguments of these names, a case's parameters, its `folder`, and what is `made` for each case
    before there are processes; it must not know this case's otherwise. Cases with a parameter
    `size` share processes with those of the same size, and those that are slow with the slow.
    """

    def in_one_crew(size: int, work: Work, **made: Callable[[], Any]) -> list[dict[str, Any]]:
        own = request.node.name
        if own not in shared.outcomes:
            cases = [
                Case(
                    name=item.name,
                    parameters={
                        "folder": shared.folder(item.name),
                        **{name: make() for name, make in made.items()},
                        **item.callspec.params,
                    },
                )
                for item in request.session.items
                if isinstance(item, pytest.Function)
                and (item.module, item.originalname) == (request.module, request.node.originalname)
                and item.callspec.params.get("size", size) == size
                and is_slow(item) == is_slow(request.node)
            ]
            shared.outcomes.update(outcomes(size, work, cases))
        found = shared.outcomes[own]
        if isinstance(found, ThalwegError):
            raise found
        return found

    return in_one_crew


def is_slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None


def outcomes(size: int, work: Work, cases: Sequence[Case]) -> dict[str, Outcome]:
    """By the names of the cases. A failure is that of the first case that not all ranks brought to
    an end; those after it are run by other processes."""
    found: dict[str, Outcome] = {}
    while left := [case for case in cases if case.name not in found]:
        came: dict[str, dict[int, dict[str, Any]]] = {case.name: {} for case in left}
        failed = None

        def all_cases(
            rank: int, report: SendMessage, left: Sequence[Case] = left
        ) -> dict[str, Any]:
            for case in left:
                report({"case": case.name, "result": case.run(rank, work)})
            return {}

        def take(rank: int, message: dict[str, Any], came: Any = came) -> None:
            came[message["case"]][rank] = message["result"]

        try:
            run_workers(size, all_cases, timeout=SECONDS * len(left), debug=True, on_message=take)
        except ThalwegError as error:
            failed = error
        for case in left:
            if len(came[case.name]) < size:
                assert failed is not None
                found[case.name] = failed
                break
            found[case.name] = [came[case.name][rank] for rank in range(size)]
    return found
