"""Tiling a model that is built straight into shards, and embeddings of a class of the model's own."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from support.tiling import tile
from support.training import adamw, assert_same_bits, engine_for, ranks
from torch import Tensor, nn

import zero_plugin
from zero_plugin.config import ZeroConfig
from zero_plugin.errors import EngineStateError
from zero_plugin.sharding.guard import ReleasedParameter
from zero_plugin.tiling import TiledEmbedding, TiledLinear

LIMIT = 400


class Scaled(nn.Embedding):
    """An embedding that scales what it finds, as Gemma's does."""

    scale: Tensor

    def __init__(self, rows: int, width: int) -> None:
        super().__init__(rows, width, padding_idx=3)
        self.register_buffer("scale", torch.tensor(width**0.5), persistent=False)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        return super().forward(input) * self.scale.to(self.weight.dtype)


class Language(nn.Module):
    """A tied head, a large linear layer, and small ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = Scaled(40, 8)
        self.up, self.down = nn.Linear(8, 30), nn.Linear(30, 8)
        self.head = nn.Linear(8, 40, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.words(tokens)
        hidden = hidden + self.down(torch.tanh(self.up(hidden)))
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten())


def tokens(step: int) -> Tensor:
    return torch.randint(0, 40, (2, 5), generator=torch.Generator().manual_seed(step))


def train(model: Any, settings: dict[str, Any]) -> dict[str, Tensor]:
    with engine_for(model, adamw(model.parameters()), **settings) as (engine, optimizer):
        for step in range(3):
            engine.backward(model(tokens(step)))
            optimizer.step()
            optimizer.zero_grad()
        with engine.full_params():
            return {name: value.clone() for name, value in model.state_dict().items()}


def in_shards(rank: int, size: int, params: str, path: str) -> Any:
    settings: dict[str, Any] = {"stage": 3, "params": params, "bucket_bytes": 1 << 20}
    if params == "nvme":
        settings["nvme_path"] = path
    with zero_plugin.init_context(ZeroConfig(**settings)):
        model = tile(Language(), max_bytes=LIMIT)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, ReleasedParameter), name
        assert parameter.numel() * 4 <= LIMIT, name
    assert isinstance(model.words, TiledEmbedding)
    assert isinstance(model.up, TiledLinear)
    head: Any = model.head
    assert head.tiles[0].weight is model.words.tiles[0].weight
    found = train(model, settings)
    return found, train(tile(Language(), max_bytes=LIMIT), settings)


@pytest.mark.parametrize(("size", "params"), [(1, "nvme"), (2, "nvme"), (3, "device")])
def test_inside_the_context_it_is_as_for_a_plain_model(
    size: int, params: str, tmp_path: Any
) -> None:
    for found, expected in ranks(size, in_shards, params, str(tmp_path)):
        assert_same_bits(found, expected)


def too_late(rank: int, size: int) -> None:
    with zero_plugin.init_context(ZeroConfig(stage=3)):
        model = Language()
    before = list(model.named_parameters())
    with pytest.raises(EngineStateError, match=r"'words' were cut .* inside the context"):
        tile(model, max_bytes=LIMIT)
    assert all(
        name == other and parameter is same
        for (name, parameter), (other, same) in zip(before, model.named_parameters(), strict=True)
    )
    assert all(isinstance(parameter, ReleasedParameter) for parameter in model.parameters())
    tile(model, max_bytes="1MiB")


@pytest.mark.parametrize("size", [1, 2])
def test_after_the_context_it_is_refused(size: int) -> None:
    ranks(size, too_late)


def test_an_embedding_of_the_models_own_class_is_tiled_with_its_head() -> None:
    plain = Language()
    tiled: Any = tile(copy.deepcopy(plain), max_bytes=LIMIT)
    assert isinstance(tiled.words, Scaled)
    words: Any = tiled.words
    assert len(words.tiles) > 1
    assert tiled.state_dict().keys() == plain.state_dict().keys()
    for model in (tiled, copy.deepcopy(tiled), pickle.loads(pickle.dumps(tiled))):
        assert type(model.words) is type(tiled.words)
        assert torch.equal(model.words(tokens(0)), plain.words(tokens(0)))
        torch.testing.assert_close(model(tokens(1)), plain(tokens(1)))
    tiled.load_state_dict(plain.state_dict())
    assert torch.equal(tiled.words.weight.detach(), plain.words.weight)


def test_gemma_is_tiled_with_its_head() -> None:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "head_dim": 8,
        "num_hidden_layers": 1,
    }
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 64}
    torch.manual_seed(0)
    plain: Any = Gemma3ForCausalLM(Gemma3TextConfig(**sizes, **heads)).eval()
    tiled = tile(copy.deepcopy(plain), max_bytes=1600)
    assert isinstance(tiled.lm_head, TiledLinear)
    assert isinstance(tiled.get_input_embeddings(), TiledEmbedding)
    inputs = tokens(0)
    torch.testing.assert_close(tiled(inputs).logits, plain(inputs).logits)
