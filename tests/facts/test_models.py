"""Well-known models have the tensors that their libraries give them."""

from __future__ import annotations

import pytest

from thalweg.errors import WorkloadError
from thalweg.facts import MODELS, Size, model_named


@pytest.mark.parametrize(
    ("name", "parameters", "tensors"),
    [
        ("resnet50", 25_557_032, 161),
        ("resnet101", 44_549_160, 314),
        ("vgg19", 143_667_240, 38),
        ("bert-base", 109_482_240, 199),
        ("bert-large", 335_141_888, 391),
        ("gpt2", 124_439_808, 148),
    ],
)
def test_parameters_and_tensors(name: str, parameters: int, tensors: int) -> None:
    model = model_named(name)
    assert model.name == name
    assert sum(tensor.elements for tensor in model.tensors) == parameters
    assert len({tensor.name for tensor in model.tensors}) == len(model.tensors) == tensors


@pytest.mark.parametrize(
    ("name", "first", "last", "between"),
    [
        (
            "resnet50",
            "conv1.weight",
            "fc.bias",
            {
                "layer1.0.downsample.0.weight": (256, 64, 1, 1),
                "layer4.2.conv2.weight": (512, 512, 3, 3),
            },
        ),
        (
            "resnet101",
            "conv1.weight",
            "fc.bias",
            {"layer3.22.bn3.weight": (1024,), "layer2.0.conv1.weight": (128, 256, 1, 1)},
        ),
        (
            "vgg19",
            "features.0.weight",
            "classifier.6.bias",
            {"features.34.weight": (512, 512, 3, 3), "classifier.0.weight": (4096, 25088)},
        ),
        (
            "bert-base",
            "embeddings.word_embeddings.weight",
            "pooler.dense.bias",
            {
                "encoder.layer.11.intermediate.dense.weight": (3072, 768),
                "embeddings.LayerNorm.bias": (768,),
            },
        ),
        (
            "gpt2",
            "transformer.wte.weight",
            "transformer.ln_f.bias",
            {"transformer.h.0.attn.c_attn.weight": (768, 2304)},
        ),
    ],
)
def test_names_and_shapes_in_the_order_of_the_model(
    name: str, first: str, last: str, between: dict[str, tuple[int, ...]]
) -> None:
    tensors = model_named(name).tensors
    assert (tensors[0].name, tensors[-1].name) == (first, last)
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    assert {each: shapes[each] for each in between} == between


def test_backward_comes_to_the_classifier_first() -> None:
    """And BERT's embedding, which can't be hidden behind anything, is in the last bucket."""
    resnet, bert = (
        model_named(name).buckets(Size.parse("25MB")) for name in ("resnet50", "bert-base")
    )
    assert resnet[0].tensors[0].name == "fc.bias"
    assert bert[-1].tensors[-1].name == "embeddings.word_embeddings.weight"


def test_an_unknown_model_names_those_there_are() -> None:
    with pytest.raises(WorkloadError, match=r"no model 'resnet'; there are resnet50, .*gpt2"):
        model_named("resnet")
    assert len(MODELS) == 6
