"""The studies of papers: `thalweg study compression` (in how many configurations compression pays)
and `thalweg bench stragglers` (CodedReduce's Figure 2, in a lab).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

from thalweg.bench.run_everywhere import Deployment
from thalweg.cli.options import Output, lab_of, names_among, option, progress_bar, with_bundles
from thalweg.declarations import listed
from thalweg.errors import RunError, UsageError
from thalweg.facts import Duration, Rate, Size, grouped, read_machine
from thalweg.predict.assumptions import assumed_machine
from thalweg.report.tables import blank_table
from thalweg.studies.compression import (
    DATA_CENTRE_GBPS,
    STUDY_RATES_GBPS,
    STUDY_WORKER_COUNT,
    CompressionStudy,
    Constants,
    Row,
    constants_of,
    paper_constants,
    run_compression_study,
    wins,
)
from thalweg.studies.stragglers.config import STUDY_TABLES, RegularTree, StragglerTrial

app = typer.Typer(help="Studies with the performance model, for many configurations.")

SIGN_EXCHANGE_NOTES = {
    False: "sign: everybody gathers all signs here, as in the paper. --constants yours and "
    "`thalweg advise` vote in two shots, which sends less; advise also counts the extra steps",
    True: "sign: votes go in two shots here, as under ring+sign; in the paper everybody gathers "
    "all signs. `thalweg advise` also counts the extra steps",
}
STRAGGLER_NOTES = (
    "link time: bytes of the busiest NIC in an iteration, over its rate; at small messages a token "
    "bucket's burst hides part of it, and gc doesn't wait for models to reach the last workers",
    "beyond: number of iterations with more stragglers than the scheme tolerates; added wait: the "
    "least time that these add to the mean",
)


@app.callback()
def _study() -> None:
    """Studies with the performance model, for many configurations."""


@app.command("compression")
@with_bundles
def compression(
    *,
    constants: Annotated[
        Literal["paper", "yours"],
        option("The paper's (Agarwal et al., 2022: V100), or yours: codec costs of your machine."),
    ] = "paper",
    machine: Annotated[
        Path | None, option("Measured costs, for --constants yours.", "FILE")
    ] = None,
    bandwidth: Annotated[
        list[str] | None, option("Like 10gbit; may be given several times.", "RATE")
    ] = None,
    output: Output,
) -> None:
    """Compute in how many configurations (models, batches, workers, link rates) each compressor is
    faster than DDP, below which rate, and which compression ratio would be sufficient. Nothing is
    run.
    """
    chosen = _constants(constants, machine)
    rates = [Rate.parse(text).bits_per_second / 1e9 for text in bandwidth or ()] or list(
        STUDY_RATES_GBPS
    )
    study = run_compression_study(chosen, sorted(set(rates)))
    output.print(_wins_table(study), *_lines(study))
    output.write_json("study compression", study.cases, **_settings(study))


def _constants(source: str, machine: Path | None) -> Constants:
    if source == "paper":
        if machine is not None:
            raise UsageError(
                "the paper's constants need no machine", "add --constants yours, or drop --machine"
            )
        return paper_constants()
    if machine is None:
        return constants_of(assumed_machine("cpu"), "one core of an AMD EPYC")
    measured = read_machine(machine)
    if not measured.codecs:
        raise UsageError(f"{machine} has no costs of compressors", "measure them first")
    return constants_of(measured, str(machine))


def _settings(study: CompressionStudy) -> dict[str, Any]:
    return {
        "constants": study.constants.name,
        "assumed": list(study.constants.machine.assumed),
        "wins": _count(study.cases),
        "data_centre": _count(study.in_data_centres),
        "by_method": {name: _count(rows) for name, rows in _by(study.cases, "method").items()},
        "by_gbps": [
            {"gbps": rate, **_count(rows)} for rate, rows in _by(study.cases, "gbps").items()
        ],
        "break_even": study.break_evens,
        "sufficient_ratio": [
            {**row, "ratio": row["ratio"] if row["ratio"] < inf else None} for row in study.ratios
        ],
    }


def _by(rows: Sequence[Row], key: str) -> dict[Any, list[Row]]:
    """The rows by their value of this key."""
    return grouped((row[key], row) for row in rows)


def _count(cases: Sequence[Row]) -> dict[str, int]:
    return dict(zip(("wins", "of"), wins(cases), strict=True))


def _wins_table(study: CompressionStudy) -> Table:
    """A row for each method: wins at each rate, and the rate below which it pays for each model."""
    headings = [f"{rate:g}" for rate in _by(study.cases, "gbps")]
    each_cell = len(study.cases) // (len(headings) * len(study.constants.methods))
    headings += _by(study.break_evens, "model")
    table = blank_table(
        "method",
        *(f">{heading}" for heading in headings),
        title=f"Steps that are shorter than DDP's, of {each_cell} at each rate in Gbit/s "
        f"(constants of {study.constants.whose}), and the rate below which that is so",
    )
    below = _by(study.break_evens, "method")
    for method, cases in _by(study.cases, "method").items():
        counts = [str(wins(rows)[0]) for rows in _by(cases, "gbps").values()]
        table.add_row(method, *counts, *map(_speed, below[method]))
    return table


def _speed(row: Row) -> str:
    return f"{row['pays_below_gbps']:.3g}" if row["pays"] == "below" else str(row["pays"])


def _lines(study: CompressionStudy) -> list[str]:
    lines = ["Compression wins in {} of {} configurations".format(*wins(study.cases))]
    if study.in_data_centres:
        won, of = wins(study.in_data_centres)
        lines[0] += (
            f", and in {won} of {of} on links of {DATA_CENTRE_GBPS:g} Gbit/s and more; the paper "
            "reports 6 of more than 200 in data centres"
        )
    ratios = ", ".join("{model} ({batch}) {ratio:.2g}x".format(**row) for row in study.ratios)
    lines += [
        f"At {DATA_CENTRE_GBPS:g} Gbit/s it would suffice, at no cost, to be smaller by: {ratios}",
        f"Rates below which it pays are for {STUDY_WORKER_COUNT} workers and each model's largest "
        "batch; times are of backward and what follows",
        SIGN_EXCHANGE_NOTES[study.constants.two_shot],
    ]
    if study.constants.machine.assumed:
        lines.append(
            "Codec times are assumed, not measured here; JSON settings.assumed has the source"
        )
        if study.constants.two_shot:
            lines[-1] += ". --machine FILE takes yours"
    return lines


@with_bundles
def bench_stragglers(
    *,
    tree: Annotated[str, option("N children a parent, L layers.", "NxL")] = "4x3",
    stragglers: Annotated[
        int, option("Stragglers that a parent tolerates among its children.", min=0)
    ] = 1,
    nbytes: Annotated[
        str, option("Size of a gradient, as it is sent.", "SIZE", "--bytes")
    ] = "200KB",
    nic: Annotated[str, option("Rate of every NIC.", "RATE")] = "100mbit",
    late: Annotated[float, option("Probability that a worker straggles, 0 to 1.", "P")] = 0.05,
    delay: Annotated[str, option("Delay of a straggler.", "DURATION")] = "2s",
    compute: Annotated[
        str,
        option(
            "Compute time of one worker for all data; each sleeps for its part of it.", "DURATION"
        ),
    ] = "200ms",
    iterations: Annotated[int, option("Maximum number of iterations.", min=1)] = 300,
    budget: Annotated[
        str,
        option(
            "Time for each scheme in each setting, after which 10 iterations are enough.",
            "DURATION",
        ),
    ] = "40s",
    tables: Annotated[
        list[str] | None,
        option("held, delays, compute, pauses, surface; all but the last if not given.", "NAMES"),
    ] = None,
    seed: Annotated[int, option("Seed of the stragglers.", min=0)] = 0,
    plot: Annotated[Path | None, option("Path of the picture (SVG).", "PATH")] = None,
    output: Output,
) -> None:
    """Time the aggregation of a gradient while some workers straggle: a master that waits for all
    (umw), gradient coding (gc), torch's ring (rar) and CodedReduce (cr), in a lab with a host for
    each worker.

    The same workers straggle under every scheme. Every gradient is compared with the true one.
    """
    *most, _ = STUDY_TABLES
    chosen = names_among(STUDY_TABLES, tables, "--tables", "table") if tables else most
    rate, size = Rate.parse(nic), Size.parse(nbytes).nbytes
    if size % 4:
        raise UsageError(
            f"{size} bytes aren't a whole number of float32", "give a multiple of 4 bytes"
        )
    trial = StragglerTrial(
        scheme="cr",
        tree=RegularTree.parse(tree, stragglers),
        elements=size // 4,
        late=late,
        delay=Duration.parse(delay).seconds,
        compute=Duration.parse(compute).seconds,
        iterations=iterations,
        budget=Duration.parse(budget).seconds,
        seed=seed,
    )

    # torch takes a second: not before mistakes
    from thalweg.studies.stragglers.tables import draw_stragglers, run_straggler_study, table_of

    with lab_of(trial.tree.cluster(rate)) as lab, progress_bar("Measuring") as show:
        deployment = Deployment.of_lab(lab)
        results = run_straggler_study(trial, chosen, deployment, rate, show)
    wrong = [row for rows in results.values() for row in rows if not row["exact"]]
    errors = dict.fromkeys(f"{row['scheme']}: {row['error']}" for row in wrong if row["error"])
    notes = [*errors, *STRAGGLER_NOTES, *deployment.notes]
    where = f"{trial.workers} workers in a tree of {trial.tree.text} and a root, NICs {rate}"
    output.print(where, style="italic")
    output.print(*(table_of(name, rows) for name, rows in results.items()), *notes)
    output.write_json(
        "bench stragglers",
        results.get("held", []),
        tree=trial.tree.text,
        workers=trial.workers,
        stragglers=stragglers,
        bytes=size,
        nic=str(rate),
        late=late,
        delay=trial.delay,
        compute=trial.compute,
        iterations=iterations,
        budget=trial.budget,
        seed=seed,
        notes=notes,
        tables={name: rows for name, rows in results.items() if name != "held"},
    )
    picture = plot or Path("thalweg-bench") / f"stragglers-{trial.tree.text}.svg"
    output.write("Picture", picture, draw_stragglers(where, results))
    if wrong:
        schemes = listed(dict.fromkeys(row["scheme"] for row in wrong))
        raise RunError(f"{schemes} failed, or gave a gradient that isn't exact", "see its rows")
