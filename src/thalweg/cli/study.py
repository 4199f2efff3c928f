"""`thalweg study compression`: in how many configurations compression pays."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from math import inf
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from thalweg.cli.output import JsonOption, console, write_json
from thalweg.errors import UsageError
from thalweg.facts import Rate, read_machine
from thalweg.predict.assumptions import assumed_machine
from thalweg.report.tables import blank_table
from thalweg.studies.compression import (
    DATA_CENTRE_GBPS,
    STUDY_RATES_GBPS,
    CompressionCase,
    CompressionStudy,
    Constants,
    constants_of,
    paper_constants,
    run_compression_study,
    wins,
)

app = typer.Typer(help="Studies with the performance model, for many configurations.")

STUDY_COLUMNS = ("model", "batch", "workers", "gbps", "method", "vs_ddp")
SIGN_EXCHANGE_NOTES = {
    False: "sign: everybody gathers all signs here, as in the paper. --constants yours and "
    "`thalweg advise` vote in two shots, which sends less; advise also counts the extra steps",
    True: "sign: votes go in two shots here, as under ring+sign; in the paper everybody gathers "
    "all signs. `thalweg advise` also counts the extra steps",
}


class Source(StrEnum):
    PAPER = "paper"
    YOURS = "yours"


@app.callback()
def _study() -> None:
    """Studies with the performance model, for many configurations."""


@app.command("compression")
def compression(
    constants: Annotated[
        Source,
        typer.Option(
            help="The paper's (Agarwal et al., 2022: V100), or yours: codec costs of your machine.",
        ),
    ] = Source.PAPER,
    machine: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Measured costs, for --constants yours."),
    ] = None,
    bandwidth: Annotated[
        list[str] | None,
        typer.Option(metavar="RATE", help="Like 10gbit; may be given several times."),
    ] = None,
    json_path: JsonOption = None,
) -> None:
    """Compute in how many configurations (models, batches, workers, link rates) each compressor is
    faster than DDP, below which rate, and which ratio would be sufficient. Nothing is run.
    """
    chosen = _constants(constants, machine)
    rates = [Rate.parse(text).bits_per_second / 1e9 for text in bandwidth or ()] or list(
        STUDY_RATES_GBPS
    )
    found = run_compression_study(chosen, rates=sorted(set(rates)))
    terminal = console(json_path)
    terminal.print(_table(found))
    terminal.print("\n".join(_lines(found)), markup=False)
    rows = [_fields(each, *STUDY_COLUMNS) for each in found.outcomes]
    write_json(json_path, "study compression", _settings(found), rows)


def _constants(source: Source, machine: Path | None) -> Constants:
    if source is Source.PAPER:
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


def _fields(each: object, *names: str) -> dict[str, Any]:
    return {name: getattr(each, name) for name in names}


def _settings(found: CompressionStudy) -> dict[str, Any]:
    rates = sorted({each.gbps for each in found.outcomes})
    return {
        "constants": found.constants.name,
        "assumed": list(found.constants.machine.assumed),
        "wins": _count(found.outcomes),
        "data_centre": _count(found.in_data_centres),
        "by_method": {
            method: _count([each for each in found.outcomes if each.method == method])
            for method in found.constants.methods
        },
        "by_gbps": [
            {"gbps": rate, **_count([each for each in found.outcomes if each.gbps == rate])}
            for rate in rates
        ],
        "break_even": [
            {
                **_fields(each, "model", "batch", "workers", "method"),
                "pays": {0.0: "never", inf: "always"}.get(each.gbps, "below"),
                "pays_below_gbps": each.gbps if 0 < each.gbps < inf else None,
            }
            for each in found.break_evens
        ],
        "sufficient_ratio": [
            {
                **_fields(each, "model", "batch", "workers", "gbps"),
                "ratio": each.ratio if each.ratio < inf else None,
            }
            for each in found.ratios
        ],
    }


def _count(outcomes: Sequence[CompressionCase]) -> dict[str, int]:
    won, of = wins(outcomes)
    return {"wins": won, "of": of}


def _table(found: CompressionStudy) -> Table:
    """A row for each method: wins at each rate, and the rate below which it pays for each model."""
    rates = sorted({each.gbps for each in found.outcomes})
    models = list(dict.fromkeys(each.model for each in found.break_evens))
    each_cell = len(found.outcomes) // (len(rates) * len(found.constants.methods))
    table = blank_table(
        "method",
        *(f">{heading}" for heading in [*(f"{rate:g}" for rate in rates), *models]),
        title=f"Steps that are shorter than DDP's, of {each_cell} at each rate in Gbit/s "
        f"(constants of {found.constants.whose}), and the rate below which that is so",
    )
    for method in found.constants.methods:
        own = [each for each in found.outcomes if each.method == method]
        counts = [wins(each for each in own if each.gbps == rate)[0] for rate in rates]
        below = {each.model: each.gbps for each in found.break_evens if each.method == method}
        table.add_row(method, *map(str, counts), *(_speed(below[model]) for model in models))
    return table


def _speed(gbps: float) -> str:
    return {0.0: "never", inf: "always"}.get(gbps) or f"{gbps:.3g}"


def _lines(found: CompressionStudy) -> list[str]:
    won, of = wins(found.outcomes)
    lines = [f"Compression wins in {won} of {of} configurations"]
    if found.in_data_centres:
        won, of = wins(found.in_data_centres)
        lines[0] += f", and in {won} of {of} on links of {DATA_CENTRE_GBPS:g} Gbit/s and more"
        lines[0] += "; the paper reports 6 of more than 200 in data centres"
    ratios = ", ".join(f"{each.model} ({each.batch}) {each.ratio:.2g}x" for each in found.ratios)
    lines.append(
        f"At {DATA_CENTRE_GBPS:g} Gbit/s it would suffice, at no cost, to be smaller by: {ratios}"
    )
    [most] = {each.workers for each in found.break_evens}
    lines.append(
        f"Rates below which it pays are for {most} workers and each model's largest batch; "
        "times are of backward and what follows"
    )
    lines.append(SIGN_EXCHANGE_NOTES[found.constants.two_shot])
    if found.constants.machine.assumed:
        lines.append(
            "Codec times are assumed, not measured here; JSON settings.assumed has the source"
        )
        if found.constants.two_shot:
            lines[-1] += ". --machine FILE takes yours"
    return lines
