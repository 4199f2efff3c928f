"""What is assumed is said to be, and scales as it says."""

from __future__ import annotations

import pytest

from thalweg.catalog import parse_plan
from thalweg.errors import ClusterError, PlanError, WorkloadError
from thalweg.facts import MODELS, model_named
from thalweg.predict import assumptions


def test_every_model_has_a_step_and_every_entry_a_source() -> None:
    assert set(assumptions.ASSUMED_STEPS) == set(MODELS)
    codecs = [codec for table in assumptions.ASSUMED_CODECS.values() for codec in table.values()]
    sources = [codec.source for codec in codecs]
    sources += [network.source for network in assumptions.NETWORKS.values()]
    sources += [gpu.source for gpu in assumptions.GPUS.values()]
    sources += [step.source for step in assumptions.ASSUMED_STEPS.values()]
    assert all(sources)


def test_resnet50_has_the_elements_that_codecs_were_timed_on() -> None:
    elements = sum(tensor.elements for tensor in model_named("resnet50").tensors)
    assert elements == assumptions.RESNET50_ELEMENTS


def test_costs_grow_with_the_batch_and_shrink_with_the_gpu() -> None:
    costs = assumptions.costs_of("resnet50", "v100", 64)
    assert costs.backward.seconds == pytest.approx(0.122, rel=0.01)
    assert costs.forward.seconds == pytest.approx(costs.backward.seconds / 2)
    faster = assumptions.costs_of("resnet50", "a100", 32)
    assert faster.backward.seconds == pytest.approx(costs.backward.seconds / 4)


def test_networks_are_effective() -> None:
    assert assumptions.network_named("10gbe").bytes_per_second == pytest.approx(9.2e9 / 8)
    assert assumptions.network_named("100gbe").bytes_per_second == pytest.approx(18e9 / 8)
    with pytest.raises(ClusterError, match="there is no network 'token ring'; there are 1gbe"):
        assumptions.network_named("token ring")


def test_codecs_are_plans_that_can_be_written() -> None:
    for table in assumptions.ASSUMED_CODECS.values():
        for text in table:
            assert parse_plan(f"ring+{text}").precision is not None


def test_a_machine_says_what_nobody_measured() -> None:
    machine = assumptions.assumed_machine("v100")
    powersgd = machine.codecs["powersgd(rank=4)"]
    whole = (powersgd.encode.value + powersgd.decode.value) * assumptions.RESNET50_ELEMENTS
    assert whole == pytest.approx(0.045)
    assert any(line.startswith("powersgd(rank=4): ") for line in machine.assumed)
    with pytest.raises(PlanError, match="use v100, cpu"):
        assumptions.assumed_machine("abacus")


def test_workloads_with_their_costs() -> None:
    workload = assumptions.workload_of("bert-base", "v100", 12)
    assert workload.tensors == model_named("bert-base").tensors
    assert workload.costs.backward.seconds == pytest.approx(0.25, rel=0.02)


def test_unknown_names() -> None:
    with pytest.raises(WorkloadError, match="there is no model 'resnet51'; there are resnet50"):
        assumptions.workload_of("resnet51")
    with pytest.raises(WorkloadError, match="the step time of 'mlp' is not known"):
        assumptions.costs_of("mlp", "v100", 1)
    with pytest.raises(WorkloadError, match="there is no GPU 'voodoo'"):
        assumptions.costs_of("gpt2", "voodoo", 1)
