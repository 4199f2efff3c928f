"""The tables of the straggler study: the trials of each, a row for every trial, and a picture.

    held      the requested setting
    delays    the same with delays of 0, 0.5 and 2 s: the cost of stragglers, and of the scheme
              without any
    compute   the same with free computation, and with 200 ms over all data
    pauses    the same with workers that are away, and CodedReduce with more redundancy as well
    surface   message size x delay x fraction of stragglers

A trial that several tables need is run once.

The picture has a panel of bars for each table: mean iteration times with a line from the 5th to the
95th percentile, on a logarithmic axis; and a map for each other scheme of the speed-up of
CodedReduce, by message size, delay and fraction of stragglers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from thalweg.bench.run_everywhere import Deployment, NotedProgress
from thalweg.errors import LabError, ThalwegError
from thalweg.facts import Rate, about
from thalweg.report import tables
from thalweg.report.plots import as_svg
from thalweg.report.tables import seconds_text
from thalweg.studies.stragglers.config import SCHEMES, STUDY_TABLES, Softmax, StragglerTrial
from thalweg.studies.stragglers.trial_run import PreparedTrial, run_trial

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DELAY_TABLE_SECONDS = (0.0, 0.5, 2.0)
COMPUTE_TABLE_SECONDS = (0.0, 0.2)
SURFACE_MESSAGE_BYTES = (40_000, 200_000, 1_000_000)
SURFACE_DELAY_SECONDS = (0.5, 2.0)
SURFACE_STRAGGLER_FRACTIONS = (0.02, 0.05, 0.1)

Row = Mapping[str, Any]
Cell = Callable[[Row], str]
Setting = tuple[int, float, float]  # bytes, delay, fraction of stragglers
SCHEME_COLOURS = {"umw": "C0", "gc": "C1", "rar": "C2", "cr": "C3"}
RIVALS = ("umw", "gc", "rar")
TITLES = {
    "held": "stragglers' messages are delayed",
    "delays": "by delay",
    "compute": "by compute time",
    "pauses": "stragglers are away",
    "surface": "speed-up of CodedReduce",
}
VARIED = {"delays": "delay", "compute": "compute"}  # in seconds
SCHEME_BAR_WIDTH = 0.2
PANEL_INCHES = 3.5  # the height of a panel
SURFACE_COLUMNS: tables.Columns = {
    ">bytes": lambda row: about(row["bytes"], "B"),
    ">delay": lambda row: about(row["delay"], "s"),
    ">stragglers": lambda row: f"{row['late']:.0%}",
    ">cr mean": lambda row: seconds_text(row["mean"]) or "failed",
    **{f">over {rival}": itemgetter(rival) for rival in RIVALS},
    ">exact": lambda row: "yes" if row["exact"] else "NO",
}


def trials_of(table: str, asked: StragglerTrial) -> list[StragglerTrial]:
    """The trials of a table; `asked` has everything but the scheme."""
    delays = sorted({*DELAY_TABLE_SECONDS, asked.delay})
    computes = sorted({*COMPUTE_TABLE_SECONDS, asked.compute})
    settings = {
        "held": [asked],
        "delays": [replace(asked, delay=delay) for delay in delays],
        "compute": [replace(asked, compute=compute) for compute in computes],
        "pauses": [replace(asked, way="away")],
        "surface": [
            replace(asked, elements=nbytes // 4, delay=delay, late=late)
            for nbytes in SURFACE_MESSAGE_BYTES
            for delay in SURFACE_DELAY_SECONDS
            for late in SURFACE_STRAGGLER_FRACTIONS
        ],
    }[table]
    trials = [replace(setting, scheme=scheme) for setting in settings for scheme in SCHEMES]
    stronger = asked.tree.more_redundant()
    if table == "pauses" and stronger != asked.tree:
        trials.append(replace(settings[0], scheme="cr", tree=stronger))
    return trials


def run_straggler_study(
    asked: StragglerTrial,
    tables: Sequence[str],
    deployment: Deployment,
    rate: Rate,
    on_progress: NotedProgress,
) -> dict[str, list[Row]]:
    """The rows of each table."""
    wanted = {name: trials_of(name, asked) for name in STUDY_TABLES if name in tables}
    todo = list(dict.fromkeys(trial for trials in wanted.values() for trial in trials))
    rows: dict[StragglerTrial, Row] = {}
    problem: Softmax | None = None
    for number, trial in enumerate(todo):
        show = partial(on_progress, number, len(todo))
        show(f"{trial.scheme}, {describe_trial(trial)}")
        if problem is None or problem.elements != trial.elements:
            problem = None  # frees its memory first
            problem = Softmax.for_workers(trial.workers, trial.elements, trial.seed)
        try:
            rows[trial] = _measured(trial, deployment, problem, rate, show)
        except LabError:
            raise
        except ThalwegError as error:
            rows[trial] = row_of_failure(trial, rate, str(error))
    on_progress(len(todo), len(todo), "")
    return {
        name: compared(name, [rows[trial] for trial in trials]) for name, trials in wanted.items()
    }


def _measured(
    trial: StragglerTrial,
    deployment: Deployment,
    problem: Softmax,
    rate: Rate,
    show: Callable[[str], None],
) -> Row:
    """Run one trial; its messages are freed on return, before the next trial makes its own."""

    def progress(done: int, total: int) -> None:
        show(f"{trial.scheme} {done}/{total}, {describe_trial(trial)}")

    prepared = PreparedTrial.of(trial, deployment, problem)
    return row_of(prepared, run_trial(prepared, deployment, progress), rate)


def describe_trial(trial: StragglerTrial) -> str:
    """A short description for the line of a progress bar."""
    size, delay = about(4 * trial.elements, "B"), about(trial.delay, "s")
    return f"{size}, {trial.late:.0%} {trial.way} {delay}"


def row_of(prepared: PreparedTrial, outcome: Row, rate: Rate) -> Row:
    """The row of a trial, from the times of its iterations and those with a wrong gradient."""
    trial, seconds = prepared.trial, np.array(outcome["seconds"])
    held = trial.way == "held"
    beyond = trial.beyond(prepared.allocation, len(seconds)) if held else None
    return {
        **_setting(trial, rate),
        "mean": float(seconds.mean()),
        **{f"p{p}": float(np.percentile(seconds, p)) for p in (5, 50, 95, 99)},
        "exact": not outcome["wrong"],
        "wrong": len(outcome["wrong"]),
        "iterations": len(seconds),
        "load": float(max(prepared.allocation.loads.values())),
        "beyond": beyond,
        "waits": None if beyond is None else beyond / len(seconds) * trial.delay,
        "error": None,
        "seconds": outcome["seconds"],
    }


def row_of_failure(trial: StragglerTrial, rate: Rate, error: str) -> Row:
    figures = ("mean", "p5", "p50", "p95", "p99", "wrong", "iterations", "load", "beyond", "waits")
    return {
        **_setting(trial, rate),
        **dict.fromkeys(figures),
        "exact": False,
        "error": error,
        "seconds": [],
    }


def _setting(trial: StragglerTrial, rate: Rate) -> Row:
    return {
        "scheme": trial.scheme,
        "stragglers": trial.stragglers,
        "bytes": 4 * trial.elements,
        "late": trial.late,
        "delay": trial.delay,
        "compute": trial.compute,
        "way": trial.way,
        "bound": trial.link_seconds(rate),
    }


def compared(table: str, rows: Sequence[Row]) -> list[Row]:
    """The rows with the speed-up of CodedReduce in the same setting, also of its row with more
    redundancy, and with the slowdown by stragglers where there is a row without any."""
    found: list[Row] = []
    for row in rows:
        coded = _alike(rows, row, scheme="cr")
        more = {"cr_speedup": _over(row, coded[0], "mean")}
        if len(coded) > 1:
            more["stronger_cr_speedup"] = _over(row, coded[1], "mean")
        if table == "delays":
            [baseline] = _alike(rows, row, scheme=row["scheme"], delay=0.0)
            more["mean_vs_none_late"] = _over(row, baseline, "mean")
            more["p95_vs_none_late"] = _over(row, baseline, "p95")
        found.append({**row, **more})
    return found


def _alike(rows: Sequence[Row], like: Row, **other: Any) -> list[Row]:
    """The rows of the same setting, except for `other`."""
    keys = ("bytes", "late", "delay", "compute", "way")
    wanted = {**{key: like[key] for key in keys}, **other}
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def _over(row: Row, other: Row, figure: str) -> float | None:
    if row[figure] is None or other[figure] is None:
        return None
    return float(row[figure] / other[figure])


def label(row: Row) -> str:
    """The scheme, and the number of stragglers that it tolerates."""
    sign = "S" if row["scheme"] == "gc" else "s"  # among all workers, or per parent
    return f"{row['scheme']} {sign}={row['stragglers']}" if row["stragglers"] else row["scheme"]


# In the terminal


def table_of(name: str, rows: Sequence[Row]) -> Table:
    if name == "surface":
        cells = map(_compared_schemes, _cells(rows).values())
        return tables.table_of(cells, SURFACE_COLUMNS, title=_title(name, rows[0]))
    return tables.table_of(rows, _columns(name, rows), title=_title(name, rows[0]))


def _columns(name: str, rows: Sequence[Row]) -> tables.Columns:
    def figure(key: str) -> Cell:
        return lambda row: seconds_text(row[key])

    varied, strongest = VARIED.get(name), rows[-1]
    columns: dict[str, Cell] = {f">{varied}": figure(varied)} if varied else {}
    columns |= {
        "scheme": label,
        ">load": lambda row: "failed" if row["mean"] is None else f"{row['load']:.3f}",
        **{f">{key}": figure(key) for key in ("mean", "p50", "p95", "p99")},
        ">count": lambda row: str(row["iterations"] or ""),
        ">link time": figure("bound"),
    }
    if name != "pauses":
        columns[">beyond"] = lambda row: "" if row["beyond"] is None else str(row["beyond"])
        columns[">added wait"] = figure("waits")
    columns[">cr speed-up"] = lambda row: _times(row["cr_speedup"])
    if "stronger_cr_speedup" in strongest:
        columns[f">{label(strongest)} speed-up"] = lambda row: _times(row["stronger_cr_speedup"])
    if name == "delays":
        columns[">slowdown"] = lambda row: _times(row["mean_vs_none_late"])
    return {**columns, ">exact": _verdict}


def _verdict(row: Row) -> str:
    return "yes" if row["exact"] else "failed" if row["error"] else f"{row['wrong']} WRONG"


def _compared_schemes(cell: Mapping[str, Row]) -> Row:
    """The row of CodedReduce with its speed-up over each other scheme in the same setting."""
    over = {rival: _times(cell[rival]["cr_speedup"]) for rival in RIVALS}
    return {**cell["cr"], **over, "exact": all(row["exact"] for row in cell.values())}


def _cells(rows: Sequence[Row]) -> dict[Setting, dict[str, Row]]:
    """The rows of all schemes by setting."""
    cells: dict[Setting, dict[str, Row]] = {}
    for row in rows:
        cells.setdefault((row["bytes"], row["delay"], row["late"]), {})[row["scheme"]] = row
    return cells


def _title(name: str, row: Row) -> str:
    if name == "surface":
        return f"{TITLES[name]}: compute {about(row['compute'], 's')}"
    parts = [about(row["bytes"], "B"), f"{row['late']:.3g} of the workers straggle"]
    parts += [] if name == "delays" else [f"delay {about(row['delay'], 's')}"]
    parts += [] if name == "compute" else [f"compute {about(row['compute'], 's')}"]
    return f"{TITLES[name]}: {', '.join(parts)}"


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.3g}x"


# As a picture


def draw_stragglers(title: str, by_table: Mapping[str, Sequence[Row]]) -> str:
    """An SVG picture with a panel for each table."""
    from matplotlib.figure import Figure

    timed = [name for name in by_table if name != "surface"]
    pairs = [timed[start : start + 2] for start in range(0, len(timed), 2)]
    panels: list[Any] = [[name for name in pair for _ in range(6 // len(pair))] for pair in pairs]
    if "surface" in by_table:
        panels.append([rival for rival in RIVALS for _ in range(2)])
    figure = Figure(figsize=(11, PANEL_INCHES * len(panels) + 0.5), layout="constrained")
    figure.suptitle(title)
    for name, axes in figure.subplot_mosaic(panels).items():
        if name in RIVALS:
            _draw_map(axes, name, by_table["surface"])
        else:
            _draw_times(axes, name, by_table[name])
    return as_svg(figure)


def _draw_times(axes: Axes, name: str, rows: Sequence[Row]) -> None:
    """Draw bars in one group per setting."""
    varied = VARIED.get(name)
    settings = list(dict.fromkeys(row[varied] for row in rows)) if varied else [None]
    size = len(rows) // len(settings)
    for number, row in enumerate(rows):
        group, slot = divmod(number, size)
        _draw_bar(axes, (group * (size + 1) + slot) * SCHEME_BAR_WIDTH, row, named=group == 0)
    middles = [(n * (size + 1) + (size - 1) / 2) * SCHEME_BAR_WIDTH for n in range(len(settings))]
    axes.set_xticks(middles, ["" if s is None else about(s, "s") for s in settings])
    axes.set(ylabel="seconds per iteration", yscale="log")
    drawn = [row for row in rows if row["mean"]]
    if drawn:  # leaves space for figures and the legend above
        axes.set_ylim(
            min(row["p5"] for row in drawn) / 2,
            max(max(row["mean"], row["p95"]) for row in drawn) * 6,
        )
    axes.set_title(_title(name, rows[0]), fontsize="small")
    axes.grid(axis="y", alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="x-small", ncols=5, loc="upper center")


def _draw_bar(axes: Axes, at: float, row: Row, *, named: bool) -> None:
    if row["mean"] is None:
        return
    strong = row["scheme"] == "cr" and row["stragglers"] > 1
    axes.bar(
        at,
        row["mean"],
        SCHEME_BAR_WIDTH,
        color=SCHEME_COLOURS[row["scheme"]],
        alpha=0.6 if strong else 1.0,
        label=label(row) if named else None,
    )
    axes.plot([at, at], [row["p5"], row["p95"]], color="black", lw=1.2)
    top = max(row["mean"], row["p95"])
    axes.annotate(about(row["mean"], "s"), (at, top), ha="center", fontsize=6, va="bottom")


def _draw_map(axes: Axes, rival: str, rows: Sequence[Row]) -> None:
    """Draw sizes down, delays and straggler fractions across, colours by the logarithm."""
    from matplotlib.colors import LogNorm

    cells = _cells(rows)
    sizes = list(dict.fromkeys(nbytes for nbytes, _, _ in cells))
    columns = list(dict.fromkeys((delay, late) for _, delay, late in cells))
    ratios = [
        [cells[size, *column][rival]["cr_speedup"] or float("nan") for column in columns]
        for size in sizes
    ]
    axes.imshow(ratios, norm=LogNorm(0.1, 100), cmap="RdYlGn", aspect="auto")
    for y, line in enumerate(ratios):
        for x, ratio in enumerate(line):
            axes.annotate(f"{ratio:.3g}", (x, y), ha="center", va="center", fontsize=7)
    axes.set_yticks(range(len(sizes)), [about(size, "B") for size in sizes])
    texts = [f"{about(delay, 's')}\n{late:.0%}" for delay, late in columns]
    axes.set_xticks(range(len(columns)), texts, fontsize=7)
    axes.set_title(f"{TITLES['surface']} over {rival}", fontsize="small")
