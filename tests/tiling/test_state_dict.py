"""Names, shapes and values in the state dict are those of the plain model, both ways."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from safetensors.torch import load_model, save_model
from support.models import make_gpt
from support.tiling import tile
from support.training import assert_same_bits
from torch import Tensor, nn


def models(**options: Any) -> tuple[Any, Any]:
    """The small GPT with its tied head, plain and tiled."""
    plain = make_gpt()
    return plain, tile(copy.deepcopy(plain), **{"max_bytes": 3000, **options})


def changed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    torch.manual_seed(9)
    drawn = {id(value): torch.randn_like(value) for value in state.values()}
    return {name: drawn[id(value)] for name, value in state.items()}


def test_the_model_is_tiled_and_tied() -> None:
    _, tiled = models()
    names = [name for name, _ in tiled.named_parameters()]
    assert "tokens.tiles.0.weight" in names
    assert not any(name.startswith("head.") for name in names)
    assert tiled.head.tiles[1].weight is tiled.tokens.tiles[1].weight


def test_out() -> None:
    plain, tiled = models()
    ours = tiled.state_dict()
    assert list(ours) == list(plain.state_dict())
    assert_same_bits(dict(ours), dict(plain.state_dict()))
    assert ours["head.weight"] is ours["tokens.weight"]
    assert all(type(value) is Tensor and value.is_contiguous() for value in ours.values())
    assert not any(value.requires_grad for value in ours.values())
    assert list(plain.load_state_dict(ours)) == [[], []]


@pytest.mark.parametrize("assign", [False, True])
def test_in(assign: bool) -> None:
    plain, tiled = models()
    plain.load_state_dict(changed(plain.state_dict()))
    assert list(tiled.load_state_dict(plain.state_dict(), assign=assign)) == [[], []]
    assert_same_bits(dict(tiled.state_dict()), dict(plain.state_dict()))
    assert tiled.head.tiles[1].weight is tiled.tokens.tiles[1].weight
    weights = [item.untyped_storage()._cdata for item in tiled.parameters()]
    assert len(set(weights)) == len(weights)
    tokens = torch.randint(0, 67, (2, 12))
    torch.testing.assert_close(tiled(tokens), plain(tokens))


def test_every_state_dict_is_new() -> None:
    _, tiled = models()
    first = tiled.state_dict()
    for parameter in tiled.parameters():
        parameter.data.add_(1.0)  # leaves no trace in the version
    second = tiled.state_dict()
    assert torch.equal(second["head.weight"], first["head.weight"] + 1)
    assert torch.equal(second["tokens.weight"], first["tokens.weight"] + 1)
    tiled.state_dict(destination=first, prefix="")
    assert torch.equal(first["tokens.weight"], second["tokens.weight"])


def test_layers_untied_by_hand_are_written_apart() -> None:
    _, tiled = models()
    tiled.head.tiles[0].weight = nn.Parameter(torch.zeros_like(tiled.head.tiles[0].weight))
    state = tiled.state_dict()
    assert state["head.weight"][0].eq(0).all()
    assert not state["tokens.weight"][0].eq(0).all()


def test_variables_are_kept_on_request() -> None:
    _, tiled = models()
    assert tiled.state_dict(keep_vars=True)["head.weight"].requires_grad


def test_a_prefix_and_a_part() -> None:
    _, tiled = models()
    assert list(tiled.head.state_dict(prefix="x.")) == ["x.weight"]
    tiled.head.load_state_dict({"weight": torch.ones(67, tiled.head.in_features)})
    assert tiled.tokens.weight.eq(1).all()


@pytest.mark.parametrize("assign", [False, True])
def test_wrong_entries_are_reported_as_torch_does(assign: bool) -> None:
    plain, tiled = models()
    wrong: dict[str, Any] = dict(plain.state_dict())
    wrong["head.weight"] = torch.zeros(3, 3)
    del wrong["blocks.0.attention.mix.bias"]
    wrong["blocks.0.attention.mix.tiles.0.bias"] = torch.zeros(3)
    messages: list[str] = []
    for model in (plain, tiled):
        with pytest.raises(RuntimeError) as caught:
            model.load_state_dict(wrong, assign=assign)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert "size mismatch for head.weight" in messages[0]


def test_missing_and_unexpected_names_are_returned() -> None:
    plain, tiled = models()
    some = dict(plain.state_dict())
    del some["tokens.weight"]
    some["head.scale"] = torch.zeros(1)
    found = tiled.load_state_dict(some, strict=False)
    assert found == plain.load_state_dict(some, strict=False)
    assert found.unexpected_keys == ["head.scale"]


def test_not_a_tensor() -> None:
    layer = tile(nn.Linear(8, 8, bias=False), max_bytes=64)
    with pytest.raises(RuntimeError, match=r"expected a torch.Tensor, received <class 'int'>"):
        layer.load_state_dict({"weight": 3})


def test_hooks_on_loading_and_saving_run() -> None:
    layer = nn.Linear(8, 8)
    layer.register_state_dict_post_hook(
        lambda module, state, prefix, _: state.update({prefix + "w": state.pop(prefix + "weight")})
    )
    layer.register_load_state_dict_pre_hook(
        lambda module, state, prefix, *_: state.update({prefix + "weight": state.pop(prefix + "w")})
    )
    tile(layer, max_bytes=64)
    state = layer.state_dict()
    assert sorted(state) == ["bias", "w"]
    assert list(layer.load_state_dict(state)) == [[], []]


def test_assigning_takes_dtype_and_keeps_frozen() -> None:
    layer = nn.Linear(8, 16).requires_grad_(False)
    tile(layer, max_bytes=128)
    layer.load_state_dict(nn.Linear(8, 16).bfloat16().state_dict(), assign=True)
    assert layer.weight.dtype == torch.bfloat16
    assert not any(parameter.requires_grad for parameter in layer.parameters())


def test_from_the_meta_device() -> None:
    plain = make_gpt()
    with torch.device("meta"):
        tiled = tile(make_gpt(), max_bytes=3000)
    with pytest.warns(UserWarning, match="copying from a non-meta parameter in the checkpoint"):
        tiled.head.load_state_dict(plain.head.state_dict())
    tiled.load_state_dict(plain.state_dict(), assign=True)
    assert_same_bits(dict(tiled.state_dict()), dict(plain.state_dict()))
    assert tiled.head.tiles[0].weight is tiled.tokens.tiles[0].weight


def test_through_torch_save_and_safetensors(tmp_path: Any) -> None:
    plain, tiled = models()
    buffer = io.BytesIO()
    torch.save(tiled.state_dict(), buffer)
    buffer.seek(0)
    assert_same_bits(dict(torch.load(buffer)), dict(plain.state_dict()))
    # The file that the plain model writes, byte for byte but for the choice of the tied name.
    file = tmp_path / "model.safetensors"
    save_model(tiled, str(file))
    fresh = make_gpt(seed=3)
    load_model(fresh, str(file))
    assert_same_bits(dict(fresh.state_dict()), dict(plain.state_dict()))
    other = tile(make_gpt(seed=3), max_bytes=5000)
    load_model(other, str(file))
    assert_same_bits(dict(other.state_dict()), dict(plain.state_dict()))


def test_loading_never_needs_a_second_whole_weight() -> None:
    from support.storages import LiveStorages

    layer = tile(nn.Linear(64, 512, bias=False), max_bytes=16384)
    state = {"weight": torch.randn(512, 64)}
    with LiveStorages([*layer.parameters(), *state.values()]) as live:
        layer.load_state_dict(state)
    assert live.largest == 0
