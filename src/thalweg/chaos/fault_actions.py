"""How faults are brought about: by signals, by the lab's links, by a disk without room."""

from __future__ import annotations

from collections.abc import Callable
from time import time
from typing import TYPE_CHECKING

from thalweg.chaos.disk import Disk
from thalweg.chaos.fault import LINK_FAULTS, Fault
from thalweg.chaos.history import Refused
from thalweg.errors import UsageError
from thalweg.facts import Link, Rate
from thalweg.lab.event import directions
from thalweg.launch.place import WorkerControl

if TYPE_CHECKING:
    from thalweg.lab import Lab


class FaultActions:
    """`lab` is None where workers are side by side on this machine, `disk` if none is hit; `tell`
    is for what was found out from outside."""

    def __init__(self, lab: Lab | None, disk: Disk | None, tell: Callable[[Refused], None]) -> None:
        self._lab = lab
        self._disk = disk
        self._report = tell

    def inject(self, fault: Fault, workers: WorkerControl) -> None:
        if fault.kind in LINK_FAULTS:
            self._inject_links(self._the_lab(fault), fault)
        elif fault.kind in ("disk", "corrupt"):
            self._inject_disk(self._the_disk(fault), fault)
        elif fault.kind == "store":
            workers.kill_store()
        else:
            assert fault.rank is not None
            getattr(workers, fault.kind)(fault.rank)

    def heal(self, fault: Fault, workers: WorkerControl) -> None:
        if fault.kind in LINK_FAULTS:
            self._heal_links(self._the_lab(fault), fault)
        elif fault.kind == "disk":
            self._the_disk(fault).make_room()
        elif fault.kind == "kill" and fault.rank is not None:
            workers.restart(fault.rank)
        elif fault.kind == "pause" and fault.rank is not None:
            workers.resume(fault.rank)

    def _inject_links(self, lab: Lab, fault: Fault) -> None:
        if fault.kind == "blackhole" and fault.rank is not None and fault.peer is not None:
            lab.add_blackhole(fault.rank, fault.peer)
        elif fault.kind == "garble" and fault.rank is not None:
            lab.garble(fault.rank)
        elif fault.kind == "degrade" and fault.rate is not None:
            lab.links.degrade(_links(lab, fault), Rate.parse(fault.rate))
        else:
            lab.links.cut(_links(lab, fault))

    def _heal_links(self, lab: Lab, fault: Fault) -> None:
        if fault.kind == "blackhole" and fault.rank is not None and fault.peer is not None:
            lab.remove_blackhole(fault.rank, fault.peer)
        elif fault.kind == "garble" and fault.rank is not None:
            lab.ungarble(fault.rank)
        else:
            lab.links.restore(_links(lab, fault))

    def _inject_disk(self, disk: Disk, fault: Fault) -> None:
        if fault.kind == "disk":
            disk.fill()
            return
        said = disk.flip()
        if said is not None:
            self._report(Refused(time=time(), fault=fault.number, text=said))

    def _the_lab(self, fault: Fault) -> Lab:
        if self._lab is None:
            raise UsageError(f"{fault} needs links of its own", "give --lab RxH")
        return self._lab

    def _the_disk(self, fault: Fault) -> Disk:
        if self._disk is None:
            raise UsageError(f"{fault} needs a disk of its own", "leave that kind out")
        return self._disk


def _links(lab: Lab, fault: Fault) -> list[Link]:
    return lab.links.of(rack=fault.rack, host=fault.rank, directions=directions(fault.direction))
