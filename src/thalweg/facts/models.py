"""The tensors of well-known models, made from their architecture, so that the cost of a plan for
them can be predicted without the models themselves.

Convolutional ones as torchvision has them (He et al., CVPR 2016, the stride in the 3 x 3 layer;
Simonyan and Zisserman, ICLR 2015), transformers as Hugging Face does: BERT without a head (Devlin
et al., NAACL 2019), GPT-2 with its output tied to its embedding (Radford et al. 2019).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product

from thalweg.errors import WorkloadError
from thalweg.facts.workload import Tensor, Workload

Tensors = Iterator[Tensor]
IMAGENET_CLASS_COUNT = 1000


def model_named(name: str) -> Workload:
    """The workload of this model; WorkloadError if there is none of this name."""
    if name not in MODELS:
        raise WorkloadError(f"there is no model {name!r}", f"there are {', '.join(MODELS)}")
    usual = "adamw" if name in TRANSFORMERS else "sgd"
    return Workload(name=name, tensors=tuple(MODELS[name]()), trained_with=usual)


def _with_bias(name: str, *shape: int, outputs: int = 0) -> Tensors:
    """A layer or a norm with a bias for each of its outputs, the dimension of this index."""
    yield Tensor(name=f"{name}.weight", shape=shape)
    yield Tensor(name=f"{name}.bias", shape=(shape[outputs],))


# ResNet


def _resnet(blocks: Sequence[int]) -> Tensors:
    """A ResNet of bottleneck blocks: 1 x 1 to the stage's width, 3 x 3, 1 x 1 to four times it."""
    yield Tensor(name="conv1.weight", shape=(64, 3, 7, 7))
    yield from _with_bias("bn1", 64)
    channels = 64
    for stage, count in enumerate(blocks):
        width = 64 << stage
        for block in range(count):
            yield from _bottleneck(f"layer{stage + 1}.{block}", channels, width)
            channels = 4 * width
    yield from _with_bias("fc", IMAGENET_CLASS_COUNT, channels)


def _bottleneck(name: str, channels: int, width: int) -> Tensors:
    shapes = [(width, channels, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)]
    for number, shape in enumerate(shapes, start=1):
        yield Tensor(name=f"{name}.conv{number}.weight", shape=shape)
        yield from _with_bias(f"{name}.bn{number}", shape[0])
    if channels != 4 * width:  # the shortcut must change width too
        yield Tensor(name=f"{name}.downsample.0.weight", shape=(4 * width, channels, 1, 1))
        yield from _with_bias(f"{name}.downsample.1", 4 * width)


# VGG


def _vgg(blocks: Sequence[tuple[int, int]]) -> Tensors:
    """Blocks of (number, width) 3 x 3 layers; layers without weights are numbered, too."""
    channels, number = 3, 0
    for count, width in blocks:
        for _ in range(count):
            yield from _with_bias(f"features.{number}", width, channels, 3, 3)
            channels = width
            number += 2  # and its ReLU
        number += 1  # the pooling
    for number, shape in (
        (0, (4096, 49 * channels)),
        (3, (4096, 4096)),
        (6, (IMAGENET_CLASS_COUNT, 4096)),
    ):
        yield from _with_bias(f"classifier.{number}", *shape)


# Transformers


def _bert(layers: int, width: int) -> Tensors:
    tables = (("word", 30522), ("position", 512), ("token_type", 2))
    for table, rows in tables:
        yield Tensor(name=f"embeddings.{table}_embeddings.weight", shape=(rows, width))
    yield from _with_bias("embeddings.LayerNorm", width)
    parts = {
        **{f"attention.self.{part}": (width, width) for part in ("query", "key", "value")},
        "attention.output.dense": (width, width),
        "attention.output.LayerNorm": (width,),
        "intermediate.dense": (4 * width, width),
        "output.dense": (width, 4 * width),
        "output.LayerNorm": (width,),
    }
    for layer, (part, shape) in product(range(layers), parts.items()):
        yield from _with_bias(f"encoder.layer.{layer}.{part}", *shape)
    yield from _with_bias("pooler.dense", width, width)


def _gpt2(layers: int, width: int) -> Tensors:
    """GPT-2, whose layers have the inputs first in their shapes."""
    yield Tensor(name="transformer.wte.weight", shape=(50257, width))
    yield Tensor(name="transformer.wpe.weight", shape=(1024, width))
    parts = {
        "ln_1": (width,),
        "attn.c_attn": (width, 3 * width),
        "attn.c_proj": (width, width),
        "ln_2": (width,),
        "mlp.c_fc": (width, 4 * width),
        "mlp.c_proj": (4 * width, width),
    }
    for layer, (part, shape) in product(range(layers), parts.items()):
        yield from _with_bias(f"transformer.h.{layer}.{part}", *shape, outputs=-1)
    yield from _with_bias("transformer.ln_f", width)


MODELS: dict[str, Callable[[], Tensors]] = {
    "resnet50": lambda: _resnet((3, 4, 6, 3)),
    "resnet101": lambda: _resnet((3, 4, 23, 3)),
    "vgg19": lambda: _vgg(((2, 64), (2, 128), (4, 256), (4, 512), (4, 512))),
    "bert-base": lambda: _bert(12, 768),
    "bert-large": lambda: _bert(24, 1024),
    "gpt2": lambda: _gpt2(12, 768),
}
TRANSFORMERS = ("bert-base", "bert-large", "gpt2")
