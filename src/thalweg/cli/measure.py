"""`thalweg probe` measures the cluster and writes its file; `thalweg calibrate` measures all that
predictions need."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from thalweg.cli.options import (
    ClusterOption,
    PlaceOptions,
    SvgOption,
    TimeoutOption,
    option,
    with_bundles,
)
from thalweg.cli.output import Output, progress_bar, write_file
from thalweg.facts import (
    Duration,
    FittedValue,
    Machine,
    Situation,
    about,
    counted,
    format_situation,
    machine_path,
    read_cluster,
)
from thalweg.plan import TRANSPORT, Choice

PROBE_TIMEOUT_SECONDS = 3600.0  # for all measurements together
CODEC_COLUMNS = ("bucket", "encode", "decode", "gathered")
STEP_COST_NAMES = ("forward", "backward", "optimizer")
RATE_FRACTION_UNIT = "of it"  # in JSON: fraction of a link's rate


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
    from thalweg.bench.run_everywhere import Report, Result, run_everywhere  # imports torch
    from thalweg.probing import ProbeResult, measure, refuse_other_transports
    from thalweg.report.cluster_svg import draw_cluster, outcome_text, tables

    Duration.parse(timeout)  # raises for a malformed one before any worker starts
    refuse_other_transports(transport)
    declared = None if cluster is None else read_cluster(cluster)

    def work(rank: int, report: Report) -> Result:
        result = measure(declared, timeout=timeout, progress=report)
        return result.packed() if rank == 0 else {}

    with place.site(under_launcher=True) as deployment, progress_bar("Probing") as bar:
        packed = run_everywhere(deployment, work, bar.show, timeout=PROBE_TIMEOUT_SECONDS)[0]
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
    from thalweg.bench.compress_costs import all_methods, method_of
    from thalweg.workloads import find_job

    job = find_job(workload)
    methods = all_methods() if compressor is None else [method_of(text) for text in compressor]
    codecs = [Choice.of(method.compressor.name, method.arguments) for method in methods]
    declared = None if cluster is None else read_cluster(cluster)
    with place.site(under_launcher=True) as deployment, progress_bar("Calibrating") as bar:
        known = declared or deployment.cluster
        calibration = calibrate_at(deployment, job, known, codecs, bar.show)
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
        for what in CODEC_COLUMNS
    ]
    costs = [
        _row("cost", what, FittedValue(getattr(situation.workload.costs, what).seconds), "s")
        for what in STEP_COST_NAMES
    ]
    return [*links, *_transport_rows(situation.machine).values(), *codecs, *costs]


def _tables(situation: Situation) -> Iterator[Table]:
    cluster, machine = situation.cluster, situation.machine
    links = Table("link", "out", "in", "straggler delay")
    for host in cluster.hosts:
        late = host.late
        delay = f"{late.probability:.0%}, by {late.delay}" if late.probability else "none"
        links.add_row(host.name, str(host.nic.out), str(host.nic.into), delay)
    for rack in cluster.racks:
        if rack.uplink is not None:
            links.add_row(f"{rack.name}'s uplink", str(rack.uplink.out), str(rack.uplink.into), "")
    yield links
    costs = Table("cost", "value", "relative std. dev.")
    for name, row in _transport_rows(machine).items():
        value, unit = row["value"], row["unit"]
        text = f"{value:.1%}" if unit == RATE_FRACTION_UNIT else about(value, unit)
        costs.add_row(name, text, f"{row['spread']:.0%}")
    for part in STEP_COST_NAMES:
        costs.add_row(f"{part} time", str(getattr(situation.workload.costs, part)), "")
    yield costs
    if machine.codecs:
        per_bucket, *per_element = CODEC_COLUMNS
        codecs = Table("compressor", per_bucket, *(f"{name} per element" for name in per_element))
        for name, cost in machine.codecs.items():
            codecs.add_row(name, *(about(getattr(cost, key).value, "s") for key in CODEC_COLUMNS))
        yield codecs


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
    return {
        "kind": kind,
        "name": name,
        "value": figure.value,
        "spread": figure.spread,
        "unit": unit,
    }
