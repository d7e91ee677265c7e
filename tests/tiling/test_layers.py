"""A tiled layer computes what the whole layer computes.

Small whole numbers make every product and sum exact in fp32, whatever the order, so that equality is of bits. With other
numbers each tile has the bits that torch gives for its part, and what is summed over the tiles is close.
"""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.tiling import tile
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from zero_plugin.tiling import TiledEmbedding, TiledLinear
from zero_plugin.tiling.cut import Cut, edges

INPUTS, OUTPUTS = 24, 50


def whole_numbers(*shape: int) -> Tensor:
    return torch.randint(-3, 4, shape).float()


def exact(layer: nn.Module) -> Any:
    """The layer with small whole numbers for parameters."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(whole_numbers(*parameter.shape))
    return layer


LAYERS = {
    "linear": lambda: nn.Linear(INPUTS, OUTPUTS),
    "no bias": lambda: nn.Linear(INPUTS, OUTPUTS, bias=False),
    "conv1d": lambda: Conv1D(OUTPUTS, INPUTS),
}
CUTS = {
    "several outputs": {"max_bytes": 1000},
    "one output": {"max_bytes": 100},
    "also inputs": {"max_bytes": 40, "split_inputs": True},
}


def results(layer: Any, inputs: Tensor, gradient: Tensor) -> dict[str, Tensor]:
    """Outputs and gradients of the input and of the whole parameters."""
    inputs = inputs.clone().requires_grad_()
    outputs = layer(inputs)
    outputs.backward(gradient)
    assert inputs.grad is not None
    found = {"outputs": outputs.detach(), "inputs": inputs.grad, "weight": layer.weight.grad}
    if layer.bias is not None:
        found["bias"] = layer.bias.grad
    return {name: value.as_subclass(Tensor) for name, value in found.items()}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("shape", [(INPUTS,), (5, INPUTS), (2, 3, INPUTS), (0, INPUTS)])
def test_forward_and_gradients_are_equal(make: Any, cut: Any, shape: Any) -> None:
    plain = exact(make())
    tiled = tile(copy.deepcopy(plain), **cut)
    assert len(tiled.tiles) > 1
    inputs, gradient = whole_numbers(*shape), whole_numbers(*shape[:-1], OUTPUTS)
    expected, found = results(plain, inputs, gradient), results(tiled, inputs, gradient)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bias", [True, False])
def test_each_tile_has_the_bits_of_its_part(dtype: torch.dtype, bias: bool) -> None:
    plain = nn.Linear(INPUTS, OUTPUTS, bias=bias, dtype=dtype)
    tiled = tile(copy.deepcopy(plain), max_bytes=1000)
    inputs = torch.randn(2, 7, INPUTS, dtype=dtype)
    parts = [
        F.linear(
            inputs,
            plain.weight[start:stop].clone(),
            plain.bias[start:stop].clone() if bias else None,
        )
        for start, stop in tiled.cut.output_spans
    ]
    assert torch.equal(tiled(inputs), torch.cat(parts, dim=-1))
    gradient = torch.randn(2, 7, OUTPUTS, dtype=dtype)
    expected, found = results(plain, inputs, gradient), results(tiled, inputs, gradient)
    # A gradient of the input is rounded once more for each tile.
    tolerance = 2 * len(tiled.tiles) * torch.finfo(dtype).eps
    for name, value in expected.items():
        scale = value.abs().max().item()
        assert (found[name] - value).abs().max().item() <= tolerance * scale, name


@pytest.mark.parametrize("limit", [100, 101, 256, 1000, 2048])
def test_tiles_are_within_the_limit_and_own_their_storage(limit: int) -> None:
    tiled = tile(nn.Linear(INPUTS, OUTPUTS), max_bytes=limit)
    for part in tiled.tiles:
        assert sum(p.numel() * p.element_size() for p in part.parameters()) <= limit
        for parameter in part.parameters():
            assert type(parameter) is nn.Parameter
            assert parameter.is_contiguous()
            assert parameter.untyped_storage().nbytes() == parameter.numel() * 4
        assert part.is_gather_unit


@pytest.mark.parametrize(
    ("total", "most", "expected"),
    [
        (10, 10, (0, 10)),
        (10, 9, (0, 5, 10)),
        (1000, 300, (0, 256, 512, 768, 1000)),
        (1000, 255, (0, 250, 500, 750, 1000)),
        (1000, 270, (0, 256, 512, 768, 1000)),
        (3, 1, (0, 1, 2, 3)),
    ],
)
def test_edges(total: int, most: int, expected: tuple[int, ...]) -> None:
    found = edges(total, most)
    assert found == expected
    assert found[0] == 0
    assert found[-1] == total
    assert all(0 < b - a <= most for a, b in itertools.pairwise(found))
    assert len(found) - 1 == -(-total // most)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_cut_joins_what_it_cuts(transposed: bool) -> None:
    cut = Cut(outputs=(0, 3, 5, 9), inputs=(0, 4, 6), transposed=transposed)
    weight = torch.randn(cut.shape)
    assert cut.shape == ((6, 9) if transposed else (9, 6))
    pieces = cut.pieces(weight)
    assert len(pieces) == 6
    assert torch.equal(cut.join(pieces), weight)


def test_a_layer_within_the_limit_stays_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 40))
    weight = model[0].weight
    tile(model, max_bytes=4 * 4 * 4 + 4 * 4)
    assert type(model[0]) is nn.Linear
    assert model[0].weight is weight
    assert type(model[1]) is TiledLinear


def test_the_object_its_hooks_and_attributes_stay() -> None:
    layer: Any = nn.Linear(INPUTS, OUTPUTS)
    calls: list[str] = []
    layer.register_forward_hook(lambda *_: calls.append("forward"))
    layer.register_full_backward_hook(lambda *_: calls.append("backward"))
    layer.note = "kept"
    layer.weight.note = "also kept"
    layer.eval()
    assert tile(layer, max_bytes=1000) is layer
    layer(torch.randn(2, INPUTS, requires_grad=True)).sum().backward()
    assert calls == ["forward", "backward"]
    assert layer.note == "kept"
    assert {tile.weight.note for tile in layer.tiles} == {"also kept"}
    assert not any(tile.training for tile in layer.tiles)
    assert isinstance(layer, nn.Linear)
    assert (layer.in_features, layer.out_features) == (INPUTS, OUTPUTS)


def test_gradients_and_frozen_weights_are_taken_over() -> None:
    layer: Any = nn.Linear(INPUTS, OUTPUTS)
    layer(torch.randn(3, INPUTS)).sum().backward()
    layer.bias.requires_grad_(False)
    weight, gradient = layer.weight.detach().clone(), layer.weight.grad
    tile(layer, max_bytes=1000)
    assert torch.equal(layer.weight, weight)
    assert torch.equal(layer.weight.grad, gradient)
    assert all(tile.weight.requires_grad and not tile.bias.requires_grad for tile in layer.tiles)
    assert layer.weight.requires_grad
    assert not layer.bias.requires_grad


def test_a_frozen_layer_passes_gradients_through() -> None:
    plain = exact(nn.Linear(INPUTS, OUTPUTS)).requires_grad_(False)
    tiled = tile(copy.deepcopy(plain), max_bytes=1000)
    values = whole_numbers(3, INPUTS)
    inputs: list[Any] = [values.clone().requires_grad_() for _ in range(2)]
    for layer, one in zip((plain, tiled), inputs, strict=True):
        layer(one).sum().backward()
    assert torch.equal(inputs[0].grad, inputs[1].grad)
    assert all(parameter.grad is None for parameter in tiled.parameters())


def test_under_autocast() -> None:
    plain: Any = nn.Linear(INPUTS, OUTPUTS)
    tiled = tile(copy.deepcopy(plain), max_bytes=1000)
    inputs = torch.randn(3, INPUTS)
    found: Any = inputs.clone().requires_grad_()
    expected: Any = inputs.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        one, other = plain(expected), tiled(found)
    assert other.dtype == torch.bfloat16
    torch.testing.assert_close(other, one)
    saved = [
        node
        for node in _nodes(other.grad_fn)
        if "ToCopy" in type(node).__name__ and not _is_weight(node)
    ]
    assert len(saved) == 1, "the input is cast once, not once a tile"
    one.float().sum().backward()
    other.float().sum().backward()
    torch.testing.assert_close(found.grad, expected.grad, rtol=0.05, atol=0.05)
    assert torch.equal(tiled.weight.grad, plain.weight.grad)


def _nodes(root: Any) -> set[Any]:
    seen: set[Any] = set()
    todo = [root]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [child for child, _ in node.next_functions]
    return seen


def _is_weight(node: Any) -> bool:
    variable = getattr(node.next_functions[0][0], "variable", None)
    return isinstance(variable, nn.Parameter)


@pytest.mark.parametrize("reentrant", [False, True])
def test_inside_a_checkpoint(reentrant: bool) -> None:
    model = tile(nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 8)), max_bytes=300)
    inputs = torch.randn(3, 8, requires_grad=True)
    model(inputs).sum().backward()
    expected: Any = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    checkpoint(model, inputs, use_reentrant=reentrant).sum().backward()
    assert all(
        torch.equal(parameter.grad, gradient)
        for parameter, gradient in zip(model.parameters(), expected, strict=True)
    )


def test_on_the_meta_device() -> None:
    with torch.device("meta"):
        layer: Any = nn.Linear(INPUTS, OUTPUTS)
    tile(layer, max_bytes=1000)
    assert layer(torch.empty(3, INPUTS, device="meta")).shape == (3, OUTPUTS)
    assert layer.weight.is_meta
    layer.to_empty(device="cpu")
    torch.manual_seed(5)
    layer.reset_parameters()
    torch.manual_seed(5)
    plain = nn.Linear(INPUTS, OUTPUTS)
    assert torch.equal(layer.weight, plain.weight)
    assert torch.equal(layer.bias, plain.bias)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_and_pickles(duplicate: Any) -> None:
    model: Any = nn.ModuleDict({"wte": nn.Embedding(20, 8), "head": nn.Linear(8, 20, bias=False)})
    model["head"].weight = model["wte"].weight
    tile(model, max_bytes=200)
    model.state_dict()
    other = duplicate(model)
    assert torch.equal(other["head"].weight, model["head"].weight)
    assert other["head"].tiles[0].weight is other["wte"].tiles[0].weight
    assert other["head"].tiles[0].weight is not model["head"].tiles[0].weight
    with torch.no_grad():
        other["head"].weight.zero_()
    assert not other["wte"].weight.any()
    assert model["wte"].weight.any()
    other.load_state_dict(model.state_dict(), assign=True)
    assert other["head"].tiles[0].weight is other["wte"].tiles[0].weight


def test_conversion_to_another_dtype() -> None:
    layer = tile(nn.Linear(INPUTS, OUTPUTS), max_bytes=1000).to(torch.bfloat16)
    assert layer.weight.dtype == torch.bfloat16
    assert layer(torch.randn(2, INPUTS, dtype=torch.bfloat16)).dtype == torch.bfloat16


# Embeddings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", [None, 0, 11, -1])
@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_embedding_is_equal(padding: int | None, scale: bool, dtype: torch.dtype) -> None:
    plain: Any = nn.Embedding(23, 6, padding_idx=padding, scale_grad_by_freq=scale)
    tiled = tile(copy.deepcopy(plain), max_bytes=120, embeddings=True)
    assert type(tiled) is TiledEmbedding
    assert len(tiled.tiles) == 5
    rows = torch.randint(0, 23, (4, 9), dtype=dtype)
    rows[0, :2] = torch.tensor([22, 11])
    gradient = torch.randn(4, 9, 6)
    plain(rows).backward(gradient)
    tiled(rows).backward(gradient)
    assert torch.equal(tiled(rows), plain(rows))
    assert torch.equal(tiled.weight.grad, plain.weight.grad)


def test_embedding_calls_every_tile() -> None:
    tiled = tile(nn.Embedding(20, 6), max_bytes=120, embeddings=True)
    calls: list[int] = []
    for number, part in enumerate(tiled.tiles):
        part.register_forward_pre_hook(lambda *_, number=number: calls.append(number))
    assert tiled(torch.tensor(3)).shape == (6,)
    assert tiled(torch.zeros(0, 2, dtype=torch.long)).shape == (0, 2, 6)
    assert calls == [0, 1, 2, 3] * 2


@pytest.mark.parametrize("row", [-1, 20, 1000])
def test_embedding_refuses_what_the_plain_one_refuses(row: int) -> None:
    tiled = tile(nn.Embedding(20, 6), max_bytes=120, embeddings=True)
    with pytest.raises(IndexError):
        tiled(torch.tensor([3, row]))


def test_embedding_alone_is_left_by_default() -> None:
    model = tile(nn.Sequential(nn.Embedding(20, 6), nn.Linear(6, 20)), max_bytes=120)
    assert type(model[0]) is nn.Embedding
    assert type(model[1]) is TiledLinear


def test_embedding_starts_over_with_the_same_values() -> None:
    tiled = tile(nn.Embedding(20, 6, padding_idx=7), max_bytes=120, embeddings=True)
    torch.manual_seed(1)
    tiled.reset_parameters()
    torch.manual_seed(1)
    assert torch.equal(tiled.weight, nn.Embedding(20, 6, padding_idx=7).weight)
