"""Whole models: GPT-2 with its tied head and Conv1D layers, Llama, and adapters around tiled layers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.tiling import tile
from support.training import assert_same_bits
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

from zero_plugin import tiled_cross_entropy
from zero_plugin.tiling import TiledEmbedding, TiledLinear

VOCABULARY = 67


def gpt2() -> Any:
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=16,
        n_embd=32,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    config.loss_type = "ForCausalLM"
    return GPT2LMHeadModel(config).eval()


def llama() -> Any:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=88,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    return LlamaForCausalLM(config).eval()


MODELS = {"gpt2": gpt2, "llama": llama}


def read(model: nn.Module, name: str) -> Any:
    """A parameter by the name it has in the plain model."""
    owner, _, leaf = name.rpartition(".")
    return getattr(model.get_submodule(owner), leaf)


def assert_close_gradients(tiled: nn.Module, plain: nn.Module) -> None:
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        gradient = read(tiled, name).grad.as_subclass(Tensor)
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_loss_and_gradients(make: Any, dtype: torch.dtype) -> None:
    plain = make().to(dtype)
    tiled = tile(copy.deepcopy(plain), max_bytes="3 kB")
    tokens = torch.randint(0, VOCABULARY, (3, 12))
    expected, found = plain(tokens, labels=tokens), tiled(tokens, labels=tokens)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-5, atol=1e-6)
    expected.loss.backward()
    found.loss.backward()
    assert_close_gradients(tiled, plain)


def test_gpt2_is_tiled_everywhere() -> None:
    model = tile(gpt2(), max_bytes=3000)
    assert type(model.lm_head) is TiledLinear
    assert type(model.transformer.wte) is TiledEmbedding
    assert model.lm_head.tiles[2].weight is model.transformer.wte.tiles[2].weight
    layer: Any = model.transformer.h[0].attn.c_attn
    assert len(layer.tiles) > 3
    assert tuple(layer.weight.shape) == (32, 96)
    assert issubclass(type(layer), Conv1D)
    assert model.get_output_embeddings() is model.lm_head
    sizes = [p.nbytes for tile in layer.tiles for p in tile.parameters()]
    assert max(sizes) <= 3000
    assert model.num_parameters() == gpt2().num_parameters()


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_saved_models_are_plain_ones(make: Any, tmp_path: Any) -> None:
    plain = make()
    tiled = tile(copy.deepcopy(plain), max_bytes=3000, embeddings=True)
    tiled.save_pretrained(tmp_path)
    again = type(plain).from_pretrained(tmp_path)
    assert_same_bits(dict(again.state_dict()), dict(plain.state_dict()))
    with torch.device("meta"):
        empty = tile(type(plain)(plain.config), max_bytes=3000)
    assert list(empty.load_state_dict(plain.state_dict(), assign=True)) == [[], []]
    assert_same_bits(dict(empty.state_dict()), dict(plain.state_dict()))


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_generation(make: Any) -> None:
    plain = make().double()
    tiled = tile(copy.deepcopy(plain), max_bytes=6000)
    prompt = torch.randint(1, VOCABULARY, (2, 4))
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones_like(prompt)
    assert torch.equal(
        tiled.generate(prompt, attention_mask=mask, **options),
        plain.generate(prompt, attention_mask=mask, **options),
    )


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_activation_checkpointing_and_the_loss_in_chunks(make: Any) -> None:
    plain = make()
    tiled = tile(copy.deepcopy(plain), max_bytes=3000)
    tiled.gradient_checkpointing_enable()
    tiled.train()
    for module in tiled.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    tokens = torch.randint(0, VOCABULARY, (3, 12))
    expected = plain(tokens, labels=tokens).loss
    expected.backward()
    states = tiled.base_model(tokens).last_hidden_state
    loss = tiled_cross_entropy(states[:, :-1], tiled.lm_head, tokens[:, 1:], chunk_tokens=8)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert_close_gradients(tiled, plain)


class Adapter(nn.Module):
    """A LoRA adapter as peft builds it: the frozen layer inside is called and asked for its sizes, dtype and device."""

    def __init__(self, base_layer: Any) -> None:
        super().__init__()
        if not isinstance(base_layer, nn.Linear):
            raise TypeError(type(base_layer))
        self.base_layer = base_layer
        weight = base_layer.weight
        self.down = nn.Linear(base_layer.in_features, 2, bias=False).to(weight.device, weight.dtype)
        self.up = nn.Linear(2, base_layer.out_features, bias=False).to(weight.device, weight.dtype)
        base_layer.requires_grad_(False)

    def forward(self, features: Tensor) -> Tensor:
        return self.base_layer(features) + self.up(self.down(features.to(self.down.weight.dtype)))

    @torch.no_grad()
    def merge(self) -> None:
        self.base_layer.weight.data += self.up.weight @ self.down.weight


@pytest.mark.parametrize("wrapped_first", [False, True])
def test_adapters_around_tiled_layers(wrapped_first: bool) -> None:
    layer = nn.Linear(24, 50)
    torch.manual_seed(1)
    plain = Adapter(copy.deepcopy(layer))
    torch.manual_seed(1)
    if wrapped_first:
        tiled = tile(Adapter(layer), max_bytes=1000)
    else:
        tiled = Adapter(tile(layer, max_bytes=1000))
    assert type(tiled.base_layer) is TiledLinear
    assert_same_bits(dict(tiled.state_dict()), dict(plain.state_dict()))
    inputs = torch.randn(3, 24)
    for model in (plain, tiled):
        F.mse_loss(model(inputs), torch.ones(3, 50)).backward()
    trained = [name for name, p in tiled.named_parameters() if p.grad is not None]
    assert trained == ["down.weight", "up.weight"]
    torch.testing.assert_close(tiled.up.weight.grad, plain.up.weight.grad)
    torch.testing.assert_close(tiled.down.weight.grad, plain.down.weight.grad)
    for model in (plain, tiled):
        model.merge()
    assert torch.equal(tiled.base_layer.weight, plain.base_layer.weight)
    torch.testing.assert_close(tiled.base_layer(inputs), plain.base_layer(inputs))
