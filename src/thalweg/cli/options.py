"""What several commands share: their options, declared once as the fields of dataclasses, and their
output: the console, JSON for scripts, files, and progress bars.

Most options say where a plan runs: on a number of workers, on the cluster of a file, or on a layout
of racks.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from time import monotonic
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import typer
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.status import Status

import thalweg
from thalweg import lab as labs
from thalweg.bench.run_everywhere import ALONE, Deployment, Report
from thalweg.errors import UsageError
from thalweg.facts import Cluster, Duration, Rate, rack_sizes, read_cluster

PIPE_WIDTH_CHARACTERS = 120
REDRAW_PERIOD_SECONDS = 0.1
T = TypeVar("T")
DEFAULT_LAB_RATE = "200mbit"


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """A reader that closes the pipe ends the command quietly, in `run`."""
        raise BrokenPipeError


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """The output of a command: the console, which is quiet if standard output is for JSON and wide
    in a pipe, files, and JSON for scripts."""

    json_path: Annotated[
        str | None,
        typer.Option(
            "--json", metavar="PATH", help="Write the rows as JSON; - for standard output."
        ),
    ] = None

    @property
    def console(self) -> Console:
        width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH_CHARACTERS
        return _Console(quiet=self.json_path == "-", highlight=False, markup=False, width=width)

    def print(self, *pieces: RenderableType, **options: Any) -> None:
        """Print texts and tables below one another; nothing if there are none."""
        if pieces:
            self.console.print(*pieces, sep="\n", **options)

    def write(self, what: str, path: Path, text: str) -> None:
        """Write a file, and print what it is and where."""
        write_file(path, text)
        self.print(f"{what}: {path}")

    def write_json(
        self, command: str, rows: Sequence[Mapping[str, Any]], /, **settings: Any
    ) -> None:
        """Write the settings and the rows of a command as JSON, if that was asked for."""
        if self.json_path is None:
            return
        document = {"command": command, "version": thalweg.__version__, "settings": settings}
        text = json.dumps({**document, "rows": rows}, indent=2) + "\n"
        if self.json_path == "-":
            sys.stdout.write(text)
        else:
            write_file(Path(self.json_path), text)


def working(what: str) -> Status:
    """A spinner on a terminal while something long is done; nothing in a pipe."""
    return Console(stderr=True).status(f"{what} ...")


def write_file(path: Path, text: str) -> None:
    """Write a file, and its folder if there is none."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as reason:
        raise UsageError(f"can't write {path}: {reason.strerror}", "name another file") from None


def choice_line(chosen: Mapping[str, Any]) -> str:
    """A choice of `auto` in a line."""
    from thalweg.training.auto.policy import PlanChoice  # torch takes a second: not at import

    made = PlanChoice(**chosen)
    return f"from step {made.step}: {made} ({made.reason})"


@contextmanager
def progress_bar(what: str) -> Iterator[Report]:
    """A function that shows how much is done on a progress bar, with a note; nothing in a pipe.

    The bar is drawn on each change, without a thread: workers may be forked at any time.
    """
    stderr = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
        console=stderr,
        transient=True,
        auto_refresh=False,
        disable=not stderr.is_interactive,
    )
    task = bar.add_task(what, note="")
    drawn = 0.0

    def show(done: int, total: int, note: str = "") -> None:
        nonlocal drawn
        bar.start()
        bar.update(task, completed=done, total=total, note=note)
        if monotonic() - drawn >= REDRAW_PERIOD_SECONDS or done == total:
            bar.refresh()
            drawn = monotonic()

    try:
        yield show
    finally:
        bar.stop()


def option(text: str, metavar: str | None = None, *names: str, **settings: Any) -> Any:
    """An option with its help text and the name of its value; its own name is the parameter's."""
    return typer.Option(*names, metavar=metavar, help=text, **settings)


ClusterOption = Annotated[
    Path | None, option("A cluster file (TOML); see docs/describe-your-cluster.md.", "FILE")
]
ModelOption = Annotated[str, option("A model, a job or a workload file (TOML).", "NAME")]
TimeoutOption = Annotated[str, option("How long a worker waits for another one.", "DURATION")]
SvgOption = Annotated[Path | None, option("Path of a picture (SVG) to write.", "PATH")]
RestartsOption = Annotated[
    int, option("How often a worker that is killed is restarted.", "N", min=0)
]
RecordsOption = Annotated[
    Path | None, option("Record every step there, for `thalweg report`.", "DIR")
]


def with_bundles(command: Callable[..., T]) -> Callable[..., T]:
    """The command for typer: each dataclass among its parameters is replaced by its fields."""
    shown: list[Parameter] = []
    bundles: dict[str, Any] = {}
    for name, own in signature(command, eval_str=True).parameters.items():
        if not is_dataclass(kind := own.annotation):
            shown.append(own.replace(kind=Parameter.KEYWORD_ONLY))
            continue
        bundles[name] = kind
        within = get_type_hints(kind, include_extras=True)
        shown += [
            parameter.replace(annotation=within[parameter.name])
            for parameter in signature(bundles[name]).parameters.values()
        ]

    @wraps(command)
    def run(**given: Any) -> T:
        for name, kind in bundles.items():
            given[name] = kind(**{field.name: given.pop(field.name) for field in fields(kind)})
        return command(**given)

    vars(run)["__signature__"] = Signature(shown)
    return run


def names_among(
    known: Sequence[str], given: Iterable[str], option_name: str, what: str
) -> list[str]:
    """The names that are given, one by one or with commas between them."""
    names = [name.strip() for text in given for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise UsageError(f"there is no {what} {name!r}", f"choose from {', '.join(known)}")
    if not names:
        raise UsageError(f"{option_name} is empty", f"choose from {', '.join(known)}")
    return names


@contextmanager
def lab_of(cluster: Cluster, loss: float = 0.0) -> Iterator[labs.Lab]:
    """A lab like this cluster until the context ends, without what the kernel lacks."""
    lab = labs.Lab.of(cluster, loss=loss, without_netem="go on")
    try:
        with progress_bar("Building the lab") as show:
            lab.up(progress=show)
        yield lab
    finally:
        lab.down()


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkOptions:
    """The options that describe the links of racks of hosts."""

    nic: Annotated[str | None, option("Rate of every NIC of the lab, like 200mbit.", "RATE")] = None
    uplink: Annotated[str | None, option("Rate of every rack's uplink in the lab.", "RATE")] = None
    latency: Annotated[
        str | None, option("Latency that a lab's uplink adds in each direction.", "DURATION")
    ] = None
    rank_order: Annotated[
        Literal["rack", "interleaved"] | None,
        option("Rank numbers in the lab: rack by rack, or round the racks.", "rack|interleaved"),
    ] = None

    @property
    def describes_links(self) -> bool:
        return any(getattr(self, option.name) is not None for option in fields(LinkOptions))

    def cluster_of(self, layout: str) -> Cluster:
        """The cluster of a layout like 2x4, or of a file, which has its own links."""
        if layout.endswith(".toml"):
            if self.describes_links:
                raise links_error()
            return read_cluster(Path(layout))
        return Cluster.regular(
            rack_sizes(layout),
            nic=None if self.nic is None else Rate.parse(self.nic),
            uplink=None if self.uplink is None else Rate.parse(self.uplink),
            uplink_latency=None if self.latency is None else Duration.parse(self.latency),
            interleaved=self.rank_order == "interleaved",
        )

    def lab_cluster_of(self, layout: str) -> Cluster:
        """The cluster of a lab: racks without any rate get one that this machine can carry."""
        if layout.endswith(".toml") or (self.nic, self.uplink) != (None, None):
            return self.cluster_of(layout)
        return replace(self, nic=DEFAULT_LAB_RATE, uplink=DEFAULT_LAB_RATE).cluster_of(layout)


def links_error() -> UsageError:
    return UsageError(
        "rates, --rank-order and --latency describe a lab of racks",
        "give the racks too (--lab 2x4), or a cluster file",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceOptions(LinkOptions):
    """The options that say where a command's workers run: on this machine, or in a lab."""

    workers: Annotated[
        int | None, option("Number of workers on this machine, links unshaped.", "N", min=1)
    ] = None
    lab: Annotated[
        str | None,
        option("Two racks of four hosts: 2x4; uneven ones: 5+3+4; or a cluster file.", "RxH"),
    ] = None

    @contextmanager
    def site(self, *, under_launcher: bool = False) -> Iterator[Deployment]:
        """Local workers, a lab that exists until the context ends, or a launcher's workers."""
        if under_launcher and (launched := Deployment.of_this_process()).launcher != ALONE:
            if (self.workers, self.lab) != (None, None):
                raise UsageError("--workers and --lab can't be used under a launcher", "drop them")
            yield launched
            return
        self.refuse_if_unclear()
        if self.lab is None:
            yield Deployment(workers=self.workers or 0)
            return
        with lab_of(self.lab_cluster_of(self.lab)) as lab:
            yield Deployment.of_lab(lab)

    def refuse_if_unclear(self) -> None:
        if (self.workers is None) == (self.lab is None):
            raise UsageError(
                "--workers and --lab are both given" if self.lab else "no workers are given",
                "give exactly one of --workers N and --lab RxH",
            )
        if self.lab is None and self.describes_links:
            raise links_error()

    @property
    def settings(self) -> dict[str, str | None]:
        """The lab's description in JSON."""
        order = self.rank_order or "rack"
        return {"lab": self.lab, "nic": self.nic, "uplink": self.uplink, "rank_order": order}

    @property
    def words(self) -> list[str]:
        """The options as they were given."""
        given = {f"--{name.replace('_', '-')}": value for name, value in asdict(self).items()}
        return [word for name, value in given.items() if value for word in (name, str(value))]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions(PlaceOptions):
    """The options that describe a cluster on which nothing is run."""

    cluster: ClusterOption = None

    def described(self) -> Cluster:
        options = {"--workers": self.workers, "--cluster": self.cluster, "--lab": self.lab}
        given = [name for name, value in options.items() if value is not None]
        if len(given) != 1:
            raise UsageError(
                f"{' and '.join(given)} are given together" if given else "no workers are given",
                "give exactly one of --workers, --cluster and --lab",
            )
        if self.lab is not None:
            return self.cluster_of(self.lab)
        if self.describes_links:
            raise links_error()
        return Cluster.flat(self.workers) if self.workers else read_cluster(self.cluster or Path())
