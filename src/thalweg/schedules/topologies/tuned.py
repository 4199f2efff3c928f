"""The all-reduce that suits a bucket's size, chosen as MPI libraries do (Thakur, Rabenseifner and
Gropp, 2005; the component `tuned` of Open MPI).

A small message costs its hops, a large one its bytes. With a seconds for a hop, S bytes, N members,
R racks of n, NICs of r bytes a second and uplinks of u, a choice takes about

    ring                2(N-1) a + 2(N-1)/N max(S/r, S/u)
    halving_doubling    2 log2 N a + 2(n-1)/n S/r + 2(R-1)/R max(S/nr, S/u)
    double_tree         (sqrt(2 log2 N a) + sqrt(2 max(S/r, S/u)))^2, in the best number of pieces
    hierarchical        4 max(n-1, R-1) a + max(2(N-1)/N S/r, 2(R-1)/R S/u)

and the quickest is built. If N is no power of two, halving and doubling takes two more hops and S/r
twice more; if R or an n isn't, all members of a rack cross its uplink with what one of them would.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import log2, sqrt

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
    """Seconds of each choice; the simpler one comes first, for where they are equal."""
    size, racks = group.size, group.racks
    members, hop = max(map(len, racks)), group.longest_seconds()
    nic = nbytes / group.slowest_nic()
    uplink = max((nbytes / rate for _, rate in group.uplinks()), default=0.0)
    each = 2 * (size - 1) / size  # of the data that a member sends, at least
    inside = 2 * (members - 1) / members
    between = 2 * (len(racks) - 1) / len(racks) * uplink
    # Then only the last exchanges of halves are between racks.
    is_aligned = all(map(_is_power_of_two, map(len, (racks, *racks))))
    across = between if is_aligned else members * between
    hops = 2 * (size.bit_length() - 1)
    costs: dict[Build, float] = {
        ring: 2 * (size - 1) * hop + each * max(nic, uplink),
        halving_doubling: hops * hop + inside * nic + max((each - inside) * nic, across),
        double_tree: (sqrt(2 * log2(size) * hop) + sqrt(2 * max(nic, uplink))) ** 2,
    }
    if not _is_power_of_two(size):
        costs[halving_doubling] += 2 * (hop + nic)
    if len(racks) > 1:
        waits = 4 * max(members - 1, len(racks) - 1) * hop
        costs[_IN_RACKS] = waits + max(each * nic, between)
    return costs


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


_IN_RACKS: Build = partial(hierarchical, form="parallel")

TOPOLOGY = Topology(
    name="tuned",
    summary="for each bucket, the quickest of four all-reduces at its size",
    build=tuned,
)
