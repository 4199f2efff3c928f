"""`thalweg bench compress` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path
from shlex import split
from xml.etree import ElementTree as ET

import pytest

from tests.cli.command import thalweg

MODEL = """
name = "mlp"
backward = "20ms"
tensors = [
    { name = "in.weight", shape = [128, 784] },
    { name = "in.bias", shape = [128] },
]
"""
ELEMENTS = 128 * 784 + 128
CONTRACT = {
    "method",
    "encode_ms",
    "decode_ms",
    "payload_bytes",
    "wire_bytes",
    "breakeven_gbps",
    "peer",
    "exchange",
    "ratio",
}


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_rows_and_a_picture(workers: int, tmp_path: Path) -> None:
    (tmp_path / "mlp.toml").write_text(MODEL)
    done = thalweg(
        *split("bench compress --model mlp.toml --method fp16 --method 'bf16(warmup=3)'"),
        *split(f"--workers {workers} --repeats 1 --svg drawn/steps.svg --json rows.json"),
        cwd=tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "mlp: 402 kB of gradients" in done.stdout
    document = json.loads((tmp_path / "rows.json").read_text())
    settings, rows = document["settings"], document["rows"]
    assert (document["command"], settings["model"]) == ("bench compress", "mlp")
    assert (settings["workers"], settings["backward"]) == (workers, 0.02)
    assert settings["methods"] == ["fp16", "bf16(warmup=3)"]
    assert (settings["gbps"][0], settings["gbps"][-1]) == (0.01, pytest.approx(100))
    sent = 2 * (workers - 1) / workers * 4 * ELEMENTS
    assert settings["uncompressed"]["wire_bytes"] == round(sent)
    for row in rows:
        assert row.keys() >= CONTRACT
    fp16 = rows[0]
    assert (fp16["payload_bytes"], fp16["wire_bytes"]) == (2 * ELEMENTS, round(sent / 2))
    seconds = (fp16["encode_ms"] + fp16["decode_ms"]) / 1e3
    assert fp16["breakeven_gbps"] == pytest.approx(8 * sent / 2 / seconds / 1e9)
    picture = ET.parse(tmp_path / "drawn" / "steps.svg").getroot()
    texts = {element.text for element in picture.iter()}
    assert texts >= {"ddp, uncompressed", *(row["method"] for row in rows)}


def test_json_alone_on_standard_output(tmp_path: Path) -> None:
    done = thalweg(
        *split("bench compress --model digits --method fp16 --repeats 1 --backward 5ms --json -"),
        cwd=tmp_path,
    )
    document = json.loads(done.stdout)
    assert document["settings"]["backward"] == 0.005
    assert document["settings"]["bytes"] == 4 * 563_722


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ("--model resnet5", "there is no model 'resnet5'; there are resnet50"),
        ("--model nowhere.toml", "nowhere.toml"),
        ("--model gpt2 --method fp15", "there is no compressor 'fp15'"),
        ("--model gpt2 --method 'topk(ratio=2)'", "2 is too large"),
        ("--model gpt2 --repeats 0", "--repeats"),
        ("--model gpt2 --workers 1", "--workers"),
        ("--model gpt2 --backward 5", "'5' is not a duration"),
        ("--model gpt2 --backward 0s", "has no time of backward"),
        ("", "--model"),
    ],
)
def test_mistakes_are_one_line(options: str, line: str, tmp_path: Path) -> None:
    done = thalweg("bench", "compress", *split(options), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert line in done.stderr
    assert done.stderr.count("\n") == 1
