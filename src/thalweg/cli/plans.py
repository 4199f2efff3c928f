"""`thalweg plans`: the choices of which plans are made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from thalweg.catalog import SETTING_PARAMETERS, default_catalog
from thalweg.cli.output import JsonOption, console, write_json
from thalweg.declarations import Parameter, Value
from thalweg.report.tables import blank_table


def command(json_path: JsonOption = None) -> None:
    """List the plans, compressors and settings, with their arguments."""
    catalog = default_catalog()
    rows = [
        *(
            _row(kind, part.name, part.summary, part.parameters)
            for kind, parts in (("plan", catalog.presets), ("compressor", catalog.compressors))
            for part in parts.values()
        ),
        *(
            _row("setting", name, part.help, {name: part})
            for name, part in SETTING_PARAMETERS.items()
        ),
    ]
    terminal = console(json_path)
    for kind, title in (
        ("plan", "Plans"),
        ("compressor", "Compressors, after +"),
        ("setting", "Settings, after @"),
    ):
        terminal.print(_table(title, [row for row in rows if row["kind"] == kind]))
        terminal.print()
    terminal.print("thalweg explain 'hierarchical+fp16' --workers 8 draws one.")
    write_json(json_path, "plans", {}, rows)


def _row(kind: str, name: str, summary: str, parameters: Mapping[str, Parameter]) -> dict[str, Any]:
    arguments = [
        {
            "name": argument,
            "default": _written(parameter.default),
            "choices": list(parameter.choices),
            "help": parameter.help,
        }
        for argument, parameter in parameters.items()
    ]
    return {"kind": kind, "name": name, "summary": summary, "arguments": arguments}


def _table(title: str, rows: list[dict[str, Any]]) -> Table:
    headings = ("name", "description", "argument", "default", "meaning")
    table = blank_table(*headings, title=title)
    for row in sorted(rows, key=lambda row: str(row["name"])):
        lines = [
            (a["name"], a["default"] or "", _meaning(a["help"], a["choices"]))
            for a in row["arguments"]
        ] or [("", "", "")]
        table.add_row(row["name"], row["summary"], *lines[0])
        for line in lines[1:]:
            table.add_row("", "", *line)
    return table


def _meaning(text: str, choices: list[str]) -> str:
    return f"{text} ({', '.join(choices)})" if choices and choices[0] not in text else text


def _written(value: Value) -> str | None:
    if value is None:
        return None
    return str(value).lower() if isinstance(value, bool) else str(value)
