"""A GPT that learns to write Python from the standard library's own source, character by character.

The text is that of modules that every version since 3.11 has as one file, 1.1 MB, and the alphabet
is printable ASCII, so the model's shape doesn't depend on the version; what it reads does. The
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
EVALUATED_WINDOW_COUNT = 128  # held-out windows

CONTEXT = 64
STRIDE = 16
TINYGPT_WIDTH_ELEMENTS = 128
HEADS = 4
BLOCKS = 3


def make(name: str) -> Job:
    text = encoded(_source())
    training = round(len(text) * (1 - TINYGPT_HELD_OUT_FRACTION))
    held_out = windows(text[training:], CONTEXT)
    apart = len(held_out[0]) // EVALUATED_WINDOW_COUNT
    return Job(
        name=name,
        model=seeded(GPT),
        data=TensorDataset(*windows(text[:training], STRIDE)),
        losses=losses,
        optimizer=partial(torch.optim.AdamW, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1),
        metric="loss",
        evaluate=mean_loss(
            losses, tuple(part[::apart][:EVALUATED_WINDOW_COUNT] for part in held_out)
        ),
        batch=32,
    )


class GPT(nn.Module):
    """Pre-norm, learned positions, no dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(ALPHABET), TINYGPT_WIDTH_ELEMENTS)
        self.positions = nn.Embedding(CONTEXT, TINYGPT_WIDTH_ELEMENTS)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.norm = nn.LayerNorm(TINYGPT_WIDTH_ELEMENTS)
        self.head = nn.Linear(TINYGPT_WIDTH_ELEMENTS, len(ALPHABET), bias=False)
        self.apply(_start_small)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        places = torch.arange(characters.shape[1], device=characters.device)
        x = self.characters(characters) + self.positions(places)
        scores: torch.Tensor = self.head(self.norm(self.blocks(x)))
        return scores


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(TINYGPT_WIDTH_ELEMENTS)
        self.attention = Attention()
        self.mlp_norm = nn.LayerNorm(TINYGPT_WIDTH_ELEMENTS)
        self.mlp = nn.Sequential(
            nn.Linear(TINYGPT_WIDTH_ELEMENTS, 4 * TINYGPT_WIDTH_ELEMENTS),
            nn.GELU(),
            nn.Linear(4 * TINYGPT_WIDTH_ELEMENTS, TINYGPT_WIDTH_ELEMENTS),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        change: torch.Tensor = self.mlp(self.mlp_norm(x))
        return x + change


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # Without a bias: that of the keys has no gradient but rounding errors, which Adam blows up.
        self.queries_keys_values = nn.Linear(
            TINYGPT_WIDTH_ELEMENTS, 3 * TINYGPT_WIDTH_ELEMENTS, bias=False
        )
        self.out = nn.Linear(TINYGPT_WIDTH_ELEMENTS, TINYGPT_WIDTH_ELEMENTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, _ = x.shape
        heads = self.queries_keys_values(x).view(
            batch, time, 3, HEADS, TINYGPT_WIDTH_ELEMENTS // HEADS
        )
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        joined: torch.Tensor = self.out(
            mixed.transpose(1, 2).reshape(batch, time, TINYGPT_WIDTH_ELEMENTS)
        )
        return joined


def losses(model: nn.Module, batch: Batch) -> torch.Tensor:
    """One for each window: the mean over its characters."""
    characters, following = batch
    scores = model(characters).transpose(1, 2)
    return functional.cross_entropy(scores, following, reduction="none").mean(dim=1)


def encoded(text: str) -> torch.Tensor:
    """Each character's place in the alphabet; those that aren't in it are left out."""
    places = {character: place for place, character in enumerate(ALPHABET)}
    return torch.tensor([places[character] for character in text if character in places])


def windows(text: torch.Tensor, stride: int) -> Batch:
    """Stretches of the text and, for each of their characters, the one that follows; all are views
    of the one text."""
    stretches = text.unfold(0, CONTEXT + 1, stride)
    return stretches[:, :-1], stretches[:, 1:]


def _start_small(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def _source() -> str:
    library = Path(sysconfig.get_path("stdlib"))
    try:
        return "\n".join(
            (library / f"{module}.py").read_text(encoding="utf-8") for module in MODULES
        )
    except OSError as error:
        raise WorkloadError(
            f"tinygpt reads Python's own source, and can't: {error.strerror} ({error.filename})",
            "use a Python with its standard library as files, or another job",
        ) from None


JOB = JobKind(
    name="tinygpt",
    summary="Python's own source, a character-level GPT of 0.63 M parameters",
    make=make,
)
