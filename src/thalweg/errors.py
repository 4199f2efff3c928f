"""All errors that Thalweg raises deliberately.

    ThalwegError
    ├── UsageError            an invalid request of the user: exit code 2
    │   ├── UnitError         a size, rate, duration or count that can't be parsed
    │   ├── PlanError         a plan that can't be parsed, or names an unknown part
    │   │   └── UnsoundPlan   a plan whose parts exist, but don't combine
    │   ├── ClusterError      a cluster file that can't be read or contradicts itself
    │   ├── WorkloadError     a workload file that can't be read or contradicts itself
    │   ├── LayoutError       a topology or code that doesn't fit these workers
    │   ├── LaunchError       launcher variables without a valid rank, size and store
    │   ├── LabError          a lab that doesn't exist or can't be created on this machine
    │   └── ScenarioError     a scenario file that can't be read or contradicts itself
    ├── ScheduleError         a schedule that violates its postcondition
    ├── TransportError        a message that couldn't be sent or received
    │   ├── PeerLate          a peer's message didn't arrive by the deadline
    │   ├── PeerLost          the connection to a peer is lost
    │   ├── NotTrusted        a process that claims to be a peer doesn't know this job's secret
    │   ├── Interrupted       an exchange interrupted by a rendezvous: training continues
    │   └── TransportClosed   a send or receive after close
    └── RunError              a run that can't continue
        ├── Mismatch          ranks with different plans, models or optimizers
        ├── WorkerFailed      a worker process that ended with an error
        ├── PeerFailed        another rank failed and published the cause
        │   └── StoreLost     the store is lost, which is no rank's fault
        ├── RunIsOver         a rank that joins after the others have finished
        ├── NotFinite         a gradient with inf or nan
        ├── NotFitted         a calibration whose measurements are inconsistent
        └── CheckpointError   a checkpoint that can't be written or read

Each message has two parts, separated by a semicolon: what happened, and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence

INTERRUPTED_EXIT_CODE = 130  # of a process that Ctrl-C ended, as in a shell
DEBUG_VARIABLE = "THALWEG_DEBUG"  # if set, commands print tracebacks instead of one line
FIRST_ROUND_BETWEEN_STEPS = 1 << 24  # number of the first round that belongs to no step


class ThalwegError(Exception):
    """The base class; `problem` and `remedy` are the two parts of the message."""

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
            f"rank {rank} timed out waiting for {ranks_text(peers)} ({_when(step, round_number)})",
            f"look at the output of {ranks_text(peers)}, or allow more time with timeout=",
        )
        self.rank = rank
        self.peers = peers
        self.step = step
        self.round_number = round_number


class PeerLost(TransportError):
    """A lost connection; `peer` is the rank at its other end, if it is known."""

    def __init__(self, problem: str, remedy: str, *, peer: int | None = None) -> None:
        super().__init__(problem, remedy)
        self.peer = peer


class NotTrusted(TransportError):
    pass


class TransportClosed(TransportError):
    pass


class Interrupted(TransportError):
    """An exchange that a rendezvous of the members interrupts."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem, "wait: training continues with the ranks that are there")


class RunError(ThalwegError):
    pass


class Mismatch(RunError):
    pass


class WorkerFailed(RunError):
    pass


class PeerFailed(RunError):
    pass


class RunIsOver(RunError):
    pass


class StoreLost(PeerFailed):
    pass


class NotFinite(RunError):
    """A gradient with inf or nan; `names` are its parameters."""

    def __init__(self, names: Sequence[str], where: str = "") -> None:
        several = "s" if len(names) > 1 else ""
        listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        super().__init__(
            f"the gradient{several} of {listed} {'have' if several else 'has'} inf or nan{where}",
            "lower the learning rate, clip, or look at the data of that rank; with a GradScaler, "
            'whose first steps overflow, use attach(nonfinite="skip")',
        )
        self.names = tuple(names)


class NotFitted(RunError):
    pass


class CheckpointError(RunError):
    pass


def ranks_text(ranks: Sequence[int]) -> str:
    """The ranks for a message, as `rank 3` or `ranks 1, 4, 6`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _when(step: int, round_number: int) -> str:
    between = round_number >= FIRST_ROUND_BETWEEN_STEPS
    return f"before step {step}" if between else f"step {step}, round {round_number}"
