"""A character-level GPT that learns Python from the source of the standard library.

The text is that of modules that every version since 3.11 has as one file, 1.1 MB, and the alphabet
is printable ASCII, so the shape of the model doesn't depend on the version, only its data does. The
last tenth of the text is held out.
"""

from __future__ import annotations

import sysconfig
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from thalweg.errors import WorkloadError
from thalweg.workloads.job import Batch, Job, JobKind, mean_loss, seeded

MODULES = (
    "argparse",
    "difflib",
    "doctest",
    "enum",
    "inspect",
    "ipaddress",
    "mailbox",
    "optparse",
    "pickletools",
    "subprocess",
    "tarfile",
    "typing",
)
ALPHABET = "\n" + "".join(map(chr, range(ord(" "), ord("~") + 1)))
TINYGPT_HELD_OUT_FRACTION = 0.1
EVALUATED_WINDOW_COUNT = 128
CONTEXT = 64  # characters of a window
STRIDE = 16  # characters between the starts of two windows to train with
WIDTH = 128
HEADS = 4
BLOCKS = 3


def make(name: str) -> Job:
    text = encoded(_source())
    split = round(len(text) * (1 - TINYGPT_HELD_OUT_FRACTION))
    held_out = windows(text[split:], CONTEXT)
    distance = len(held_out[0]) // EVALUATED_WINDOW_COUNT  # in windows
    evaluated = tuple(part[::distance][:EVALUATED_WINDOW_COUNT] for part in held_out)
    return Job(
        name=name,
        model=seeded(GPT),
        data=TensorDataset(*windows(text[:split], STRIDE)),
        losses=losses,
        optimizer=partial(torch.optim.AdamW, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1),
        metric="loss",
        evaluate=mean_loss(losses, evaluated),
        batch=32,
    )


class GPT(nn.Module):
    """A transformer with pre-norm, learned positions and no dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(ALPHABET), WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, len(ALPHABET), bias=False)
        self.apply(_initialise)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        places = torch.arange(characters.shape[1], device=characters.device)
        x = self.characters(characters) + self.positions(places)
        scores: torch.Tensor = self.head(self.norm(self.blocks(x)))
        return scores


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.GELU(),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        change: torch.Tensor = self.mlp(self.mlp_norm(x))
        return x + change


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # Without a bias: the gradient of the keys' bias is rounding error, which Adam amplifies.
        self.queries_keys_values = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, _ = x.shape
        heads = self.queries_keys_values(x).view(batch, time, 3, HEADS, WIDTH // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        joined: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, time, WIDTH))
        return joined


def losses(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The loss of each window: the mean over its characters."""
    characters, following = batch
    scores = model(characters).transpose(1, 2)
    return functional.cross_entropy(scores, following, reduction="none").mean(dim=1)


def encoded(text: str) -> torch.Tensor:
    """The index of each character in the alphabet; other characters are dropped."""
    places = {character: place for place, character in enumerate(ALPHABET)}
    return torch.tensor([places[character] for character in text if character in places])


def windows(text: torch.Tensor, stride: int) -> Batch:
    """Windows of the text, and the same windows one character later, as views of the text."""
    longer = text.unfold(0, CONTEXT + 1, stride)  # by the following character
    return longer[:, :-1], longer[:, 1:]


def _initialise(module: nn.Module) -> None:
    """Draw small initial weights, as GPT-2 does, so that the first outputs are nearly uniform."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def _source() -> str:
    library = Path(sysconfig.get_path("stdlib"))
    try:
        return "\n".join((library / f"{name}.py").read_text(encoding="utf-8") for name in MODULES)
    except OSError as error:
        raise WorkloadError(
            f"tinygpt can't read Python's own source: {error.strerror} ({error.filename})",
            "use a Python with its standard library as files, or another job",
        ) from None


JOB = JobKind(
    name="tinygpt",
    summary="Python's own source, a character-level GPT of 0.63 M parameters",
    make=make,
)
