"""A situation and its files."""

from __future__ import annotations

from dataclasses import replace

import pytest

from thalweg.facts import (
    FREE_MACHINE,
    Cluster,
    CodecCost,
    Duration,
    FittedValue,
    Machine,
    Situation,
    Size,
    Workload,
    format_situation,
    parse_situation,
)

MEASURED = Cluster.regular(
    [2, 1], nic=["100mbit", "90mbit", "50mbit"], uplink="200mbit", latency=Duration(1e-4)
)
DECLARED = Cluster.regular([2, 1], nic="100mbit", uplink="200mbit")
WORKLOAD = Workload.of_size(Size.parse("3MB"))
MACHINE = Machine(
    burst=4096.0,
    codecs={"fp16": CodecCost(encode=FittedValue(1e-9, 0.1))},
    assumed=("fp16: as elsewhere",),
)
FULL = Situation(cluster=MEASURED, workload=WORKLOAD, machine=MACHINE, declared=DECLARED)


@pytest.mark.parametrize("situation", [FULL, replace(FULL, declared=None)])
def test_files_and_back(situation: Situation) -> None:
    found = parse_situation(format_situation(situation))
    assert found == situation
    assert found.assumed == situation.assumed


def test_remarks_are_in_the_clusters_file_alone() -> None:
    texts = format_situation(FULL, ["Measured by hand."])
    assert [name for name, text in texts.items() if "Measured by hand." in text] == ["cluster"]
    assert parse_situation(texts) == FULL


def test_schedules_are_laid_out_for_the_declared_cluster_if_there_is_one() -> None:
    assert FULL.laid_out_for is DECLARED
    assert replace(FULL, declared=None).laid_out_for is MEASURED


def test_what_is_not_measured_is_assumed() -> None:
    guessed = Situation(cluster=Cluster.flat(2), workload=WORKLOAD)
    assert guessed.machine is FREE_MACHINE
    assert guessed.assumed == (*Cluster.flat(2).assumed, *FREE_MACHINE.assumed)
    assert Cluster.flat(2).assumed
