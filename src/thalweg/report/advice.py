"""An advice as one HTML page: what to do, what every plan would take, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from xml.etree import ElementTree as ET

from thalweg.declarations import Promise, listed
from thalweg.facts import about, counted
from thalweg.predict.estimate import Advice, Estimate, RankedPlan
from thalweg.report.advice_svg import (
    PARTS,
    add_bars,
    add_patterns,
    draw_ruler,
    draw_whisker,
    whisker_scale,
)
from thalweg.report.cluster_svg import add_cluster, cluster_text
from thalweg.report.page import add, details, page, plan_text, prose, section, table, written
from thalweg.report.sweep_svg import add_sweep

MAX_RANKING_ROWS = 25  # of the ranking that are shown at once
MAX_ADVICE_BARS = 10
BASELINE = "ddp"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStepTime:
    """What a step of a plan took in a run, beside what was predicted."""

    sync: str
    seconds: float
    predicted: float
    low: float
    high: float

    @property
    def error(self) -> float:
        """How far the prediction was off, relative to what was measured."""
        return self.predicted / self.seconds - 1

    @property
    def inside(self) -> bool:
        return self.low <= self.seconds <= self.high


def advice_page(advice: Advice, measured: Sequence[MeasuredStepTime] = ()) -> str:
    """A whole HTML document, which needs nothing beside it."""
    title = f"Thalweg advice: {advice.workload.name} on {counted(advice.cluster.workers, 'worker')}"
    root, main = page(title)
    add_patterns(main)
    _add_head(main, advice)
    _add_hero(main, advice.best)
    _add_ranking(main, advice.ranking)
    _add_breakdown(main, advice.ranking)
    if advice.sweep is not None and advice.sweep.seconds and len(advice.sweep.rates) > 1:
        lead = "All links at so many times their rates; lower is faster."
        add_sweep(section(main, "Time against bandwidth", lead), advice, advice.sweep)
    add_cluster(section(main, "The cluster", f"{cluster_text(advice.cluster)}."), advice.cluster)
    if measured:
        _add_measured(main, measured)
    _add_assumed(main, advice)
    _add_left_out(main, advice)
    _add_use(main, str(advice.best.plan))
    return written(root)


def _add_head(main: ET.Element, advice: Advice) -> None:
    head = add(main, "header")
    add(head, "h1", f"How to synchronise {advice.workload.name}")
    size = about(advice.workload.nbytes, "B")
    promises = [promise.value for promise in Promise]
    allowed = listed(promises[: promises.index(advice.allow.value) + 1])
    facts = f"{size} of gradients a step, {cluster_text(advice.cluster)}; allowed: {allowed}."
    add(head, "p", facts, "facts")
    prose(head, advice.verdict, str(advice.best.plan), "verdict")


def _add_hero(main: ET.Element, best: RankedPlan) -> None:
    hero = add(main, "section", name="hero")
    hero.tail = "\n"
    add(hero, "h2", "Best plan")
    plan_text(hero, str(best.plan))
    figures = add(hero, "dl")
    speed = (times(best.vs_ddp), f"the speed of {BASELINE}, step by step")
    for figure, meaning in (
        (about(best.estimate.seconds, "s"), "a step, predicted"),
        (BASELINE, "itself: no faster plan was found") if str(best.plan) == BASELINE else speed,
        (between(best.estimate.low, best.estimate.high), "four times of five"),
    ):
        pair = add(figures, "div")
        add(pair, "dt", meaning)
        add(pair, "dd", figure)
    add(hero, "p", best.why)


def _add_ranking(main: ET.Element, ranking: Sequence[RankedPlan]) -> None:
    lead = (
        "Best first. The dot is the predicted mean of a step's seconds; "
        "the whisker is the interval that it is in four times of five."
    )
    if any(ranked.steps not in (None, 1) for ranked in ranking):
        lead += f" Ranked by seconds times the steps needed for one of {BASELINE}'s."
    found = section(main, "Ranking", lead)
    shown, rest = ranking[:MAX_RANKING_ROWS], ranking[MAX_RANKING_ROWS:]
    _add_rows(found, "Ranking", shown, first=1)
    if rest:
        label = f"{len(rest)} more plan{'s' * (len(rest) > 1)}"
        _add_rows(details(found, label), label, rest, first=MAX_RANKING_ROWS + 1)


def _add_rows(parent: ET.Element, label: str, ranking: Sequence[RankedPlan], *, first: int) -> None:
    speed = f"#vs {BASELINE}"
    columns = ["#", "Plan", "#Seconds a step", "", speed, "Promise", "Survives", "Why"]
    headings, body = table(parent, label, columns)
    estimates = [ranked.estimate for ranked in ranking]
    scale = whisker_scale([value for each in estimates for value in (each.low, each.high)])
    ruler = headings[3]
    ruler.set("class", "whisker")
    draw_ruler(ruler, scale)
    for number, ranked in enumerate(ranking, start=first):
        estimate = ranked.estimate
        row = add(body, "tr", name="best" if number == 1 else "")
        add(row, "td", str(number), "number")
        cell = add(row, "td")
        plan_text(cell, str(ranked.plan))
        if ranked.steps not in (None, 1):
            add(cell, "span", f"needs {ranked.steps:.3g} times the steps", "note")
        seconds = add(row, "td", about(estimate.seconds, "s"), "number")
        add(seconds, "span", between(estimate.low, estimate.high), "interval")
        drawn = add(row, "td", name="whisker")
        draw_whisker(drawn, scale, mean=estimate.seconds, low=estimate.low, high=estimate.high)
        add(row, "td", times(ranked.vs_ddp), "number")
        add(add(row, "td"), "span", ranked.promise.value, "pill")
        add(row, "td", ranked.survives, "short")
        add(row, "td", ranked.why, "words")


def _add_breakdown(main: ET.Element, ranking: Sequence[RankedPlan]) -> None:
    shown = list(ranking[:MAX_ADVICE_BARS])
    shown += [ranked for ranked in ranking[MAX_ADVICE_BARS:] if str(ranked.plan) == BASELINE]
    estimates = [ranked.estimate for ranked in shown]
    found = section(main, "Where the time goes", "Parts of a step that come after one another.")
    add_bars(found, estimates)
    _add_parts(details(found, "The same in figures"), estimates)


def _add_parts(parent: ET.Element, estimates: Sequence[Estimate]) -> None:
    names = [f"#{name.capitalize()}" for name in PARTS]
    _, body = table(parent, "Parts of a step", ["Plan", *names, "#Together"])
    for estimate in estimates:
        row = add(body, "tr")
        plan_text(add(row, "td"), estimate.sync)
        for name in PARTS:
            value = float(getattr(estimate.parts, name))
            add(row, "td", about(value, "s") if value else "-", "number")
        add(row, "td", about(estimate.seconds, "s"), "number")


def _add_measured(main: ET.Element, measured: Sequence[MeasuredStepTime]) -> None:
    inside = sum(each.inside for each in measured)
    lead = (
        "The dot with its whisker was predicted, the diamond is what a run took: "
        f"{inside} of {len(measured)} within their interval."
    )
    found = section(main, "Predicted against measured", lead)
    columns = ["Plan", "#Predicted", "", "#Measured", "#Prediction off by", "Within the interval"]
    headings, body = table(found, "Predicted against measured", columns)
    values = [value for each in measured for value in (each.seconds, each.low, each.high)]
    scale = whisker_scale(values)
    headings[2].set("class", "whisker")
    draw_ruler(headings[2], scale)
    for each in measured:
        row = add(body, "tr")
        plan_text(add(row, "td"), each.sync)
        predicted = add(row, "td", about(each.predicted, "s"), "number")
        add(predicted, "span", between(each.low, each.high), "interval")
        drawn = add(row, "td", name="whisker")
        interval = {"mean": each.predicted, "low": each.low, "high": each.high}
        draw_whisker(drawn, scale, **interval, measured=each.seconds)
        add(row, "td", about(each.seconds, "s"), "number")
        add(row, "td", f"{each.error:+.0%}", "number")
        add(row, "td", "yes" if each.inside else "no")


def _add_assumed(main: ET.Element, advice: Advice) -> None:
    whole = [*advice.assumed, *advice.cluster.assumed, *advice.machine.assumed]
    texts = dict.fromkeys([*whole, *advice.best.estimate.assumed])
    found = section(main, "What was assumed")
    if not texts:
        add(found, "p", "Nothing: all that counts was measured or declared.")
        return
    entries = add(found, "ul")
    for text in texts:
        add(entries, "li", text)


def _add_left_out(main: ET.Element, advice: Advice) -> None:
    if not advice.left_out:
        return
    number = len(advice.left_out)
    found = section(main, "What was left out")
    inside = details(found, f"{number} plan{'s' * (number > 1)} not ranked, and why")
    _, body = table(inside, "Plans left out", ["Plan", "Why"])
    for sync, why in advice.left_out.items():
        row = add(body, "tr")
        plan_text(add(row, "td"), sync)
        add(row, "td", why, "words")


def _add_use(main: ET.Element, sync: str) -> None:
    found = section(main, "Use it")
    code = add(add(found, "pre"), "code", 'run = thalweg.attach(model, optimizer, sync="')
    add(code, "span", sync, "plan").tail = '")'
    add(main, "footer", f"Made by thalweg {version('thalweg')}.")


def times(factor: float) -> str:
    """A speed-up: `1.83x`."""
    return f"{factor:.2f}x" if 0.1 <= factor < 10 else f"{factor:.3g}x"


def between(low: float, high: float) -> str:
    """`80.1 to 91.5 ms`, with one unit if both have it."""
    first, last = about(low, "s"), about(high, "s")
    number, unit = first.split()
    return f"{number} to {last}" if last.endswith(f" {unit}") else f"{first} to {last}"
