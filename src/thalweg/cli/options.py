"""Options that several commands share, declared once as the fields of a dataclass; most say where a
plan is to be: so many workers, a cluster file, or a layout of racks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer

from thalweg.cli.output import progress_bar
from thalweg.declarations import listed
from thalweg.errors import UsageError
from thalweg.facts import Cluster, Duration, Rate, rack_sizes, read_cluster

if TYPE_CHECKING:
    from thalweg.bench.run_everywhere import Deployment
    from thalweg.lab import Lab

T = TypeVar("T")
WorkersOption = Annotated[
    int | None,
    typer.Option(
        "--workers", metavar="N", min=1, help="So many workers on this machine, links unshaped."
    ),
]
ClusterOption = Annotated[
    Path | None,
    typer.Option(
        "--cluster",
        metavar="FILE",
        help="A cluster file (TOML); see docs/describe-your-cluster.md.",
    ),
]
LabOption = Annotated[
    str | None,
    typer.Option(
        "--lab",
        metavar="RxH",
        help="Two racks of four hosts: 2x4; uneven ones: 5+3+4; or a cluster file.",
    ),
]
NicOption = Annotated[
    str | None,
    typer.Option("--nic", metavar="RATE", help="With --lab: of every NIC, like 200mbit."),
]
UplinkOption = Annotated[
    str | None, typer.Option("--uplink", metavar="RATE", help="With --lab: of every rack's uplink.")
]
LatencyOption = Annotated[
    str | None,
    typer.Option("--latency", metavar="DURATION", help="What crossing an uplink adds, each way."),
]
DEFAULT_LAB_RATE = "200mbit"
OrderOption = Annotated[
    str | None,
    typer.Option(
        "--rank-order",
        metavar="rack|interleaved",
        help="With --lab: rank numbers rack by rack, or round the racks.",
    ),
]


def with_bundles(command: Callable[..., T]) -> Callable[..., T]:
    """The command for typer, in whose signature the fields of each dataclass among the parameters
    stand in place of the dataclass."""
    shown: list[Parameter] = []
    bundles: dict[str, Any] = {}
    hints = get_type_hints(command, include_extras=True)
    for name, own in signature(command).parameters.items():
        if not is_dataclass(kind := hints[name]):
            shown.append(own.replace(kind=Parameter.KEYWORD_ONLY, annotation=kind))
            continue
        bundles[name] = kind
        of_fields = signature(bundles[name]).parameters
        within = get_type_hints(kind, include_extras=True)
        shown += [each.replace(annotation=within[each.name]) for each in of_fields.values()]

    @wraps(command)
    def run(**given: Any) -> T:
        for name, kind in bundles.items():
            given[name] = kind(**{each.name: given.pop(each.name) for each in fields(kind)})
        return command(**given)

    vars(run)["__signature__"] = Signature(shown)
    return run


def cluster_at(
    *,
    workers: int | None = None,
    cluster: Path | None = None,
    lab: str | None = None,
    nic: str | None = None,
    uplink: str | None = None,
    rank_order: str | None = None,
    latency: str | None = None,
) -> Cluster:
    options = {"--workers": workers, "--cluster": cluster, "--lab": lab}
    given = [name for name, value in options.items() if value is not None]
    if len(given) != 1:
        raise place_error(given, "one of --workers, --cluster and --lab")
    if rank_order not in (None, "rack", "interleaved"):
        raise UsageError(f"no rank order {rank_order!r}", "give rack or interleaved")
    described = lab is not None and not lab.endswith(".toml")
    if not described and (nic, uplink, rank_order, latency) != (None, None, None, None):
        raise UsageError(
            "rates, --rank-order and --latency describe a lab of racks",
            "give the racks too (2x4), or a cluster file",
        )
    if cluster is not None:
        return read_cluster(cluster)
    if workers is not None:
        return Cluster.flat(workers)
    if not described:
        return read_cluster(Path(lab or ""))
    return Cluster.regular(
        rack_sizes(lab or ""),
        nic=None if nic is None else Rate.parse(nic),
        uplink=None if uplink is None else Rate.parse(uplink),
        uplink_latency=None if latency is None else Duration.parse(latency),
        interleaved=rank_order == "interleaved",
    )


def place_error(given: list[str], wanted: str) -> UsageError:
    """The error of a command that got none, or more than one, of the options that place it."""
    every = "both" if len(given) == 2 else "all"
    who = f"{listed(given)} {every} say" if given else "nothing says"
    return UsageError(f"{who} where the workers are", f"give {wanted}")


def lab_cluster(
    lab: str,
    nic: str | None,
    uplink: str | None,
    rank_order: str | None,
    latency: str | None = None,
) -> Cluster:
    """What is to be built. Racks without any rate get one that this machine can carry."""
    if (nic, uplink) == (None, None) and not lab.endswith(".toml"):
        nic = uplink = DEFAULT_LAB_RATE
    return cluster_at(lab=lab, nic=nic, uplink=uplink, rank_order=rank_order, latency=latency)


@contextmanager
def lab_of(cluster: Cluster, loss: float = 0.0) -> Iterator[Lab]:
    """A lab like this cluster, until the context ends; without what the kernel lacks."""
    from thalweg.lab import Lab as TheLab  # where there is one

    lab = TheLab.of(cluster, loss=loss, without_netem="go on")
    try:
        with progress_bar("Building the lab") as bar:
            lab.up(progress=bar.show)
        yield lab
    finally:
        lab.down()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceOptions:
    """The options that say where a command's workers run: on this machine, or in a lab."""

    workers: WorkersOption = None
    lab: LabOption = None
    nic: NicOption = None
    uplink: UplinkOption = None
    rank_order: OrderOption = None

    @contextmanager
    def site(self, *, under_launcher: bool = False) -> Iterator[Deployment]:
        """Local workers, a lab that exists until the context ends, or a launcher's workers."""
        from thalweg.bench.run_everywhere import ALONE, Deployment  # imports torch: takes a second

        if under_launcher and (launched := Deployment.of_this_process()).launcher != ALONE:
            self.leave_to_the_launcher()
            yield launched
            return
        self.refuse_if_unclear()
        if self.lab is None:
            yield Deployment(workers=self.workers or 0)
            return
        with lab_of(self.lab_cluster()) as lab:
            yield Deployment.of_lab(lab)

    def refuse_if_unclear(self) -> None:
        if (self.workers is None) == (self.lab is None):
            given = ["--workers", "--lab"] if self.lab else []
            raise place_error(given, "--workers N or --lab RxH")
        if self.lab is None and (self.nic, self.uplink, self.rank_order) != (None, None, None):
            raise UsageError("rates and --rank-order describe a lab", "give --lab RxH")

    def leave_to_the_launcher(self) -> None:
        if (self.workers, self.lab) != (None, None):
            raise UsageError("the launcher has started the workers", "don't say where they are")

    def lab_cluster(self) -> Cluster:
        return lab_cluster(self.lab or "", self.nic, self.uplink, self.rank_order)

    @property
    def settings(self) -> dict[str, str | None]:
        """What JSON says of the lab."""
        order = self.rank_order or "rack"
        return {"lab": self.lab, "nic": self.nic, "uplink": self.uplink, "rank_order": order}

    @property
    def words(self) -> list[str]:
        """The options as they were given."""
        given = {f"--{name.replace('_', '-')}": value for name, value in asdict(self).items()}
        return [word for name, value in given.items() if value for word in (name, str(value))]
