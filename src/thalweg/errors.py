"""Every error that Thalweg raises on purpose.

    ThalwegError
    ├── UsageError            what was asked for can't be done: exit code 2
    │   ├── UnitError         a size, rate, duration or count that can't be read
    │   ├── PlanError         a plan that can't be read, or names what isn't there
    │   │   └── UnsoundPlan   its parts exist, but don't combine
    │   ├── ClusterError      a cluster file that can't be read or contradicts itself
    │   ├── WorkloadError     the same for a workload
    │   ├── LayoutError       a topology or code that doesn't fit these workers
    │   ├── LaunchError       how this process was started doesn't say who it is
    │   ├── LabError          a lab that can't be had here, or isn't there
    │   └── ScenarioError     a scenario file that can't be read or contradicts itself
    ├── ScheduleError         a schedule that doesn't do what it promises
    ├── TransportError        bytes that didn't come
    │   ├── PeerLate          a peer's message wasn't there by the deadline
    │   ├── PeerLost          a peer's connection is gone
    │   ├── NotTrusted        what says that it is a peer doesn't know this job's secret
    │   ├── Interrupted       broken off, since members meet anew: training goes on
    │   └── TransportClosed   sent or received after close
    └── RunError              a run that can't go on
        ├── Mismatch          ranks hold different plans, models or optimizers
        ├── WorkerFailed      a worker's process ended in an error
        ├── PeerFailed        another rank gave up, and said why
        │   └── StoreLost     the store is gone, which is no rank's fault
        ├── RunIsOver         it comes when the others have ended
        ├── NotFinite         a gradient that has inf or nan in it
        ├── NotFitted         a calibration whose measurements make no sense together
        └── CheckpointError   a checkpoint that can't be written or read

Each says what happened and, after a semicolon, what to do about it.
"""

from __future__ import annotations

from collections.abc import Sequence

DEBUG_VARIABLE = "THALWEG_DEBUG"  # set: tracebacks instead of one line


FIRST_ROUND_BETWEEN_STEPS = 1 << 24  # the number of the first round that belongs to no step


class ThalwegError(Exception):
    """Base of all; `remedy` is the part of the message that says what to do."""

    exit_code = 1

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}; {remedy}")
        self.problem = problem
        self.remedy = remedy


class UsageError(ThalwegError):
    exit_code = 2


class UnitError(UsageError):
    pass


class PlanError(UsageError):
    pass


class UnsoundPlan(PlanError):
    pass


class ClusterError(UsageError):
    pass


class WorkloadError(UsageError):
    pass


class LayoutError(UsageError):
    pass


class LaunchError(UsageError):
    pass


class LabError(UsageError):
    pass


class ScenarioError(UsageError):
    pass


class ScheduleError(ThalwegError):
    pass


class TransportError(ThalwegError):
    pass


class PeerLate(TransportError):
    def __init__(self, *, rank: int, peers: tuple[int, ...], step: int, round_number: int) -> None:
        super().__init__(
            f"rank {rank} waited {_when(step, round_number)} for {ranks_text(peers)}, and nothing "
            "came",
            "look at what it does there, or allow more time with timeout=",
        )
        self.rank = rank
        self.peers = peers
        self.step = step
        self.round_number = round_number


class PeerLost(TransportError):
    """`peer` is the rank that is gone, where one connection tells."""

    def __init__(self, problem: str, remedy: str, *, peer: int | None = None) -> None:
        super().__init__(problem, remedy)
        self.peer = peer


class NotTrusted(TransportError):
    pass


class TransportClosed(TransportError):
    pass


class Interrupted(TransportError):
    """What is exchanged is broken off, since its members are to meet anew."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem, "wait: training goes on with those who are there")


class RunError(ThalwegError):
    pass


class Mismatch(RunError):
    pass


class WorkerFailed(RunError):
    pass


class PeerFailed(RunError):
    pass


class RunIsOver(RunError):
    """For one that comes when the others have ended."""


class StoreLost(PeerFailed):
    """Nobody's fault among the ranks."""


class NotFinite(RunError):
    """`names` are the parameters whose gradient it is."""

    def __init__(self, names: Sequence[str], where: str = "") -> None:
        several = "s" if len(names) > 1 else ""
        listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        super().__init__(
            f"the gradient{several} of {listed} {'have' if several else 'has'} inf or nan{where}",
            "lower the learning rate, clip, or look at the data of that rank; with a GradScaler, "
            'whose first steps overflow, attach(nonfinite="skip")',
        )
        self.names = tuple(names)


class NotFitted(RunError):
    pass


class CheckpointError(RunError):
    pass


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 1, 4, 6`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _when(step: int, round_number: int) -> str:
    between = round_number >= FIRST_ROUND_BETWEEN_STEPS
    return f"before step {step}" if between else f"at step {step}, round {round_number},"
