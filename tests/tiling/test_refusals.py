"""What cannot be tiled is left as it is and named, or refused before anything is changed."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.tiling import tile
from torch import nn
from transformers.pytorch_utils import Conv1D

from zero_plugin.errors import ConfigError, ParameterError
from zero_plugin.tiling import TiledEmbedding, TiledLinear


def unchanged(model: nn.Module, act: Callable[[], Any]) -> None:
    """Run `act`; the model has the same modules and parameters after it."""
    modules = [(name, module, type(module)) for name, module in model.named_modules()]
    parameters = list(model.named_parameters())
    act()
    assert [(name, module, type(module)) for name, module in model.named_modules()] == modules
    assert all(
        name == other_name and parameter is other
        for (name, parameter), (other_name, other) in zip(
            parameters, model.named_parameters(), strict=True
        )
    )


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        (99, r"max_bytes=99 is less than one output of '1.weight', which takes 100 bytes"),
        (0, r"max_bytes=0 is less than one output"),
        (-1, "max_bytes=-1 is negative"),
        ("lots", "max_bytes='lots' is not a byte count"),
        (1.5, "max_bytes=1.5 is not a byte count"),
        (True, "max_bytes=True is not a byte count"),
    ],
)
def test_sizes(limit: Any, message: str) -> None:
    # The first layer could be tiled at 99 bytes; nothing is, since the second cannot.
    model = nn.Sequential(nn.Linear(2, 24), nn.Linear(24, 9))

    def act() -> None:
        with pytest.raises(ConfigError, match=message):
            tile(model, max_bytes=limit)

    unchanged(model, act)


def test_less_than_one_element() -> None:
    with pytest.raises(ConfigError, match="one element of 'weight': give at least 8"):
        tile(nn.Linear(24, 9), max_bytes=7, split_inputs=True)
    assert len(tile(nn.Linear(24, 9), max_bytes=8, split_inputs=True).tiles) == 24 * 9


def test_inputs_of_a_tied_weight_are_not_split() -> None:
    model = nn.ModuleDict({"wte": nn.Embedding(20, 8), "head": nn.Linear(8, 20, bias=False)})
    model["head"].weight = model["wte"].weight
    with pytest.raises(ConfigError, match=r"one output of 'wte.weight'"):
        tile(model, max_bytes=31, split_inputs=True)


@pytest.mark.parametrize("thing", [None, torch.zeros(3), [nn.Linear(2, 2)], nn.Linear])
def test_not_a_module(thing: Any) -> None:
    with pytest.raises(ConfigError, match=r"takes a torch.nn.Module"):
        tile(thing, max_bytes=100)


def test_tiling_again() -> None:
    model = nn.Sequential(nn.Linear(6, 20), nn.Linear(20, 6))
    tile(model, max_bytes=200)
    unchanged(model, lambda: tile(model, max_bytes=200))
    unchanged(model, lambda: tile(model, max_bytes="1GiB"))

    def act() -> None:
        with pytest.raises(ConfigError, match="'0' is in tiles of up to 196 bytes already"):
            tile(model, max_bytes=100)

    unchanged(model, act)


def test_a_tiled_layer_is_not_built_directly() -> None:
    for kind in (TiledLinear, TiledEmbedding):
        with pytest.raises(ConfigError, match=r"call zero_plugin\.tile_linears"):
            kind(3, 4)


def test_hooks_on_a_parameter() -> None:
    layer = nn.Linear(6, 20)
    handle = layer.weight.register_hook(lambda gradient: gradient)

    def act() -> None:
        with pytest.raises(ParameterError, match="'Linear' has hooks"):
            tile(layer, max_bytes=200)

    unchanged(layer, act)
    handle.remove()
    tile(layer, max_bytes=200)


class OwnLinear(nn.Linear):
    """Some library's own layer."""


class Borrower(nn.Module):
    """Registers another module's parameter."""

    def __init__(self, parameter: nn.Parameter) -> None:
        super().__init__()
        self.borrowed = parameter


def replaced_forward(layer: Any) -> nn.Linear:
    layer.forward = lambda features: features
    return layer


def with_buffer(layer: nn.Linear) -> nn.Linear:
    layer.register_buffer("scale", torch.ones(1))
    return layer


def borrowed(name: str) -> nn.ModuleList:
    layer = nn.Linear(6, 20)
    return nn.ModuleList([layer, Borrower(getattr(layer, name))])


def turned() -> nn.ModuleList:
    first = nn.Linear(9, 9)
    second: Any = Conv1D(9, 9)
    second.weight = first.weight
    return nn.ModuleList([first, second])


def special_embedding(**options: Any) -> nn.ModuleList:
    lookup, head = nn.Embedding(20, 6, **options), nn.Linear(6, 20)
    head.weight = lookup.weight
    return nn.ModuleList([lookup, head])


class Wrapped(torch.Tensor):
    """A tensor subclass, as quantised weights are."""


def quantised() -> nn.Linear:
    layer = nn.Linear(6, 20)
    layer.weight = nn.Parameter(torch.zeros(20, 6).as_subclass(Wrapped))
    return layer


def integers() -> nn.Linear:
    layer = nn.Linear(6, 20)
    layer.weight = nn.Parameter(torch.zeros(20, 6, dtype=torch.int32), requires_grad=False)
    return layer


LEFT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "subclass": (lambda: OwnLinear(6, 20), "OwnLinear"),
    "parametrised": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 200)),
        "ParametrizedLinear",
    ),
    "forward": (lambda: replaced_forward(nn.Linear(6, 20)), "replaced forward"),
    "buffer": (lambda: with_buffer(nn.Linear(6, 20)), "buffers or children"),
    "borrowed weight": (lambda: borrowed("weight"), r"Borrower \(1.borrowed\)"),
    "borrowed bias": (lambda: borrowed("bias"), "shares its bias"),
    "orientation": (turned, "different orientations"),
    "max_norm": (lambda: special_embedding(max_norm=1.0), "max_norm"),
    "sparse": (lambda: special_embedding(sparse=True), "sparse gradients"),
    "tensor subclass": (quantised, "plain dense floating-point"),
    "integers": (integers, "plain dense floating-point"),
}


@pytest.mark.parametrize(("make", "reason"), LEFT.values(), ids=LEFT)
def test_left_alone_and_said(
    make: Callable[[], nn.Module], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = make()
    with caplog.at_level(logging.WARNING, logger="zero_plugin"):
        unchanged(model, lambda: tile(model, max_bytes=200))
    if reason == "ParametrizedLinear":
        # Its weight is computed from parameters of other modules: none of them is a layer's own weight.
        assert caplog.text == ""
        return
    assert "larger than max_bytes=200 but not tiled" in caplog.text
    assert caplog.text.count("\n") == 1
    assert re.search(reason, caplog.text)


def test_nothing_is_said_when_all_is_tiled(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        tile(nn.Sequential(nn.Linear(6, 20), nn.Linear(20, 2)), max_bytes=200)
    assert caplog.text == ""


def test_layers_that_share_a_weight_but_not_a_bias() -> None:
    first, second = nn.Linear(6, 20), nn.Linear(6, 20)
    second.weight = first.weight
    plain = nn.ModuleList([first, second])
    tiled = tile(copy.deepcopy(plain), max_bytes=200)
    inputs = torch.randn(3, 6)
    for number in (0, 1):
        torch.testing.assert_close(tiled[number](inputs), plain[number](inputs))
    assert tiled[0].tiles[0].weight is tiled[1].tiles[0].weight
    assert tiled[0].tiles[0].bias is not tiled[1].tiles[0].bias
