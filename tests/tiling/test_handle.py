"""`layer.weight` of a tiled layer: read as one tensor, written through, refused where a write would be lost."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.storages import LiveStorages
from support.tiling import tile
from torch import Tensor, nn

from zero_plugin.errors import ParameterError


def pair() -> tuple[Any, Any]:
    plain = nn.Linear(6, 20)
    return plain, tile(copy.deepcopy(plain), max_bytes=200)


def test_metadata_touches_no_tile() -> None:
    plain, tiled = pair()
    with LiveStorages() as live:
        found = [
            [
                *(w.shape, w.dtype, w.device, w.ndim, w.numel(), w.size(0), w.dim(), len(w)),
                *(w.requires_grad, w.is_leaf, w.is_floating_point(), w.stride(), w.nbytes),
                *(w.element_size(), w.is_cuda, w.layout, w.grad, w.is_meta, w.grad_fn),
                w.is_contiguous(),
            ]
            for w in (plain.weight, tiled.weight)
        ]
        hash(tiled.weight)
    assert found[0] == found[1]
    assert live.peak == 0


@pytest.mark.parametrize(
    "use",
    [
        lambda w, x: F.linear(x, w),
        lambda w, x: x @ w.t(),
        lambda w, x: (w[3] * w[:, 2:3]).sum() + x.sum(),
        lambda w, x: torch.stack([part.norm() for part in w.split(7)]),
        lambda w, x: w.float().pow(2).mean() + w.max(dim=0).values.sum(),
        lambda w, x: torch.nn.utils.parameters_to_vector([w]),
    ],
)
def test_computing_with_it_reaches_the_tiles(use: Callable[[Any, Tensor], Tensor]) -> None:
    plain, tiled = pair()
    inputs = torch.randn(3, 6)
    expected, found = use(plain.weight, inputs), use(tiled.weight, inputs)
    assert torch.equal(found, expected)
    expected.sum().backward()
    found.sum().backward()
    torch.testing.assert_close(tiled.weight.grad.as_subclass(Tensor), plain.weight.grad)
    assert tiled.bias.grad is None


def write_data(w: Any) -> None:
    w.data = torch.ones_like(w)


def write_item(w: Any) -> None:
    w[2] = 7.0


def write_augmented(w: Any) -> None:
    w.data += torch.full_like(w, 0.5)


WRITES: dict[str, Callable[[Any], Any]] = {
    "copy_": lambda w: w.copy_(torch.arange(120.0).view(20, 6)),
    "data.mul_": lambda w: w.data.mul_(3),
    "detach().zero_": lambda w: w.detach().zero_(),
    "data =": write_data,
    "data +=": write_augmented,
    "item": write_item,
    "itself": lambda w: w.data.add_(w),
    "init.normal_": lambda w: nn.init.normal_(w, std=0.1, generator=torch.Generator()),
    "init.zeros_": nn.init.zeros_,
    "torch.nn.utils.vector": lambda w: torch.nn.utils.vector_to_parameters(torch.ones(120), [w]),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writes_go_to_the_tiles(write: Callable[[Any], Any]) -> None:
    plain, tiled = pair()
    before = plain.weight.detach().clone()
    versions = [tile.weight._version for tile in tiled.tiles]
    with torch.no_grad():
        write(plain.weight)
        write(tiled.weight)
    assert not torch.equal(plain.weight, before)
    assert torch.equal(tiled.weight, plain.weight)
    assert torch.equal(torch.cat([tile.weight for tile in tiled.tiles]), plain.weight)
    assert [tile.weight._version for tile in tiled.tiles] > versions, "an engine has to see it"


def test_a_write_that_torch_refuses_is_refused() -> None:
    _, tiled = pair()
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        tiled.weight.zero_()
    assert tiled.weight.any()


def steal_bias(layer: Any) -> None:
    layer.bias = None


def new_weight(layer: Any) -> None:
    layer.weight = nn.Parameter(torch.zeros(20, 6))


def other_shape(layer: Any) -> None:
    layer.weight.data = torch.zeros(3, 6)


def other_dtype(layer: Any) -> None:
    layer.weight.data = torch.zeros(20, 6, dtype=torch.float64)


def set_gradient(layer: Any) -> None:
    layer.weight.grad = torch.zeros(20, 6)


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "row": (lambda m: m.weight[0].zero_(), "view of a tiled weight"),
    "rows": (lambda m: m.weight[:3].view(-1).fill_(1), "view of a tiled weight"),
    "transposed": (lambda m: m.weight.t().copy_(torch.zeros(6, 20)), "view of a tiled weight"),
    "part": (lambda m: m.weight.chunk(2)[1].zero_(), "view of a tiled weight"),
    "init.orthogonal_": (lambda m: nn.init.orthogonal_(m.weight), "view of a tiled weight"),
    "out": (lambda m: torch.zeros(20, 6, out=m.weight.data), "no meaning"),
    "gradient": (lambda m: (m(torch.ones(6)).sum().backward(), m.weight.grad.zero_()), "view"),
    "address": (lambda m: m.weight.data_ptr(), "no meaning"),
    "storage": (lambda m: m.weight.untyped_storage(), "no meaning"),
    "reshape": (lambda m: m.weight.data.t_(), "no meaning"),
    "hook": (lambda m: m.weight.register_hook(print), "no meaning"),
    "freeze a copy": (lambda m: nn.Parameter(m.weight.data), "no meaning"),
    "bias": (steal_bias, "TiledLinear.bias lies in tiles"),
    "weight": (new_weight, "TiledLinear.weight lies in tiles"),
    "shape": (other_shape, r"\(3, 6\)"),
    "dtype": (other_dtype, "torch.float64"),
    "grad": (set_gradient, "no meaning"),
}


@pytest.mark.parametrize(("act", "message"), REFUSED.values(), ids=REFUSED)
def test_what_would_be_lost_is_refused(act: Callable[[Any], Any], message: str) -> None:
    plain, tiled = pair()
    grad = "backward" in act.__code__.co_names
    with torch.set_grad_enabled(grad), pytest.raises(ParameterError, match=message):
        act(tiled)
    assert torch.equal(tiled.weight, plain.weight)
    assert torch.equal(tiled.bias, plain.bias)
    assert all(parameter.requires_grad for parameter in tiled.parameters())


def test_freezing_acts_on_the_tiles() -> None:
    _, tiled = pair()
    tiled.weight.requires_grad = False
    tiled.bias.requires_grad_(False)
    assert not any(parameter.requires_grad for parameter in tiled.parameters())
    tiled.requires_grad_(True)
    assert tiled.weight.requires_grad


def test_gradient_is_cleared_in_all_tiles() -> None:
    _, tiled = pair()
    tiled(torch.ones(6)).sum().backward()
    tiled.weight.grad = None
    assert all(tile.weight.grad is None for tile in tiled.tiles)
    assert tiled.bias.grad is not None


def test_assigning_what_is_there_does_nothing() -> None:
    model: Any = nn.ModuleDict({"wte": nn.Embedding(20, 8), "head": nn.Linear(8, 20, bias=False)})
    model["head"].weight = model["wte"].weight
    tile(model, max_bytes=200)
    model["head"].weight = model["wte"].weight
    model["head"].bias = None
    assert model["head"].tiles[0].weight is model["wte"].tiles[0].weight


def test_a_copy_is_a_tensor_of_its_own() -> None:
    plain, tiled = pair()
    copied = copy.deepcopy(tiled.weight)
    assert type(copied) is Tensor
    assert copied.requires_grad
    assert torch.equal(copied, plain.weight)
    clone = tiled.weight.detach().clone()
    clone.zero_()
    assert tiled.weight.any()
    assert repr(tiled.weight.detach()) == repr(plain.weight.detach())
    assert repr(tiled).startswith("TiledLinear(\n  in_features=6, out_features=20, bias=True")
