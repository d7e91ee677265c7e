"""Small models, each with one trait that sharded training has to get right, and their data.

All of them are deterministic for a seed, have odd sizes (so that no slice is even), and are written in plain torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 67
CONTEXT = 12


class Attention(nn.Module):
    """Causal self-attention, spelt out."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.mix = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        query, key, value = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.mix(hidden).split(width, dim=2)
        )
        scores = query @ key.transpose(2, 3) / math.sqrt(width / self.heads)
        ahead = torch.ones(length, length, dtype=torch.bool, device=hidden.device).triu(1)
        weights = scores.masked_fill(ahead, float("-inf")).softmax(dim=-1)
        return self.out((weights @ value).transpose(1, 2).reshape(batch, length, width))


class GPTBlock(nn.Module):
    """Attention and a GELU network, each behind a layer norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.norm_1(hidden))
        return hidden + self.down(F.gelu(self.up(self.norm_2(hidden))))


class TinyGPT(nn.Module):
    """A GPT whose head is its embedding; about 50 thousand parameters with the defaults.

    `forward(tokens)` returns the mean next-token loss.
    """

    def __init__(
        self, *, width: int = 44, layers: int = 2, heads: int = 4, vocabulary: int = VOCABULARY
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(GPTBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        with torch.no_grad():
            for table in (self.tokens, self.places):
                table.weight.mul_(0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1] - 1
        hidden = self.tokens(tokens[:, :-1]) + self.places.weight[:length]
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def make_gpt(dtype: torch.dtype = torch.float32, *, seed: int = 0, **options: Any) -> TinyGPT:
    """A seeded `TinyGPT` whose compute weights are of `dtype`."""
    torch.manual_seed(seed)
    return TinyGPT(**options).to(dtype)


def gpt_batch(step: int, *, rank: int = 0, batch: int = 3) -> Tensor:
    """Tokens [batch, 12] of one micro-batch; other ones for every step and rank. Learnable: each doubles the last."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    first = torch.randint(VOCABULARY, (batch, 1), generator=generator)
    return torch.cat([(first * 2**place + place) % VOCABULARY for place in range(CONTEXT)], dim=1)


class TinyMLP(nn.Module):
    """7 -> 13 -> 5 with odd sizes; `forward(features)` returns [batch, 5]."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.second = nn.Linear(13, 5)

    def forward(self, features: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(features)))


class OddMLP(TinyMLP):
    """`TinyMLP` with a zero-sized, a one-element, a frozen and a never-used parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.scale = nn.Parameter(torch.ones(()))
        self.frozen = nn.Parameter(torch.full((5,), 0.25), requires_grad=False)
        self.unused = nn.Parameter(torch.linspace(-1.0, 1.0, 11))

    def forward(self, features: Tensor) -> Tensor:
        return super().forward(features) * self.scale + self.frozen + self.empty.sum()


class BranchMLP(nn.Module):
    """A shared layer and experts of which a call uses those it names, as in a mixture of experts."""

    def __init__(self, experts: int = 3) -> None:
        super().__init__()
        self.shared = nn.Linear(7, 9)
        self.experts = nn.ModuleList(nn.Linear(9, 5) for _ in range(experts))

    def forward(self, features: Tensor, *chosen: int) -> Tensor:
        hidden = torch.tanh(self.shared(features))
        nothing = torch.zeros(len(features), 5)
        return sum((self.experts[number](hidden) for number in chosen), nothing)


class NormMLP(nn.Module):
    """`TinyMLP`'s layers around a batch norm, which has buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.norm = nn.BatchNorm1d(13)
        self.second = nn.Linear(13, 5)

    def forward(self, features: Tensor) -> Tensor:
        return self.second(torch.tanh(self.norm(self.first(features))))


def make(factory: Callable[[], nn.Module], *, seed: int = 0) -> Any:
    """A seeded model."""
    torch.manual_seed(seed)
    return factory()


def features(step: int, *, rank: int = 0, batch: int = 6) -> Tensor:
    """Inputs [batch, 7] of the MLPs; other ones for every step and rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank + 1)
    return torch.randn(batch, 7, generator=generator)


def mlp_loss(model: nn.Module, step: int, *chosen: int, rank: int = 0, batch: int = 6) -> Tensor:
    """Mean squared distance of the outputs from a fixed function of the inputs."""
    inputs = features(step, rank=rank, batch=batch)
    target = torch.stack([inputs.sum(dim=1) * factor for factor in (0.1, 0.2, 0.3, -0.1, 0.5)], 1)
    return F.mse_loss(model(inputs, *chosen), target)
