"""The step times of plans against the rate of the links, both on logarithmic axes.

Points at which two plans have the same step time are numbered, and listed below the picture.
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


def curves(advice: Advice, sweep: Sweep) -> list[str]:
    """The plans to draw: the best one, `ddp`, plans whose curves cross, and plans that are the
    fastest at some rate."""
    fastest = (
        min(sweep.seconds, key=lambda s: sweep.seconds[s][i]) for i in range(len(sweep.rates))
    )
    changing = chain.from_iterable((each.slower_links, each.faster_links) for each in sweep.breaks)
    wanted = dict.fromkeys([str(advice.best.plan), "ddp", *changing, *fastest])
    return [sync for sync in wanted if sync in sweep.seconds][:MAX_SWEEP_CURVES]


def add_sweep(parent: ET.Element, advice: Advice, sweep: Sweep) -> None:
    syncs = curves(advice, sweep)
    figure = add(parent, "figure", name="sweep")
    crossovers = sorted(sweep.breaks, key=lambda each: each.bits_per_second)
    marks = [
        Mark(
            at=each.bits_per_second,
            text=f"{about(each.bits_per_second, 'bit/s')}: {each.slower_links} below, "
            f"{each.faster_links} above",
            curve=each.slower_links,
        )
        for each in crossovers
    ]
    chart = LineChart(
        title="Step time against the rate of the slowest NIC",
        x_title="rate of the slowest NIC",
        x_text=lambda rate: about(rate, "bit/s"),
        xs=sweep.rates,
        curves={sync: sweep.seconds[sync] for sync in syncs},
        marks=marks,
        size=(736, 380),
        logarithmic=True,
        now=slowest_nic(advice.cluster),
    )
    add_chart(add(figure, "div"), chart)
    beside = add(figure, "div")
    add_curve_legend(beside, syncs, plan_text)
    left_out = len(sweep.seconds) - len(syncs)
    if left_out:
        plans = "1 more plan is" if left_out == 1 else f"{left_out} more plans are"
        add(beside, "p", f"{plans} not drawn.", "lead")
    if crossovers:
        add(beside, "p", "Rates at which two plans have the same step time:", "lead")
        entry = add_numbered(beside)
        for each in crossovers:
            text = entry()
            text.text = f"{about(each.bits_per_second, 'bit/s')}: below it "
            plan_text(text, each.slower_links).tail = " is faster, above it "
            plan_text(text, each.faster_links).tail = "."
