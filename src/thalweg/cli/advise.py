"""`thalweg advise`: which plan to take on a cluster, and why."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from thalweg.cli.job_options import JobOptions, WhatIfOptions, situation_of
from thalweg.cli.options import with_bundles
from thalweg.cli.output import JsonOption, console, progress_bar, write_file, write_json
from thalweg.declarations import Promise, listed, nearest
from thalweg.errors import UsageError
from thalweg.facts import about
from thalweg.predict import Advice, RankedPlan, advise
from thalweg.predict.advisor import MIN_ADVISED_SPEEDUP
from thalweg.predict.extra_steps import optimizer_named
from thalweg.report.tables import table_of

PROMISES = [promise.value for promise in Promise]


@with_bundles
def command(
    *,
    asked: JobOptions,
    allow: Annotated[
        str,
        typer.Option(
            "--allow", metavar="|".join(PROMISES), help="The weakest promise that is acceptable."
        ),
    ] = Promise.EXACT.value,
    optimizer: Annotated[
        str | None,
        typer.Option(
            "--optimizer",
            metavar="NAME",
            help="What trains the model, like sgd or adamw; by default what is usual for it.",
        ),
    ] = None,
    extra_steps: Annotated[
        list[str] | None,
        typer.Option(
            "--extra-steps",
            metavar="CLASS=PERCENT",
            help="How many more steps such plans need, like lossy=10%, if not what we measured; "
            "may be given several times.",
        ),
    ] = None,
    supposed: WhatIfOptions,
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
    named = None if optimizer is None else optimizer_named(optimizer)
    situation = situation_of(asked, supposed)
    with progress_bar("Predicting") as bar:
        advice = advise(
            situation.cluster,
            situation.workload,
            situation.machine,
            allow=acceptable,
            optimizer=named,
            extra_steps=extra,
            sweep=html is not None,
            progress=bar.show,
        )
    terminal = console(json_path)
    for line in filter(None, (advice.verdict, advice.hint(), _not_counted(advice))):
        terminal.print(line, markup=False)
    terminal.print(_table(situation.title, advice.ranking[:top]))
    _say_what_is_left(terminal, advice, top, why_not)
    if html is not None:
        from thalweg.report.advice import advice_page

        write_file(html, advice_page(advice))
        terminal.print(f"Page: {html}", markup=False)
    settings = {
        **situation.settings,
        "workers": situation.cluster.workers,
        "allow": acceptable.value,
        "optimizer": advice.optimizer,
        "verdict": advice.verdict,
        "next_class": None if advice.next_class is None else row_of(advice.next_class),
        "assumed": list(advice.assumed),
        "left_out": dict(advice.left_out),
    }
    write_json(json_path, "advise", settings, [row_of(ranked) for ranked in advice.ranking])


def row_of(ranked: RankedPlan) -> dict[str, Any]:
    estimate, parts = ranked.estimate, ranked.estimate.parts
    return {
        "sync": str(ranked.plan),
        "seconds": estimate.seconds,
        "low": estimate.low,
        "high": estimate.high,
        "vs_ddp": ranked.vs_ddp,
        "exact": ranked.promise is Promise.EXACT,
        "survives": ranked.survives,
        "why": ranked.why,
        "promise": ranked.promise.value,
        "steps": ranked.steps,
        "reliable": ranked.reliable,
        "form": estimate.form,
        "compute": parts.compute,
        "encode": parts.encode,
        "decode": parts.decode,
        "transfer": parts.transfer,
        "waiting": parts.waiting,
    }


def _table(title: str, ranking: tuple[RankedPlan, ...]) -> Table:
    headings = ("sync", ">a step", "four of five", ">vs_ddp", "promise", "why")
    table = table_of(*headings, title=title)
    for ranked in ranking:
        estimate = ranked.estimate
        table.add_row(
            str(ranked.plan),
            about(estimate.seconds, "s"),
            f"{about(estimate.low, 's')} - {about(estimate.high, 's')}",
            f"{ranked.vs_ddp:.2f}",
            ranked.promise.value,
            ranked.why,
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


def _not_counted(advice: Advice) -> str:
    """Classes that are allowed and of which nobody measured the extra steps, if nothing else gains
    enough; or nothing."""
    known = {ranked.promise for ranked in advice.ranking if ranked.steps is not None}
    classes = sorted(
        {ranked.promise.value for ranked in advice.ranking if ranked.promise not in known}
    )
    if not classes or advice.best.gain >= MIN_ADVISED_SPEEDUP:
        return ""
    return (
        f"Not counted: {listed(classes)} plans, whose extra steps weren't measured under "
        f"{advice.optimizer}; give {listed(f'--extra-steps {one}=..%' for one in classes)}."
    )


def _promise(text: str, option: str = "--allow {}", among: list[str] = PROMISES) -> Promise:
    if text not in among:
        exact = text == Promise.EXACT.value
        raise UsageError(
            "exact plans need no extra steps" if exact else f"there is no promise {text!r}",
            f"give {listed([option.format(one) for one in among], 'or')}" + nearest(text, among),
        )
    return Promise(text)


def _extra(text: str) -> tuple[Promise, float]:
    """`lossy=10%`, or `lossy=0.1`."""
    name, equals, amount = text.partition("=")
    try:
        share = float(amount.rstrip("% ")) / (100 if amount.strip().endswith("%") else 1)
    except ValueError:
        share = math.nan
    if not equals or not 0 <= share < math.inf:
        raise UsageError(f"{text!r} says nothing of steps", "write it like lossy=10%")
    promise = _promise(name.strip(), "--extra-steps {}=10%", PROMISES[1:])
    if share > 1 and not amount.strip().endswith("%"):
        raise UsageError(
            f"--extra-steps {text} would be {share:.0%}", f"write {promise.value}={share:g}%"
        )
    return promise, share
