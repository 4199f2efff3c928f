"""Tables and a picture of the straggler study.

The picture has a panel of bars for each table: mean iteration times with a line from the 5th to the
95th percentile, on a logarithmic axis; and a map for each other scheme of the speed-up of
CodedReduce, by message size, delay and fraction of stragglers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from rich.table import Table

from thalweg.facts import about
from thalweg.report import tables
from thalweg.report.plots import as_svg
from thalweg.report.tables import seconds_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
SURFACE_COLUMNS: tables.Columns = {
    ">bytes": lambda row: about(row["bytes"], "B"),
    ">delay": lambda row: about(row["delay"], "s"),
    ">stragglers": lambda row: f"{row['late']:.0%}",
    ">cr mean": lambda row: seconds_text(row["mean"]) or "failed",
    **{f">over {rival}": itemgetter(rival) for rival in RIVALS},
    ">exact": lambda row: "yes" if row["exact"] else "NO",
}


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
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    timed = [name for name in by_table if name != "surface"]
    heights = [3.4] * -(-len(timed) // 2) + ([3.6] if "surface" in by_table else [])
    figure = Figure(figsize=(11, max(1.0, sum(heights)) + 0.5), layout="constrained")
    FigureCanvasSVG(figure)
    figure.suptitle(title)
    grid = figure.add_gridspec(len(heights) or 1, 6, height_ratios=heights or [1])
    for number, name in enumerate(timed):
        place, alone = divmod(number, 2), len(timed) == 1
        columns = slice(0, 6) if alone else slice(3 * place[1], 3 * place[1] + 3)
        _draw_times(figure.add_subplot(grid[place[0], columns]), name, by_table[name])
    if "surface" in by_table:
        for number, rival in enumerate(RIVALS):
            at = grid[len(heights) - 1, 2 * number : 2 * number + 2]
            _draw_map(figure.add_subplot(at), rival, by_table["surface"])
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
