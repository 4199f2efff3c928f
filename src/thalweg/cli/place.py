"""Where a plan is to be: so many workers, a cluster file, or a layout of racks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from thalweg.cli.progress import progress_bar
from thalweg.errors import UsageError
from thalweg.facts import Cluster, Duration, Rate, rack_sizes, read_cluster

if TYPE_CHECKING:
    from thalweg.bench.site import Site

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
LAB_RATE = "200mbit"
OrderOption = Annotated[
    str | None,
    typer.Option(
        "--rank-order",
        metavar="rack|interleaved",
        help="With --lab: rank numbers rack by rack, or round the racks.",
    ),
]


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
        said = " and ".join(given) + " at once" if given else "nothing"
        raise UsageError(
            f"{said} says where the workers are", "give one of --workers, --cluster and --lab"
        )
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


def lab_cluster(
    lab: str,
    nic: str | None,
    uplink: str | None,
    rank_order: str | None,
    latency: str | None = None,
) -> Cluster:
    """What is to be built. Racks without any rate get one that this machine can carry."""
    if (nic, uplink) == (None, None) and not lab.endswith(".toml"):
        nic = uplink = LAB_RATE
    return cluster_at(lab=lab, nic=nic, uplink=uplink, rank_order=rank_order, latency=latency)


@contextmanager
def site_at(
    *,
    workers: int | None,
    lab: str | None,
    nic: str | None,
    uplink: str | None,
    rank_order: str | None,
) -> Iterator[Site]:
    """Local workers, or a lab that is there until the context ends."""
    from thalweg.bench.site import Site, lab_site  # torch takes a second: not at import

    if (workers is None) == (lab is None):
        said = "nothing" if lab is None else "--workers and --lab at once"
        raise UsageError(f"{said} says where the workers are", "give --workers N or --lab RxH")
    if lab is None:
        if (nic, uplink, rank_order) != (None, None, None):
            raise UsageError("rates and --rank-order describe a lab", "give --lab RxH")
        yield Site(workers=workers or 0)
        return
    wanted = lab_cluster(lab, nic, uplink, rank_order)
    with ExitStack() as stack:
        with progress_bar("Building the lab") as bar:
            site = stack.enter_context(lab_site(wanted, bar.show))
        yield site
