"""The step times of plans against the rate of the links, both on logarithmic axes.

Each plan is a curve. The rates at which two plans have the same step time, the *crossovers*, are
numbered, and listed beside the picture.
"""

from __future__ import annotations

from itertools import chain
from xml.etree import ElementTree as ET

from thalweg.facts import about
from thalweg.predict.estimate import Advice, Sweep
from thalweg.predict.what_if import slowest_nic
from thalweg.report.chart import LineChart, Mark, add_chart, add_curve_legend, add_numbered
from thalweg.report.page import plan_text
from thalweg.report.shapes import add

MAX_SWEEP_CURVES = 6  # that can be distinguished


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
    marks = [
        Mark(
            at=crossover.bits_per_second,
            text=f"{about(crossover.bits_per_second, 'bit/s')}: {crossover.slower_links} below, "
            f"{crossover.faster_links} above",
            curve=crossover.slower_links,
        )
        for crossover in crossovers
    ]
    chart = LineChart(
        title="Step time against the rate of the slowest NIC",
        x_title="rate of the slowest NIC",
        x_text=lambda rate: about(rate, "bit/s"),
        xs=sweep.rates,
        curves={plan: sweep.seconds[plan] for plan in plans},
        marks=marks,
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
        entry = add_numbered(beside)
        for crossover in crossovers:
            text = entry()
            text.text = f"{about(crossover.bits_per_second, 'bit/s')}: below it "
            plan_text(text, crossover.slower_links).tail = " is faster, above it "
            plan_text(text, crossover.faster_links).tail = "."
