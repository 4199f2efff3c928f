"""`thalweg advise`: which plan to take on a cluster, and why.

`thalweg simulate` shows the prediction of one plan in depth.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from thalweg.catalog import default_catalog
from thalweg.cli.job_options import JobOptions, WhatIfOptions, job_settings, job_title, situation_of
from thalweg.cli.options import Output, option, progress_bar, with_bundles, working
from thalweg.declarations import Promise, listed, nearest
from thalweg.errors import UsageError
from thalweg.facts import Situation, about
from thalweg.predict import Advice, Estimate, RankedPlan, advisor
from thalweg.predict.plan_detail import BusyLink, PlanDetail, plan_detail
from thalweg.predict.step_simulator import BucketTimes
from thalweg.report.advice import advice_page
from thalweg.report.tables import table_of

PROMISES = [promise.value for promise in Promise]
RANKING_COLUMNS: dict[str, Callable[[RankedPlan], str]] = {
    "plan": lambda ranked: str(ranked.plan),
    ">step time": lambda ranked: about(ranked.estimate.seconds, "s"),
    "80 % interval": lambda ranked: (
        f"{about(ranked.estimate.low, 's')} - {about(ranked.estimate.high, 's')}"
    ),
    ">speed-up\nvs DDP": lambda ranked: f"{ranked.vs_ddp:.2f}",
}
MAX_PRINTED_LINKS = 6
BAR_WIDTH_CHARACTERS = 60
BAR_PART_CHARACTERS = dict(
    zip(("compute", "encode", "decode", "transfer", "waiting"), "█▓▒░·", strict=True)
)
BUCKET_COLUMNS: dict[str, Callable[[tuple[int, BucketTimes]], str]] = {
    ">bucket": lambda row: str(row[0]),
    ">ready": lambda row: about(row[1].handed_in, "s"),
    ">start": lambda row: about(row[1].began, "s"),
    ">end": lambda row: about(row[1].ended, "s"),
    ">took": lambda row: about(row[1].ended - row[1].began, "s"),
}
LINK_COLUMNS: dict[str, Callable[[BusyLink], str]] = {
    "link": lambda busy: str(busy.link),
    ">bytes per step": lambda busy: about(busy.nbytes, "B"),
    ">utilization": lambda busy: f"{busy.share:.0%}",
}


@with_bundles
def advise(
    *,
    asked: JobOptions,
    allow: Annotated[
        str, option("The weakest promise that is acceptable.", "|".join(PROMISES))
    ] = Promise.EXACT.value,
    optimizer: Annotated[
        str | None, option("Like sgd or adamw; by default the usual one for the model.", "NAME")
    ] = None,
    extra_steps: Annotated[
        list[str] | None,
        option(
            "How many more steps such plans need, like lossy=10%, instead of our "
            "measurements; may be given several times.",
            "CLASS=PERCENT",
        ),
    ] = None,
    supposed: WhatIfOptions,
    top: Annotated[int, option("Rows that are printed; JSON has all.", "N", min=1)] = 12,
    why_not: Annotated[
        bool, option("List the plans that are not ranked, and why.", None, "--why-not")
    ] = False,
    html: Annotated[Path | None, option("Write a page with pictures.", "PATH")] = None,
    output: Output,
) -> None:
    """Predict the step time under every sound plan, and recommend one.

    Nothing is run. Step times are means with their 80 % prediction interval. The speed-up is over
    torch's DDP; plans are ranked by step time multiplied by the number of steps that they need.
    `thalweg simulate` shows one plan in depth.
    """
    acceptable, extra = _promise(allow), dict(map(_extra, extra_steps or ()))
    named = None if optimizer is None else advisor.optimizer_named(optimizer)
    situation = situation_of(asked, supposed)
    with progress_bar("Predicting") as show:
        advice = advisor.advise(
            situation,
            allow=acceptable,
            optimizer=named,
            extra_steps=extra,
            sweep=html is not None,
            progress=show,
        )
    output.print(*filter(None, (advice.verdict, advice.hint(), _not_counted(advice))))
    columns = {
        **RANKING_COLUMNS,
        "promise": lambda ranked: ranked.promise.value,
        "why": lambda ranked: ranked.why,
    }
    output.print(table_of(advice.ranking[:top], columns, title=job_title(situation)))
    _print_rest(output, advice, top, why_not)
    if html is not None:
        output.write("Page", html, advice_page(advice))
    output.write_json(
        "advise",
        [row_of(ranked) for ranked in advice.ranking],
        **job_settings(situation, supposed),
        workers=situation.cluster.workers,
        allow=acceptable.value,
        optimizer=advice.optimizer,
        verdict=advice.verdict,
        next_class=None if advice.next_class is None else row_of(advice.next_class),
        assumed=list(advice.assumed),
        left_out=dict(advice.left_out),
    )


def row_of(ranked: RankedPlan) -> dict[str, Any]:
    estimate = ranked.estimate
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
        **asdict(estimate.parts),
    }


def _print_rest(output: Output, advice: Advice, top: int, why_not: bool) -> None:
    more = len(advice.ranking) - top
    if more > 0:
        output.print(f"{more} more: --top {len(advice.ranking)} shows all.")
    if advice.assumed:
        output.print("Assumed: " + "; ".join(advice.assumed) + ".")
    if not advice.left_out:
        return
    if not why_not:
        output.print(f"{len(advice.left_out)} plans are not ranked: --why-not says why.")
        return
    reasons = (f"  {text}: {reason}" for text, reason in advice.left_out.items())
    output.print("Not ranked:", *reasons)


def _not_counted(advice: Advice) -> str:
    """A line on allowed classes whose extra steps were not measured, if no other plan gains
    enough; else empty."""
    known = {ranked.promise for ranked in advice.ranking if ranked.steps is not None}
    classes = sorted(
        {ranked.promise.value for ranked in advice.ranking if ranked.promise not in known}
    )
    if not classes or advice.best.gain >= advisor.MIN_ADVISED_SPEEDUP:
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
    """The promise and the share of extra steps in `lossy=10%` or `lossy=0.1`."""
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


@with_bundles
def simulate(
    *,
    sync: Annotated[list[str], option("A plan; may be given several times.", "PLAN")],
    asked: JobOptions,
    supposed: WhatIfOptions,
    output: Output,
) -> None:
    """Simulate a few steps of a plan on a cluster's links, and show their breakdown: compute,
    codecs, exposed communication, straggler wait; the times of each bucket on the slowest rank; the
    busiest links; and the closed form.

    Nothing is run. Clusters that are too large for a simulation have the closed form alone.
    """
    plans = [default_catalog().plan(text) for text in dict.fromkeys(sync)]
    situation = situation_of(asked, supposed)
    output.print(job_title(situation))
    rows = []
    assumptions = list(situation.assumed)
    for plan in plans:
        with working(f"Simulating {plan}"):
            detail = plan_detail(plan, situation)
        _print_detail(output, detail)
        rows.append(_detail_row(detail, situation))
        assumptions += detail.estimate.assumed  # also of its codec
    assumed = list(dict.fromkeys(assumptions))
    if assumed:
        output.print("\nAssumed: " + "; ".join(assumed) + ".")
    output.write_json("simulate", rows, **job_settings(situation, supposed), assumed=assumed)


def _detail_row(detail: PlanDetail, situation: Situation) -> dict[str, Any]:
    estimate, alone = detail.estimate, detail.alone
    return {
        "sync": str(estimate.plan),
        "workers": situation.cluster.workers,
        "seconds": estimate.seconds,
        "low": estimate.low,
        "high": estimate.high,
        "form": estimate.form,
        **asdict(estimate.parts),
        "closed_form": None if detail.form is None else detail.form.seconds,
        "slowest_rank": detail.rank if detail.passages else None,
        "buckets": [
            {"ready": passage.handed_in, "start": passage.began, "end": passage.ended}
            for passage in detail.passages
        ],
        "links": [
            {"link": str(busy.link), "bytes": busy.nbytes, "utilisation": busy.share}
            for busy in detail.links
        ],
        "exchange": None
        if alone is None
        else {
            "what": alone.what,
            "bytes": alone.nbytes,
            "seconds": alone.seconds,
            "closed_form": alone.form,
        },
    }


def _print_detail(output: Output, detail: PlanDetail) -> None:
    estimate = detail.estimate
    output.print(
        f"\n{estimate.plan}: {about(estimate.seconds, 's')} per step "
        f"({about(estimate.low, 's')} to {about(estimate.high, 's')}), "
        f"{'simulated' if estimate.form == 'replay' else f'by {estimate.form}'}",
        bar_of(estimate),
    )
    if detail.form is not None and detail.form.form != estimate.form:
        ratio = detail.form.seconds / estimate.seconds if estimate.seconds else 1.0
        output.print(
            f"closed form: {about(detail.form.seconds, 's')}, {ratio:.2f} times the simulation"
        )
    if detail.alone is not None:
        alone = detail.alone
        form = "" if alone.form is None else f"; closed form {about(alone.form, 's')}"
        output.print(
            f"{alone.what} of {about(alone.nbytes, 'B')} alone: {about(alone.seconds, 's')}{form}"
        )
    if detail.passages:
        table = table_of(enumerate(detail.passages), BUCKET_COLUMNS)
        output.print(f"buckets on rank {detail.rank}, the slowest, in its last step:", table)
    if detail.links:
        table = table_of(detail.links[:MAX_PRINTED_LINKS], LINK_COLUMNS)
        output.print("busiest links:", table)


def bar_of(estimate: Estimate, width: int = BAR_WIDTH_CHARACTERS) -> str:
    """A bar with characters in proportion to the parts of a step, and its legend."""
    whole = estimate.seconds or 1.0
    parts = asdict(estimate.parts)
    bar, done = "", 0.0
    for name, seconds in parts.items():
        done += seconds
        bar += BAR_PART_CHARACTERS[name] * (round(width * done / whole) - len(bar))
    legend = [
        f"{BAR_PART_CHARACTERS[n]} {n} {about(s, 's')}"
        for n, s in parts.items()
        if s > 1e-6 * whole
    ]
    return f"{bar}\n{'   '.join(legend)}"
