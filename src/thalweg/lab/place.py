"""A lab as a place for workers: each on its host, the store on the spine."""

from __future__ import annotations

from collections.abc import Mapping

from thalweg.lab.namespaces import enter, settle_in
from thalweg.lab.registry import Record
from thalweg.lab.wiring import HOST_DEVICE, SPINE_ADDRESS, Wiring
from thalweg.runtime.launch import CLUSTER_VARIABLE
from thalweg.runtime.place import Place


class LabPlace(Place):
    def __init__(self, record: Record, wiring: Wiring) -> None:
        self._record = record
        self._wiring = wiring

    @property
    def address(self) -> str:
        return SPINE_ADDRESS

    def enter(self, rank: int | None) -> None:
        wiring = self._wiring
        name = "spine" if rank is None else wiring.cluster.host(rank).name
        enter(wiring.spine if rank is None else wiring.host(name))
        settle_in(name, self._record.hosts_file)

    def environment(self, rank: int) -> Mapping[str, str]:
        ranks = self._wiring.cluster.host(rank).ranks
        return {
            "LOCAL_RANK": str(ranks.index(rank)),
            "LOCAL_WORLD_SIZE": str(len(ranks)),
            "GLOO_SOCKET_IFNAME": HOST_DEVICE,
            CLUSTER_VARIABLE: str(self._record.cluster_file),
            "RES_OPTIONS": "timeout:1 attempts:1",  # no name server is reachable from here
        }

    def called(self, rank: int) -> str:
        return f"rank {rank} on {self._wiring.cluster.host(rank).name}"
