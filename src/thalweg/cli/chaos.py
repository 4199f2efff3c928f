"""`thalweg chaos`: inject faults into training runs, and check that they keep their promises."""

from __future__ import annotations

import os
import shlex
from contextlib import nullcontext
from itertools import count
from operator import itemgetter
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated

from thalweg import lab as labs
from thalweg.catalog import parse_plan
from thalweg.chaos.fault import FAULT_KINDS, LINK_FAULTS, FaultKind
from thalweg.cli.options import (
    Output,
    PlaceOptions,
    lab_of,
    names_among,
    option,
    progress_bar,
    with_bundles,
)
from thalweg.errors import RunError, UsageError
from thalweg.facts import Cluster, Duration, about, counted
from thalweg.redundancy import allocation_of, is_relayed
from thalweg.report.tables import Columns, table_of
from thalweg.schedules import Group

if TYPE_CHECKING:
    from thalweg.chaos.run import ChaosConfig, ChaosResult

MAX_SHOWN_VIOLATIONS = 10
CHAOS_COLUMNS: Columns = {
    "plan": itemgetter("sync"),
    "fault": itemgetter("kind"),
    ">faults": lambda row: str(row["faults"]),
    ">detection time": lambda row: _span(row["detected"]),
    ">stall of the other ranks": lambda row: _span(row["went_on"]),
    ">rejoin time": lambda row: _span(row["back"]),
    ">violations": lambda row: str(row["violations"]),
}


@with_bundles
def chaos(
    *,
    sync: Annotated[
        list[str] | None, option("Synchronisation plan; may be repeated.", "PLAN")
    ] = None,
    place: PlaceOptions,
    faults: Annotated[int, option("Number of faults in a run.", min=0)] = 20,
    seed: Annotated[int, option("Seed of the faults and of the samples.", min=0)] = 1,
    lasting: Annotated[
        str | None,
        option("Repeat runs, each with the next seed.", "DURATION", "--for", "--duration"),
    ] = None,
    kinds: Annotated[
        str | None,
        option(
            "Kinds of faults: kill, restart, pause, store, disk, corrupt, and in a lab cut, "
            "oneway, blackhole, degrade, garble; all possible ones by default.",
            "KIND,...",
        ),
    ] = None,
    hold: Annotated[
        str | None,
        option(
            "Duration of every fault, one after the other; by default durations are random, "
            "and some overlap.",
            "DURATION",
            "--hold",
            "--fault-duration",
        ),
    ] = None,
    bound: Annotated[
        str, option("Longest time to recovery.", "DURATION", "--bound", "--recovery-limit")
    ] = "15s",
    out: Annotated[Path, option("Folder of the histories.", "DIR")] = Path("thalweg-chaos"),
    output: Output,
) -> None:
    """Inject faults into training runs, and check that they keep their promises.

    Faults are drawn from the seed. The job's parameters are known bit for bit after every step, so
    a step or a sample that is lost or counted twice shows. Exit code 1 if a check fails.
    """
    chosen = _kinds(kinds, in_lab=place.lab is not None)
    seconds = None if lasting is None else Duration.parse(lasting).seconds
    within = Duration.parse(bound).seconds
    held = None if hold is None else Duration.parse(hold).seconds
    plans = [parse_plan(plan) for plan in sync or ()]
    place.refuse_if_unclear()
    cluster = (
        Cluster.flat(place.workers or 0) if place.lab is None else place.lab_cluster_of(place.lab)
    )
    for relayed in filter(is_relayed, plans):
        allocation_of(relayed, Group.everybody(cluster))  # raises if the code doesn't fit

    from thalweg.chaos.run import ChaosConfig, fault_rows, kind_rows, run_rows  # imports torch

    configs = (
        ChaosConfig(
            sync=plan, seed=number, faults=faults, kinds=chosen, recovery_limit=within, hold=held
        )
        for number in (count(seed) if seconds is not None else [seed])
        for plan in sync or ["ring"]
    )
    results: list[ChaosResult] = []
    until = None if seconds is None else monotonic() + seconds
    with nullcontext() if place.lab is None else lab_of(cluster) as lab:
        cluster = cluster if lab is None else lab.cluster
        for config in configs:
            results.append(_run(config, cluster, lab, out))
            if until is not None and monotonic() >= until:
                break
        notes = [] if lab is None else lab.notes
    rows = fault_rows(results)
    output.print(table_of(kind_rows(rows), CHAOS_COLUMNS), *map(_summary, results))
    output.write_json(
        "chaos",
        rows,
        workers=cluster.workers,
        lab=place.lab,
        kinds=list(chosen),
        bound_seconds=within,
        hold_seconds=held,
        notes=notes,
        runs=run_rows(results),
    )
    wrong = [result for result in results if result.violations]
    if wrong:
        raise RunError(
            f"{counted(sum(len(o.violations) for o in wrong), 'violation')} in {len(wrong)} of "
            f"{counted(len(results), 'run')}, the first: {wrong[0].violations[0]}",
            f"see {wrong[0].history}; repeat it with "
            f"`thalweg chaos {shlex.join(place.words)} {_options(wrong[0].config)}`",
        )


def _run(config: ChaosConfig, cluster: Cluster, lab: labs.Lab | None, out: Path) -> ChaosResult:
    from thalweg.chaos.run import run_chaos

    lines: list[str] = []
    with progress_bar(f"Fault injection: {config.sync}, seed {config.seed}") as show:
        result = run_chaos(
            config,
            cluster,
            lab,
            out,
            lambda done, note: show(done, config.faults, note),
            lambda rank, stream, line: lines.append(f"[{rank}] {line}\n"),
        )
    result.history.with_name("output.txt").write_text("".join(lines), encoding="utf-8")
    return result


def _kinds(text: str | None, *, in_lab: bool) -> tuple[FaultKind, ...]:
    possible = [kind for kind in FAULT_KINDS if in_lab or kind not in LINK_FAULTS]
    if in_lab and not _can_garble():
        possible.remove("garble")
    if text is None:
        return tuple(possible)
    wanted = names_among(FAULT_KINDS, [text], "--kinds", "fault")
    for word in wanted:
        if word in LINK_FAULTS and not in_lab:
            raise UsageError(f"{word} needs the links of a lab", "give --lab RxH")
        if word not in possible:
            raise UsageError(
                f"{word} needs a kernel with nftables, and encrypted connections",
                "leave it out, or don't set THALWEG_ENCRYPTION",
            )
    return tuple(kind for kind in FAULT_KINDS if kind in wanted)


def _can_garble() -> bool:
    """True if bytes can change in transit, and encryption detects it."""
    from thalweg.lab.addressing import SPINE_ADDRESS
    from thalweg.lab.packet_faults import can_garble
    from thalweg.transports.security import wants_encryption

    return wants_encryption(os.environ, SPINE_ADDRESS) and can_garble()


def _span(figures: tuple[float, float] | None) -> str:
    return "-" if figures is None else " to ".join(f"{value:.2f} s" for value in figures)


def _summary(result: ChaosResult) -> str:
    config, violations = result.config, result.violations
    more = len(violations) - MAX_SHOWN_VIOLATIONS
    return "\n".join(
        [
            f"{config.sync}, seed {config.seed}: {counted(len(result.fault_times), 'fault')} in "
            f"{about(result.seconds, 's')}, {counted(result.steps, 'step')}, "
            f"{counted(result.commits, 'commit')}, {counted(len(violations), 'violation')}",
            *(f"  {violation}" for violation in violations[:MAX_SHOWN_VIOLATIONS]),
            *([f"  and {more} more"] if more > 0 else []),
        ]
    )


def _options(config: ChaosConfig) -> str:
    """The options of `thalweg chaos` that repeat this run."""
    words = ["--sync", config.sync, "--faults", str(config.faults), "--seed", str(config.seed)]
    words += ["--bound", f"{config.recovery_limit:g}s"]
    words += [] if config.hold is None else ["--hold", f"{config.hold:g}s"]
    return shlex.join([*words, "--kinds", ",".join(config.kinds)])
