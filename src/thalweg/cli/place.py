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
    int | None, typer.Option("--workers", min=1, help="So many workers, one a host, in one rack.")
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
    typer.Option("--lab", metavar="RxH", help="Two racks of four hosts: 2x4; uneven ones: 5+3+4."),
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
OrderOption = Annotated[
    str | None,
    typer.Option(
        "--rank-order",
        metavar="rack|interleaved",
        help="With --lab: rank numbers rack by rack, or round the racks.",
    ),
]


def cluster_at(
    workers: int | None,
    cluster: Path | None,
    lab: str | None,
    nic: str | None,
    uplink: str | None,
    rank_order: str | None,
    latency: str | None = None,
) -> Cluster:
    given = [name for name, value in _named(workers, cluster, lab) if value is not None]
    if len(given) != 1:
        said = " and ".join(given) + " at once" if given else "nothing"
        raise UsageError(
            f"{said} says where the workers are", "give one of --workers, --cluster and --lab"
        )
    if rank_order not in (None, "rack", "interleaved"):
        raise UsageError(f"no rank order {rank_order!r}", "give rack or interleaved")
    if lab is None and (nic, uplink, rank_order, latency) != (None, None, None, None):
        raise UsageError(
            "rates, --rank-order and --latency describe a lab of racks",
            "give the racks too (2x4), or a cluster file",
        )
    if cluster is not None:
        return read_cluster(cluster)
    if workers is not None:
        return Cluster.flat(workers)
    return Cluster.regular(
        rack_sizes(lab or ""),
        nic=None if nic is None else Rate.parse(nic),
        uplink=None if uplink is None else Rate.parse(uplink),
        uplink_latency=None if latency is None else Duration.parse(latency),
        interleaved=rank_order == "interleaved",
    )


@contextmanager
def site_at(
    workers: int | None,
    cluster: Path | None,
    lab: str | None,
    nic: str | None,
    uplink: str | None,
    rank_order: str | None,
) -> Iterator[Site]:
    """Local workers, or a lab that is there until the context ends."""
    from thalweg.bench.site import Site, lab_site  # torch takes a second: not at import

    wanted = cluster_at(workers, cluster, lab, nic, uplink, rank_order)
    if workers is not None:
        yield Site(workers=workers)
        return
    with ExitStack() as stack:
        with progress_bar("Building the lab") as bar:
            site = stack.enter_context(lab_site(wanted, bar.show))
        yield site


def _named(
    workers: int | None, cluster: Path | None, lab: str | None
) -> list[tuple[str, int | Path | str | None]]:
    return [("--workers", workers), ("--cluster", cluster), ("--lab", lab)]
