"""`thalweg advise`: which plan to take on a cluster, and why."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from thalweg.cli.output import JsonOption, console, write_file, write_json
from thalweg.cli.place import (
    ClusterOption,
    LabOption,
    LatencyOption,
    NicOption,
    OrderOption,
    UplinkOption,
    WorkersOption,
)
from thalweg.cli.progress import progress_bar
from thalweg.cli.situation import (
    BandwidthOption,
    BatchOption,
    DelayOption,
    FasterOption,
    GpuOption,
    LateOption,
    MachineOption,
    MeasuredOption,
    MembersOption,
    ModelOption,
    NetworkOption,
    asked,
    place_at,
    situation_of,
    what_if_of,
)
from thalweg.declarations import Promise, listed, nearest
from thalweg.errors import UsageError
from thalweg.facts import about
from thalweg.predict import Advice, Advised, advise

PROMISES = [promise.value for promise in Promise]


def command(
    model: ModelOption,
    cluster: ClusterOption = None,
    workers: WorkersOption = None,
    lab: LabOption = None,
    nic: NicOption = None,
    uplink: UplinkOption = None,
    latency: LatencyOption = None,
    rank_order: OrderOption = None,
    network: NetworkOption = None,
    gpu: GpuOption = None,
    batch: BatchOption = None,
    machine: MachineOption = None,
    allow: Annotated[
        str,
        typer.Option(
            "--allow", metavar="|".join(PROMISES), help="The weakest promise that is acceptable."
        ),
    ] = Promise.EXACT.value,
    extra_steps: Annotated[
        list[str] | None,
        typer.Option(
            "--extra-steps",
            metavar="CLASS=PERCENT",
            help="How many more steps such plans need, like lossy=10%; may be given several times.",
        ),
    ] = None,
    measured_only: MeasuredOption = False,
    bandwidth: BandwidthOption = None,
    members: MembersOption = None,
    faster: FasterOption = 1.0,
    late: LateOption = None,
    delay: DelayOption = None,
    top: Annotated[
        int, typer.Option("--top", metavar="N", min=1, help="Rows that are printed; JSON has all.")
    ] = 12,
    why_not: Annotated[
        bool, typer.Option("--why-not", help="List the plans that were left out, and why.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="PATH", help="Write a page with pictures.")
    ] = None,
    json_path: JsonOption = None,
) -> None:
    """Predict what a step would take under every sound plan, and say which to take.

    Nothing is run. Times are means with an interval that holds four times of five. `vs_ddp` is the
    speed-up over torch's DDP; plans are ranked by seconds times the steps that they need.
    `thalweg simulate` shows one plan in depth.
    """
    acceptable, extra = _promise(allow), dict(map(_extra, extra_steps or ()))
    what_if = what_if_of(bandwidth, members, faster, late, delay)
    place = place_at(
        network,
        workers=workers,
        cluster=cluster,
        lab=lab,
        nic=nic,
        uplink=uplink,
        rank_order=rank_order,
        latency=latency,
    )
    situation = situation_of(
        place=place,
        cluster_file=cluster,
        model=model,
        gpu=gpu,
        batch=batch,
        machine=machine,
        what_if=what_if,
        measured_only=measured_only,
    )
    with progress_bar("Predicting") as bar:
        advice = advise(
            situation.cluster,
            situation.workload,
            situation.machine,
            allow=acceptable,
            extra_steps=extra,
            sweep=html is not None,
            progress=bar.show,
        )
    terminal = console(json_path)
    terminal.print(advice.verdict, markup=False)
    terminal.print(_table(situation.heading, advice.ranking[:top]))
    _say_what_is_left(terminal, advice, top, why_not)
    if html is not None:
        from thalweg.report.advice import advice_page

        write_file(html, advice_page(advice))
        terminal.print(f"Page: {html}", markup=False)
    settings = {
        "model": situation.workload.name,
        "bytes": situation.workload.nbytes,
        "workers": situation.cluster.workers,
        "allow": acceptable.value,
        "what_if": asked(what_if),
        "verdict": advice.verdict,
        "assumed": list(advice.assumed),
        "left_out": dict(advice.left_out),
    }
    write_json(json_path, "advise", settings, [row_of(one) for one in advice.ranking])


def row_of(advised: Advised) -> dict[str, Any]:
    estimate, parts = advised.estimate, advised.estimate.parts
    return {
        "sync": str(advised.plan),
        "seconds": estimate.seconds,
        "low": estimate.low,
        "high": estimate.high,
        "vs_ddp": advised.vs_ddp,
        "exact": advised.promise is Promise.EXACT,
        "survives": advised.survives,
        "why": advised.why,
        "promise": advised.promise.value,
        "steps": advised.steps,
        "form": estimate.form,
        "compute": parts.compute,
        "encode": parts.encode,
        "decode": parts.decode,
        "transfer": parts.transfer,
        "waiting": parts.waiting,
    }


def _table(title: str, ranking: tuple[Advised, ...]) -> Table:
    table = Table(title=title, title_justify="left", box=None)
    for heading in ("sync", "a step", "four of five", "vs_ddp", "promise", "why"):
        table.add_column(heading, justify="right" if heading in ("a step", "vs_ddp") else "left")
    for one in ranking:
        estimate = one.estimate
        table.add_row(
            str(one.plan),
            about(estimate.seconds, "s"),
            f"{about(estimate.low, 's')} - {about(estimate.high, 's')}",
            f"{one.vs_ddp:.2f}",
            one.promise.value,
            one.why,
        )
    return table


def _say_what_is_left(terminal: Console, advice: Advice, top: int, why_not: bool) -> None:
    more = len(advice.ranking) - top
    if more > 0:
        terminal.print(f"{more} more: --top {len(advice.ranking)} shows all.")
    if advice.assumed:
        terminal.print("Assumed: " + "; ".join(advice.assumed) + ".", markup=False)
    if not advice.left_out:
        return
    if not why_not:
        number = len(advice.left_out)
        terminal.print(f"{number} plans were left out: --why-not says why.")
        return
    terminal.print("Left out:")
    for text, reason in advice.left_out.items():
        terminal.print(f"  {text}: {reason}", markup=False)


def _promise(text: str) -> Promise:
    if text not in PROMISES:
        raise UsageError(
            f"there is no promise {text!r}",
            f"--allow {listed(PROMISES, 'or')}" + nearest(text, PROMISES),
        )
    return Promise(text)


def _extra(text: str) -> tuple[Promise, float]:
    """`lossy=10%`, or `lossy=0.1`."""
    promise, equals, amount = text.partition("=")
    try:
        share = float(amount.rstrip("% ")) / (100 if amount.strip().endswith("%") else 1)
    except ValueError:
        share = math.nan
    if not equals or not 0 <= share < math.inf:
        raise UsageError(f"{text!r} says nothing of steps", "write it like lossy=10%")
    return _promise(promise.strip()), share
