"""`thalweg probe` measures the cluster and writes its file; `thalweg calibrate` measures all that
predictions need; `thalweg doctor` checks the environment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from thalweg.bench.run_everywhere import Deployment, Report, Result, run_everywhere
from thalweg.catalog import default_catalog
from thalweg.cli.options import (
    ClusterOption,
    Output,
    PlaceOptions,
    SvgOption,
    TimeoutOption,
    option,
    progress_bar,
    with_bundles,
    write_file,
)
from thalweg.doctor.finding import Finding, failed
from thalweg.errors import WorkerFailed
from thalweg.facts import (
    CodecCost,
    Duplex,
    Duration,
    FittedValue,
    Machine,
    Situation,
    StragglerDelay,
    about,
    counted,
    format_situation,
    machine_path,
    read_cluster,
)
from thalweg.plan import TRANSPORT
from thalweg.report.tables import table_of

if TYPE_CHECKING:
    from thalweg.doctor.run_checks import Diagnosis

PROBE_TIMEOUT_SECONDS = 3600.0  # for all measurements together
CODEC_COST_NAMES = ("bucket", "encode", "decode", "gathered")
STEP_COST_NAMES = ("forward", "backward", "optimizer")
RATE_FRACTION_UNIT = "of it"  # in JSON: fraction of a link's rate
LINK_COLUMNS: dict[str, Callable[[tuple[str, Duplex, str]], str]] = {
    "link": itemgetter(0),
    "out": lambda row: str(row[1].out),
    "in": lambda row: str(row[1].into),
    "straggler delay": itemgetter(2),
}
COST_COLUMNS: dict[str, Callable[[tuple[str, str, str]], str]] = {
    "cost": itemgetter(0),
    "value": itemgetter(1),
    "relative std. dev.": itemgetter(2),
}
CODEC_COLUMNS: dict[str, Callable[[tuple[str, CodecCost]], str]] = {
    "compressor": itemgetter(0),
    "bucket": lambda row: about(row[1].bucket.value, "s"),
    "encode per element": lambda row: about(row[1].encode.value, "s"),
    "decode per element": lambda row: about(row[1].decode.value, "s"),
    "gathered per element": lambda row: about(row[1].gathered.value, "s"),
}
VERDICT_STYLES = {"fail": "bold red", "warn": "yellow", "ok": "green"}
DOCTOR_TIMEOUT_SECONDS = 600.0  # for all checks together


@with_bundles
def probe(
    *,
    place: PlaceOptions,
    cluster: ClusterOption = None,
    transport: Annotated[str, typer.Option(hidden=True)] = TRANSPORT,
    out: Annotated[
        Path, option("The cluster file; the picture is beside it by default.", "FILE")
    ] = Path("cluster.toml"),
    svg: SvgOption = None,
    timeout: TimeoutOption = "30s",
    output: Output,
) -> None:
    """Measure latency, racks, NICs and uplinks between workers, and write the cluster file.

    In a lab, on local workers, or as one of torchrun's workers. Racks that --cluster declares are
    kept, and measurements that contradict them are reported.
    """
    from thalweg.probing import ProbeResult, measure, refuse_other_transports  # imports torch
    from thalweg.report.cluster_svg import draw_cluster, outcome_text, tables

    Duration.parse(timeout)  # raises for a malformed one before any worker starts
    refuse_other_transports(transport)
    declared = None if cluster is None else read_cluster(cluster)

    def work(rank: int, report: Report) -> Result:
        result = measure(declared, timeout=timeout, progress=report)
        return result.packed() if rank == 0 else {}

    with place.site(under_launcher=True) as deployment, progress_bar("Probing") as show:
        packed = run_everywhere(deployment, work, show, timeout=PROBE_TIMEOUT_SECONDS)[0]
    if not packed:
        return  # rank 0 reports
    probed = ProbeResult.unpacked(packed)
    picture = svg or out.with_suffix(".svg")
    write_file(out, probed.file())
    write_file(picture, draw_cluster(probed))
    output.print(*tables(probed))
    output.print(outcome_text(probed, out, picture), soft_wrap=True)
    output.write_json(
        "probe",
        probed.rows(),
        workers=probed.cluster.workers,
        transport=probed.transport,
        **place.settings,
        declared=None if cluster is None else str(cluster),
        file=str(out),
        picture=str(picture),
        confidence={"racks": probed.sureness, "reason": probed.reason},
        outliers=list(probed.outliers),
        contradictions=list(probed.contradictions),
        notes=[*probed.notes, *deployment.notes],
        probes=probed.measurements,
        seconds=probed.seconds,
    )


@with_bundles
def calibrate(
    *,
    workload: Annotated[
        str,
        option(
            "Job whose steps are profiled: digits, synthetic(params=2.5M), or a .py file.",
            "WORKLOAD",
        ),
    ],
    place: PlaceOptions,
    cluster: ClusterOption = None,
    compressor: Annotated[
        list[str] | None, option("Only these, like powersgd(rank=4); all if absent.", "NAME")
    ] = None,
    out: Annotated[Path, option("Folder of the files.", "DIR")] = Path(),
    output: Output,
) -> None:
    """Measure links, messages, compressors and a job's steps with all workers, in seconds.

    In a lab, on local workers, or as one of torchrun's workers. Writes cluster.toml,
    cluster.machine.toml and the workload's file. Racks that --cluster declares are kept, and so are
    those of a lab.
    """
    from thalweg.bench.calibrate_job import calibrate_at  # torch takes a second
    from thalweg.bench.compress_costs import method_of
    from thalweg.workloads import find_job

    job = find_job(workload)
    codecs = [method_of(text) for text in compressor or default_catalog().compressors]
    declared = None if cluster is None else read_cluster(cluster)
    with place.site(under_launcher=True) as deployment, progress_bar("Calibrating") as show:
        known = declared or deployment.cluster
        calibration = calibrate_at(deployment, job, known, codecs, show)
    if calibration is None:
        return  # rank 0 reports
    situation, seconds = calibration.situation, calibration.seconds
    file = out / "cluster.toml"
    files = {
        "cluster": file,
        "machine": machine_path(file),
        "workload": out / f"{situation.workload.name}.toml",
    }
    texts = format_situation(situation, [f"Calibrated in {seconds:.0f} s."])
    for fact, path in files.items():
        write_file(path, texts[fact])
    output.print(*_tables(situation))
    output.print(
        f"Wrote {', '.join(str(path) for path in files.values())}, after {seconds:.0f} s.",
        soft_wrap=True,
    )
    output.write_json(
        "calibrate",
        _rows(situation),
        workload=workload,
        workers=situation.cluster.workers,
        **place.settings,
        declared=None if cluster is None else str(cluster),
        files=[str(path) for path in files.values()],
        spread=calibration.spread,
        seconds=seconds,
        notes=deployment.notes,
    )


def _rows(situation: Situation) -> list[dict[str, Any]]:
    """A row for each value, with its relative standard deviation as `spread`, where there is one.
    The kind "road" stands for transport costs."""
    links = [
        _row("link", str(link), FittedValue(rate.bits_per_second), "bit/s")
        for link, rate in situation.cluster.rates().items()
    ]
    codecs = [
        _row("codec", f"{name}: {what}", getattr(cost, what), "s")
        for name, cost in situation.machine.codecs.items()
        for what in CODEC_COST_NAMES
    ]
    costs = [
        _row("cost", what, FittedValue(getattr(situation.workload.costs, what).seconds), "s")
        for what in STEP_COST_NAMES
    ]
    return [*links, *_transport_rows(situation.machine).values(), *codecs, *costs]


def _tables(situation: Situation) -> Iterator[Table]:
    cluster, costs = situation.cluster, situation.workload.costs
    nics = [(host.name, host.nic, _delay_text(host.late)) for host in cluster.hosts]
    uplinks = [
        (f"{rack.name}'s uplink", rack.uplink, "")
        for rack in cluster.racks
        if rack.uplink is not None
    ]
    yield table_of([*nics, *uplinks], LINK_COLUMNS)
    measured = [
        (name, _cost_text(row["value"], row["unit"]), f"{row['spread']:.0%}")
        for name, row in _transport_rows(situation.machine).items()
    ]
    profiled = [(f"{part} time", str(getattr(costs, part)), "") for part in STEP_COST_NAMES]
    yield table_of([*measured, *profiled], COST_COLUMNS)
    if situation.machine.codecs:
        yield table_of(situation.machine.codecs.items(), CODEC_COLUMNS)


def _delay_text(late: StragglerDelay) -> str:
    return f"{late.probability:.0%}, by {late.delay}" if late.probability else "none"


def _cost_text(value: float, unit: str) -> str:
    return f"{value:.1%}" if unit == RATE_FRACTION_UNIT else about(value, unit)


def _transport_rows(machine: Machine) -> dict[str, dict[str, Any]]:
    """The JSON row of each transport cost, by the name of the cost in the table."""
    rows = {}
    for transport, name, costs in (
        ("Thalweg transport", "ours", machine.ours),
        ("backend", "the backend", machine.native),
    ):
        rows[f"{transport}: per message"] = _row("road", f"{name}: a message", costs.message, "s")
        rows[f"{transport}: per byte"] = _row("road", f"{name}: a byte", costs.byte, "s")
        for flows, fraction in costs.crowding:
            case = f"{counted(flows, 'flow')} on a link"
            rows[f"{transport}: {case}"] = _row(
                "road", f"{name}: {case}", fraction, RATE_FRACTION_UNIT
            )
    burst = _row("road", "a link, at once after a rest", FittedValue(machine.burst), "B")
    return {**rows, "link burst size": burst}


def _row(kind: str, name: str, figure: FittedValue, unit: str) -> dict[str, Any]:
    return {"kind": kind, "name": name, **asdict(figure), "unit": unit}


@with_bundles
def doctor(
    *,
    place: PlaceOptions,
    paste: Annotated[
        bool, option("A block to paste into an issue; no secrets in it.", None, "--paste")
    ] = False,
    timeout: TimeoutOption = "30s",
    output: Output,
) -> int:
    """Check what can break or slow down training: interfaces, names, reachability and bandwidth
    between ranks, clocks, versions, limits.

    It runs alone on this host; with --workers or --lab; or started like your training, as one of
    torchrun's or srun's workers. Exit code 1 if a check fails.
    """
    from thalweg.doctor.environment import paste as environment_lines

    diagnosis, deployment = _diagnosis(place, Duration.parse(timeout).seconds)
    if diagnosis is None:
        return 0  # rank 0 reports, and its exit code counts
    if paste:
        block = paste_text(environment_lines(diagnosis.environment), diagnosis.findings)
        output.print(block, soft_wrap=True)
    else:
        output.print(table(diagnosis.findings, deployment.text), outcome_text(diagnosis.findings))
    output.write_json(
        "doctor",
        [finding.row() for finding in diagnosis.findings],
        workers=diagnosis.workers,
        **place.settings,
        environment=dict(diagnosis.environment),
        notes=deployment.notes,
    )
    return 1 if failed(diagnosis.findings) else 0


def _diagnosis(place: PlaceOptions, seconds: float) -> tuple[Diagnosis | None, Deployment]:
    """The diagnosis, and where it was made; no diagnosis if another launched rank reports it."""
    from thalweg.doctor.run_checks import Diagnosis, examine

    def work(rank: int, report: Report) -> Result:
        diagnosis = examine(seconds, report)
        # rank 0, or a rank that can't reach it, has reports
        return diagnosis.packed() if diagnosis.reports else {}

    unplaced = place == PlaceOptions()
    where = (
        nullcontext(Deployment.of_this_process()) if unplaced else place.site(under_launcher=True)
    )
    with where as deployment, progress_bar("Looking") as show:
        results = run_everywhere(
            deployment, work, show, timeout=DOCTOR_TIMEOUT_SECONDS, survives=True
        )
    for result in filter(None, results):
        return Diagnosis.unpacked(result), deployment
    if deployment.launcher is None:
        raise WorkerFailed("no worker returned a diagnosis", "see the workers' output above")
    return None, deployment


def table(findings: Sequence[Finding], where: str) -> Table:
    columns: dict[str, Callable[[Finding], RenderableType]] = {
        "": lambda finding: Text(finding.verdict, style=VERDICT_STYLES[finding.verdict]),
        "check": lambda finding: finding.check,
        "finding and remedy": _finding_text,
    }
    return table_of(findings, columns, title=where)


def _finding_text(finding: Finding) -> Text:
    """The finding, with its remedy on the next line."""
    return Text.assemble(finding.text, (f"\n-> {finding.remedy}" if finding.remedy else "", "bold"))


def outcome_text(findings: Sequence[Finding]) -> str:
    number = Counter[str](finding.verdict for finding in findings)
    if not number["fail"] and not number["warn"]:
        return f"All {number['ok']} checks are ok."
    parts = [
        f"{number[verdict]} {words}"
        for verdict, words in (("fail", "failed"), ("warn", "warnings"), ("ok", "ok"))
        if number[verdict]
    ]
    return ", ".join(parts) + "."


def paste_text(environment: Sequence[str], findings: Sequence[Finding]) -> str:
    """The environment and the findings, between two lines that mark what to copy."""
    bad = [f"- {found.verdict} {found.line}" for found in findings if found.verdict != "ok"]
    fine = [finding.check for finding in findings if finding.verdict == "ok"]
    lines = [
        "----- copy from here -----",
        *environment,
        "",
        *bad,
        f"- ok: {', '.join(fine)}",
        "----- to here -----",
    ]
    return "\n".join(lines)
