"""The all-reduce that suits a bucket's size. MPI libraries choose, too (Thakur, Rabenseifner and
Gropp, 2005; the component `tuned` of Open MPI), by measured thresholds; here a cost model chooses.

The time of a small message is that of its hops, the time of a large one that of its bytes. A hop
takes a seconds, the bucket has S bytes, and the N members are in R racks of n; NICs have r bytes
per second, uplinks u. A choice takes about

    ring                2(N-1) a + 2(N-1)/N max(S/r, S/u)
    halving_doubling    2 log2 N a + 2(n-1)/n S/r + 2(R-1)/R max(S/nr, S/u)
    double_tree         (sqrt(2 log2 N a) + sqrt(2 max(S/r, S/u)))^2, in the best number of pieces
    hierarchical        4 max(n-1, R-1) a + max(2(N-1)/N S/r, 2(R-1)/R S/u)

seconds, and the quickest is built. If N is no power of two, halving_doubling takes 2 a + 2 S/r
more; if R or the size of a rack isn't, its last term has n S/u instead of S/u, since all members of
a rack send over the uplink.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import log2, sqrt

from thalweg.declarations import Variant
from thalweg.schedules import Group, Schedule, Topology
from thalweg.schedules.topologies.double_tree import double_tree
from thalweg.schedules.topologies.halving_doubling import halving_doubling
from thalweg.schedules.topologies.hierarchical import hierarchical
from thalweg.schedules.topologies.ring import ring

Build = Callable[[Group, int, int, int], Schedule]


def tuned(group: Group, elements: int, itemsize: int, step: int) -> Schedule:
    costs = _costs(group, elements * itemsize)
    quickest = min(costs, key=lambda build: costs[build])
    return quickest(group, elements, itemsize, step)


def _costs(group: Group, nbytes: int) -> dict[Build, float]:
    """The seconds of each choice; of equal ones the simpler comes first."""
    size, racks = group.size, group.racks
    members, hop = max(map(len, racks)), group.longest_seconds()
    nic = nbytes / group.slowest_nic()  # S/r
    uplink = max((nbytes / rate for _, rate in group.uplinks()), default=0.0)  # S/u
    sent = 2 * (size - 1) / size  # what each member sends at least, in S
    inside = 2 * (members - 1) / members  # the part of it that stays in the rack
    between = 2 * (len(racks) - 1) / len(racks) * uplink
    # If all sizes are powers of two, only the last, small exchanges of halving are between racks.
    is_aligned = all(map(_is_power_of_two, map(len, (racks, *racks))))
    across = between if is_aligned else members * between
    hops = 2 * (size.bit_length() - 1)
    costs: dict[Build, float] = {
        ring: 2 * (size - 1) * hop + sent * max(nic, uplink),
        halving_doubling: hops * hop + inside * nic + max((sent - inside) * nic, across),
        double_tree: (sqrt(2 * log2(size) * hop) + sqrt(2 * max(nic, uplink))) ** 2,
    }
    if not _is_power_of_two(size):
        costs[halving_doubling] += 2 * (hop + nic)
    if len(racks) > 1:
        latency = 4 * max(members - 1, len(racks) - 1) * hop
        costs[_HIERARCHICAL] = latency + max(sent * nic, between)
    return costs


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


_HIERARCHICAL: Build = partial(hierarchical, form="parallel")

TOPOLOGY = Topology(
    name="tuned",
    summary="for each bucket, the quickest of four all-reduces at its size",
    build=tuned,
    variants=(Variant(text="tuned", place=5),),
)
