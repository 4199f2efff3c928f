"""An advice as an HTML page: the recommended plan, the predicted step time of every plan, and the
reasons.

An interval is a whisker; all whiskers of a table have one scale, drawn in the table's head. Of the
step times against the rate of the links, both on logarithmic axes, each plan is a curve. The rates
at which two plans have the same step time, the *crossovers*, are numbered, and listed beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from xml.etree import ElementTree as ET

from thalweg.declarations import Promise, listed
from thalweg.facts import about, counted, slowest_nic
from thalweg.predict.estimate import Advice, Estimate, Outcome, RankedPlan, Sweep
from thalweg.report.chart import (
    LineChart,
    Mark,
    Scale,
    add_chart,
    add_curve_legend,
    add_numbered,
    scale_of,
)
from thalweg.report.cluster_svg import add_cluster, cluster_text
from thalweg.report.page import (
    Cell,
    add_bar,
    add_legend,
    bullets,
    classed,
    details,
    draw_bar,
    figures,
    page,
    parts_text,
    picture,
    plan_cell,
    plan_text,
    prose,
    section,
    table,
    written,
)
from thalweg.report.shapes import add, dot, line, words

MAX_RANKING_ROWS = 25  # shown at once
MAX_ADVICE_BARS = 10
BASELINE = "ddp"
WHISKER, TALL, MARGIN, BAR = 190, 20, 24, 18
TICKS = 3
PARTS = {
    "compute": "compute",
    "encode": "encode",
    "decode": "decode",
    "transfer": "exposed communication",
    "waiting": "straggler wait",
}
MAX_SWEEP_CURVES = 6  # that can be distinguished


def advice_page(advice: Advice, outcomes: Sequence[Outcome] = ()) -> str:
    """A complete HTML document without references to other files."""
    cluster, workload = advice.situation.cluster, advice.situation.workload
    promises = [promise.value for promise in Promise]
    allowed = listed(promises[: promises.index(advice.allow.value) + 1])
    size = about(workload.nbytes, "B")
    root, main = page(
        f"Thalweg advice: {workload.name} on {counted(cluster.workers, 'worker')}",
        f"Plan advice for {workload.name}",
        f"{size} of gradients per step, {cluster_text(cluster)}; allowed: {allowed}.",
    )
    prose(main, advice.verdict, str(advice.best.plan), "verdict")
    _add_hero(main, advice.best)
    _add_ranking(main, advice.ranking)
    _add_breakdown(main, advice.ranking)
    if advice.sweep is not None and advice.sweep.seconds and len(advice.sweep.rates) > 1:
        lead = "The rates of all links multiplied by the same factor; lower is faster."
        add_sweep(section(main, "Time against bandwidth", lead), advice, advice.sweep)
    add_cluster(section(main, "The cluster", f"{cluster_text(cluster)}."), cluster)
    if outcomes:
        _add_outcomes(main, outcomes)
    _add_assumed(main, advice)
    _add_not_ranked(main, advice)
    _add_use(main, str(advice.best.plan))
    return written(root, main)


def _add_hero(main: ET.Element, best: RankedPlan) -> None:
    hero = section(main, "Best plan", name="hero")
    plan_text(hero, str(best.plan))
    speed = (times(best.vs_ddp), f"the speed of {BASELINE}, per step")
    same = (BASELINE, "itself: no faster plan was found")
    entries = [
        (about(best.estimate.seconds, "s"), "predicted step time"),
        same if str(best.plan) == BASELINE else speed,
        (between(best.estimate.low, best.estimate.high), "80 % interval"),
    ]
    figures(hero, entries)
    add(hero, "p", best.why)


def _add_ranking(main: ET.Element, ranking: Sequence[RankedPlan]) -> None:
    lead = "Best first. The dot is the predicted mean step time; the whisker is its 80 % interval."
    if any(ranked.steps not in (None, 1) for ranked in ranking):
        lead += f" Ranked by step time multiplied by the steps needed for one of {BASELINE}'s."
    parent = section(main, "Ranking", lead)
    shown, rest = ranking[:MAX_RANKING_ROWS], ranking[MAX_RANKING_ROWS:]
    _add_rows(parent, "Ranking", shown, first=1)[0].set("class", "best")
    if rest:
        label = counted(len(rest), "more plan")
        _add_rows(details(parent, label), label, rest, first=MAX_RANKING_ROWS + 1)


def _add_rows(
    parent: ET.Element, label: str, ranking: Sequence[RankedPlan], *, first: int
) -> ET.Element:
    estimates = [ranked.estimate for ranked in ranking]
    scale = whisker_scale(
        [value for estimate in estimates for value in (estimate.low, estimate.high)]
    )
    numbers = {id(ranked): number for number, ranked in enumerate(ranking, start=first)}
    columns: dict[str, Callable[[RankedPlan], Cell]] = {
        ">#": lambda row: str(numbers[id(row)]),
        "plan": lambda row: partial(_fill_plan, row),
        ">step time": lambda row: partial(
            _fill_interval, row.estimate.seconds, row.estimate.low, row.estimate.high
        ),
        "": lambda row: partial(
            _fill_whisker, scale, row.estimate.seconds, row.estimate.low, row.estimate.high, None
        ),
        f">speed-up vs {BASELINE}": lambda row: times(row.vs_ddp),
        "promise": lambda row: lambda cell: add(cell, "span", row.promise.value, "pill"),
        "survives": lambda row: classed(row.survives, "short"),
        "why": lambda row: classed(row.why, "words"),
    }
    headings, body = table(parent, label, ranking, columns)
    draw_ruler(headings[3], scale)
    return body


def _fill_plan(ranked: RankedPlan, cell: ET.Element) -> None:
    plan_text(cell, str(ranked.plan))
    if ranked.steps not in (None, 1):
        add(cell, "span", f"needs {ranked.steps:.3g} times the steps", "note")


def _fill_interval(seconds: float, low: float, high: float, cell: ET.Element) -> None:
    cell.text = about(seconds, "s")
    add(cell, "span", between(low, high), "interval")


def _add_breakdown(main: ET.Element, ranking: Sequence[RankedPlan]) -> None:
    shown = list(ranking[:MAX_ADVICE_BARS])
    shown += [ranked for ranked in ranking[MAX_ADVICE_BARS:] if str(ranked.plan) == BASELINE]
    estimates = [ranked.estimate for ranked in shown]
    parent = section(main, "Step time breakdown", "Parts of a step, one after the other.")
    used = [
        name for name in PARTS if any(getattr(estimate.parts, name) > 0 for estimate in estimates)
    ]
    add_legend(parent, [(name, PARTS[name], 14) for name in used])
    bars = add(parent, "div", name="bars")
    longest = max(estimate.seconds for estimate in estimates) or 1.0
    for estimate in estimates:
        row, label = add_bar(bars, estimate.seconds)
        plan_text(label, str(estimate.plan))
        parts = {name: float(getattr(estimate.parts, name)) for name in PARTS}
        draw_bar(row, f"{estimate.plan}: {parts_text(parts)}", parts.items(), longest, BAR)
    columns: dict[str, Callable[[Estimate], Cell]] = {
        "plan": lambda estimate: plan_cell(str(estimate.plan)),
        **{f">{name}": partial(_part, name) for name in PARTS},
        ">total": lambda estimate: about(estimate.seconds, "s"),
    }
    table(details(parent, "As a table"), "Parts of a step", estimates, columns)


def _part(name: str, estimate: Estimate) -> str:
    value = float(getattr(estimate.parts, name))
    return about(value, "s") if value else "-"


def _add_outcomes(main: ET.Element, outcomes: Sequence[Outcome]) -> None:
    covered = sum(outcome.covered for outcome in outcomes)
    lead = (
        "The dot with its whisker is the prediction, the diamond is the step time of a run: "
        f"{covered} of {len(outcomes)} within their interval."
    )
    parent = section(main, "Predicted and measured step times", lead)
    scale = whisker_scale(
        [value for each in outcomes for value in (each.measured or 0.0, each.low, each.high)]
    )
    columns: dict[str, Callable[[Outcome], Cell]] = {
        "plan": lambda row: plan_cell(row.sync),
        ">predicted": lambda row: partial(_fill_interval, row.predicted, row.low, row.high),
        "": lambda row: partial(
            _fill_whisker, scale, row.predicted, row.low, row.high, row.measured
        ),
        ">measured": lambda row: about(row.measured or 0.0, "s"),
        ">prediction error": lambda row: f"{row.error:+.0%}",
        "within the interval": lambda row: "yes" if row.covered else "no",
    }
    headings, _ = table(parent, "Predicted and measured step times", outcomes, columns)
    draw_ruler(headings[2], scale)


def _add_assumed(main: ET.Element, advice: Advice) -> None:
    whole = [*advice.assumed, *advice.situation.assumed]
    texts = dict.fromkeys([*whole, *advice.best.estimate.assumed])
    parent = section(main, "Assumptions")
    if texts:
        bullets(parent, texts)
    else:
        add(parent, "p", "None: all values were measured or declared.")


def _add_not_ranked(main: ET.Element, advice: Advice) -> None:
    if advice.left_out:
        label = counted(len(advice.left_out), "plan")
        inside = details(section(main, "Plans not ranked"), f"{label}, with reasons")
        columns: dict[str, Callable[[tuple[str, str]], Cell]] = {
            "plan": lambda row: plan_cell(row[0]),
            "why": lambda row: classed(row[1], "words"),
        }
        table(inside, "Plans not ranked", advice.left_out.items(), columns)


def _add_use(main: ET.Element, sync: str) -> None:
    parent = section(main, "Use it")
    code = add(add(parent, "pre"), "code", 'run = thalweg.attach(model, optimizer, plan="')
    add(code, "span", sync, "plan").tail = '")'


def times(factor: float) -> str:
    """A speed-up like `1.83x`."""
    return f"{factor:.2f}x" if 0.1 <= factor < 10 else f"{factor:.3g}x"


def between(low: float, high: float) -> str:
    """An interval like `80.1 to 91.5 ms`, with one unit if both ends have it."""
    first, last = about(low, "s"), about(high, "s")
    number, unit = first.split()
    return f"{number} to {last}" if last.endswith(f" {unit}") else f"{first} to {last}"


def whisker_scale(values: Sequence[float]) -> Scale:
    return scale_of(values, start=MARGIN, stop=WHISKER - MARGIN)


def draw_ruler(heading: ET.Element, scale: Scale) -> None:
    """Draw the scale of the whiskers below into the heading of their column."""
    heading.set("class", "whisker")
    kind = ", logarithmic" if scale.logarithmic else ""
    drawn = picture(heading, WHISKER, TALL, f"Scale of the whiskers{kind}")
    for value in scale.ticks(TICKS):
        x = scale.at(value)
        line(drawn, x, TALL - 4, x, TALL, "grid")
        words(drawn, round(x), TALL - 8, about(value, "s"), "faint middle")


def _fill_whisker(
    scale: Scale, mean: float, low: float, high: float, measured: float | None, cell: ET.Element
) -> None:
    """Draw a dot at the prediction, a line over its interval, and below them a diamond at the
    measurement."""
    title = f"{about(mean, 's')}, from {about(low, 's')} to {about(high, 's')}"
    if measured is not None:
        title = f"predicted {title}; measured {about(measured, 's')}"
    height, middle = TALL if measured is None else TALL + 14, TALL // 2
    cell.set("class", "whisker")
    drawn = picture(cell, WHISKER, height, title)
    for value in scale.ticks(TICKS):
        line(drawn, scale.at(value), 0, scale.at(value), height, "grid")
    line(drawn, scale.at(low), middle, scale.at(high), middle, "reach")
    for end in (low, high):
        line(drawn, scale.at(end), middle - 5, scale.at(end), middle + 5, "cap")
    dot(drawn, scale.at(mean), middle, 3, "mean")
    if measured is not None:
        diamond = f"M{scale.at(measured)},{middle + 9} l5,6 l-5,6 l-5,-6 z"
        add(drawn, "path", name="measured", d=diamond)


def drawn_plans(advice: Advice, sweep: Sweep) -> list[str]:
    """The texts of the plans to draw: the best one, `ddp`, plans whose curves cross, and plans that
    are the fastest at some rate."""
    fastest = (
        min(sweep.seconds, key=lambda plan: sweep.seconds[plan][i]) for i in range(len(sweep.rates))
    )
    crossing = chain.from_iterable((c.slower_links, c.faster_links) for c in sweep.breaks)
    wanted = dict.fromkeys([str(advice.best.plan), "ddp", *crossing, *fastest])
    return [plan for plan in wanted if plan in sweep.seconds][:MAX_SWEEP_CURVES]


def add_sweep(parent: ET.Element, advice: Advice, sweep: Sweep) -> None:
    plans = drawn_plans(advice, sweep)
    figure = add(parent, "figure", name="sweep")
    crossovers = sorted(sweep.breaks, key=lambda crossover: crossover.bits_per_second)
    chart = LineChart(
        title="Step time against the rate of the slowest NIC",
        x_title="rate of the slowest NIC",
        x_text=lambda rate: about(rate, "bit/s"),
        xs=sweep.rates,
        curves={plan: sweep.seconds[plan] for plan in plans},
        marks=[
            Mark(
                at=crossover.bits_per_second,
                text=f"{about(crossover.bits_per_second, 'bit/s')}: {crossover.slower_links} "
                f"below, {crossover.faster_links} above",
                curve=crossover.slower_links,
            )
            for crossover in crossovers
        ],
        size=(736, 380),
        logarithmic=True,
        now=slowest_nic(advice.situation.cluster),
    )
    add_chart(add(figure, "div"), chart)
    beside = add(figure, "div")
    add_curve_legend(beside, plans, plan_text)
    left_out = len(sweep.seconds) - len(plans)
    if left_out:
        more = "1 more plan is" if left_out == 1 else f"{left_out} more plans are"
        add(beside, "p", f"{more} not drawn.", "lead")
    if crossovers:
        add(beside, "p", "Rates at which two plans have the same step time:", "lead")
        places = add_numbered(beside, len(crossovers))
        for text, crossover in zip(places, crossovers, strict=True):
            text.text = f"{about(crossover.bits_per_second, 'bit/s')}: below it "
            plan_text(text, crossover.slower_links).tail = " is faster, above it "
            plan_text(text, crossover.faster_links).tail = "."
