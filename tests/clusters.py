"""Strategies for clusters and groups: any rack layout, any numbering of the ranks."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from thalweg.facts import Cluster, Duplex, Duration, Host, Rack, Rate, StragglerDelay
from thalweg.schedules import Group

RATES = st.sampled_from(["10mbit", "200mbit", "1gbit", "25gbit"]).map(Rate.parse)
LATENCIES = st.sampled_from(["0s", "20us", "100us", "5ms"]).map(Duration.parse)


@st.composite
def clusters(draw: st.DrawFn, most: int = 33) -> Cluster:
    """Racks of any sizes, several ranks on some hosts, ranks in any order."""
    workers = draw(st.integers(1, most))
    numbers = draw(st.permutations(range(workers)))
    racks: list[Rack] = []
    taken = 0
    while taken < workers:
        size = draw(st.integers(1, workers - taken))
        mine = numbers[taken : taken + size]
        per_host = draw(st.integers(1, 2))
        hosts = [mine[i : i + per_host] for i in range(0, size, per_host)]
        racks.append(
            Rack(
                name=f"rack{len(racks)}",
                uplink=draw(st.none() | st.builds(Duplex, RATES, RATES)),
                latency=draw(LATENCIES),
                hosts=tuple(
                    Host(
                        name=f"host{ranks[0]}",
                        ranks=tuple(ranks),
                        nic=draw(st.builds(Duplex, RATES, RATES)),
                    )
                    for ranks in hosts
                ),
            )
        )
        taken += size
    return Cluster(racks=tuple(racks), latency=draw(LATENCIES))


@st.composite
def groups(draw: st.DrawFn, most: int = 33) -> Group:
    """All workers of a cluster, or some of them."""
    cluster = draw(clusters(most))
    everybody = range(cluster.workers)
    ranks = draw(
        st.just(list(everybody))
        | st.lists(st.sampled_from(list(everybody)), min_size=1, unique=True)
    )
    return Group(tuple(ranks), cluster)


def with_late(cluster: Cluster, lates: dict[int, StragglerDelay]) -> Cluster:
    """The cluster with these straggler delays of hosts, by their first rank."""
    racks = tuple(
        replace(
            rack,
            hosts=tuple(
                replace(host, late=lates.get(host.ranks[0], host.late)) for host in rack.hosts
            ),
        )
        for rack in cluster.racks
    )
    return replace(cluster, racks=racks)
