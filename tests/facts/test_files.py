"""A machine's file: what is written is read again, and mistakes are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from thalweg.errors import ClusterError
from thalweg.facts import (
    CodecCost,
    FittedValue,
    Machine,
    TransportCosts,
    format_machine,
    machine_path,
    parse_machine,
    read_machine,
)

MEASURED = Machine(
    ours=TransportCosts(
        message=FittedValue(1.234567e-4, 0.11),
        byte=FittedValue(2.5e-10),
        crowding=((1, FittedValue(0.97, 0.01)), (7, FittedValue(2 / 3))),
    ),
    native=TransportCosts(message=FittedValue(5e-4)),
    burst=131072.0,
    codecs={"powersgd(rank=4)": CodecCost(encode=FittedValue(3e-9, 0.2)), "fp16": CodecCost()},
    assumed=("a backend that costs nothing",),
)


def test_what_is_written_is_read_again() -> None:
    read = parse_machine(format_machine(MEASURED))
    assert read == MEASURED
    assert read.assumed == MEASURED.assumed


def test_an_empty_file_costs_nothing() -> None:
    assert parse_machine("") == Machine()


def test_beside_the_cluster_file(tmp_path: Path) -> None:
    path = machine_path(tmp_path / "cluster.toml")
    assert path == tmp_path / "cluster.machine.toml"
    path.write_text(format_machine(MEASURED))
    assert read_machine(path) == MEASURED


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("speed = 3", "the file has an unknown key 'speed'"),
        ("burst = -1", "burst of the file is -1"),
        ("ours = 3", "ours of the file is no table"),
        (
            "[ours]\nmessage = { seconds = '1ms' }",
            "seconds of message of ours of the file is '1ms'",
        ),
        ("[ours]\ncrowding = 3", "crowding of ours of the file is no list"),
        ("[ours]\ncrowding = [{ flows = 0, share = 1 }]", "is 0"),
        ("[ours]\ncrowding = [{ flows = 1 }]", "leaves 1 flows nothing"),
        (
            "[ours]\ncrowding = [{ flows = 2, share = 1 }, { flows = 1, share = 1 }]",
            "has 1 flows out of order",
        ),
        ("[[codec]]\nencode = {}", "name of a codec is no text"),
        ("[[codec]]\nname = 'fp16'\nspeed = {}", "codec fp16 has an unknown key 'speed'"),
        ("codec = 3", "codec of the file is no list"),
    ],
)
def test_mistakes_are_named(text: str, problem: str) -> None:
    with pytest.raises(ClusterError) as caught:
        parse_machine(text)
    assert problem in caught.value.problem
