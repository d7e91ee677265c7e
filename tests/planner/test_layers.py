"""A few of the equal layers tell what all of them take: the same bytes as with every one of them laid out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.models import make_gpt
from support.planner_runs import SETTINGS
from support.training import config
from torch import nn

from zero_plugin import plan
from zero_plugin.config import ZeroConfig
from zero_plugin.planner.dry import DryModel, Footprint, meta_twin
from zero_plugin.planner.layers import Division, Layers
from zero_plugin.planner.models import load
from zero_plugin.sharding import units

LAYERS = 11
SMALL = 4 << 10
"""Bytes of a bucket that no two layers of these models share."""

LLAMA_70B = {
    "model_type": "llama",
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
    "vocab_size": 128256,
}


class Mixed(nn.Module):
    """Two kinds of layers, the second half of one kind frozen; a layer that is tied to another."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.ModuleList(nn.Linear(40, 40) for _ in range(LAYERS))
        self.narrow = nn.Sequential(*(nn.Linear(24, 24, bias=False) for _ in range(2 * LAYERS)))
        self.narrow[LAYERS:].requires_grad_(requires_grad=False)
        self.wide[7].weight = self.wide[2].weight
        self.head = nn.Linear(40, 3)


def gpt() -> nn.Module:
    return make_gpt(torch.bfloat16, width=32, layers=LAYERS)


MODELS: dict[str, Callable[[], nn.Module]] = {"GPT": gpt, "mixed": Mixed}

OTHERS: dict[str, dict[str, Any]] = {
    "a third on the device": {"stage": 2, "device_fraction": 0.34},
    "a third of stage 3 on the device": {"stage": 3, "device_fraction": 0.34},
    "a cache": {
        "stage": 3,
        "optimizer": "nvme",
        "nvme_buffer_bytes": "1MiB",
        "nvme_cache_bytes": "2MiB",
    },
    "moments in 8 bits": {"stage": 1, "moment_dtype": "int8"},
    "speculation": {"stage": 2, "speculate": True},
    "speculation with a limit": {"stage": 2, "speculate": True, "undo_bytes": 90_000},
    "some stay gathered": {"stage": 3, "persist_below": 33},
    "a delayed update": {"stage": 3, "params": "host", "delayed_update": True},
}


def settings_of(name: str, **more: Any) -> ZeroConfig:
    settings = {**{**SETTINGS, **OTHERS}[name], **more}
    if "nvme" in settings.values():
        settings["nvme_path"] = "nvme"
    return config(**settings)


def in_full(dry: DryModel, chosen: ZeroConfig, world_size: int, accumulate: int) -> Footprint:
    """With every layer laid out."""
    return dry._lay_out(dry.model, chosen, world_size, accumulate)


@pytest.mark.parametrize("name", [*SETTINGS, *OTHERS])
@pytest.mark.parametrize("model", MODELS)
def test_a_few_layers_tell_what_all_take(name: str, model: str) -> None:
    dry = DryModel(meta_twin(MODELS[model]()))
    for world_size, accumulate, bucket in ((1, 1, SMALL), (3, 2, 3 * SMALL), (2, 1, 16 * SMALL)):
        chosen = settings_of(name, bucket_bytes=bucket)
        found = replace(dry.footprint(chosen, world_size, accumulate=accumulate), gathered=0)
        assert found == in_full(dry, chosen, world_size, accumulate), (world_size, bucket)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("depth", [0, 1, 2, 4])
def test_what_is_gathered_at_once_needs_no_more_layers(model: str, depth: int) -> None:
    made = make_gpt(torch.bfloat16, width=32, layers=30) if model == "GPT" else MODELS[model]()
    twin = meta_twin(made)
    for limit in (None, 20_000):
        chosen = config(stage=3, prefetch_units=depth, prefetch_bytes=limit)
        every = DryModel(twin)
        vars(every)["_layers"] = _NoLayers(every.model)
        assert DryModel(twin).gathered(chosen) == every.gathered(chosen) > 0


class _NoLayers(Layers):
    """Knows of no equal layers."""

    def alike(self) -> tuple[Any, ...]:
        return ()

    def divide(self, config: ZeroConfig) -> Division:
        return replace(super().divide(config), runs=())


@pytest.mark.parametrize(("hardware", "gpu"), [("rtx-4090", "0.8GiB"), ("rtx-3090-x4", "4GiB")])
def test_the_choice_is_that_of_a_search_with_every_layer(
    hardware: str, gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = {**LLAMA_70B, "hidden_size": 512, "intermediate_size": 1536, "vocab_size": 1000}
    model |= {"num_hidden_layers": 24, "num_attention_heads": 8}
    options: dict[str, Any] = {"hardware": hardware, "gpu": gpu, "bucket_bytes": "2MiB"}
    found = plan(model, batch=1, seq=128, **options)
    monkeypatch.setattr("zero_plugin.planner.dry.Layers", _NoLayers)
    every = plan(model, batch=1, seq=128, **options)
    assert found.fits
    assert (found.best, found.others, found.config) == (every.best, every.others, every.config)


def counts(layers: Layers, **settings: Any) -> list[int]:
    return [run.count for run in layers.divide(config(**settings)).runs]


def test_layers_that_share_a_block_a_unit_or_a_weight_are_laid_out() -> None:
    layers = Layers(meta_twin(gpt()))
    # The first layer shares no block with one before it, and the last none with one behind it.
    assert counts(layers, bucket_bytes=SMALL) == [LAYERS - 3]
    # All of a unit's blocks are its own.
    assert counts(layers, stage=3, bucket_bytes=SMALL) == [LAYERS - 1]
    # Blocks of four layers and a part, and one with all of them.
    assert counts(layers, bucket_bytes="256KiB") == counts(layers, bucket_bytes="32MiB") == []
    whole = gpt()
    vars(whole)["_no_split_modules"] = [type(whole).__name__]
    # One unit with all layers in it, whose blocks are each a layer's own.
    assert counts(Layers(meta_twin(whole)), stage=3, bucket_bytes=SMALL) == []
    mixed = Layers(meta_twin(Mixed())).divide(config(bucket_bytes=SMALL))
    assert all(not {2, 7} & set(run.layers) for run in mixed.runs)
    # Trained narrow layers, and frozen ones.
    assert len(mixed.runs) == 2


def test_70_billion_parameters_are_laid_out_in_a_seventh_of_their_blocks() -> None:
    dry = DryModel(load(LLAMA_70B).model)
    for number, chosen in enumerate(
        (
            ZeroConfig(stage=3, params="host"),
            ZeroConfig(stage=3, params="host", device_fraction=0.3),
            ZeroConfig(stage=2),
        )
    ):
        dry.laid_out_blocks = 0
        found = dry.footprint(chosen, 8)
        assert found.blocks in (642, 643)
        # Two runs where a fraction parts the layers.
        assert dry.laid_out_blocks <= found.blocks * (0.4 if chosen.device_fraction else 0.15)
        assert sum(found.table["host"].values()) > 12 * 70e9 / 8 * (0.69 if number == 1 else 1)


def test_a_plan_for_70_billion_parameters_lays_out_few_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[DryModel] = []
    original = DryModel.__init__

    def noted(self: DryModel, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named)
        seen.append(self)

    monkeypatch.setattr(DryModel, "__init__", noted)
    walked: list[nn.Module] = []
    walk = units._walk

    def counted(model: nn.Module, *arguments: Any) -> Any:
        walked.append(model)
        return walk(model, *arguments)

    monkeypatch.setattr(units, "_walk", counted)
    found = plan(LLAMA_70B, batch=4, seq=2048, gpu="80GiB", host="1024GiB", world=8)
    assert found.fits
    (dry,) = seen
    # What a plan takes in time: it was 3,900 blocks of engines, and 2,000 more for what is gathered.
    assert dry.laid_out <= 40
    assert dry.laid_out_blocks <= 1500
    # All 80 layers are gone through for the units' sizes and once more for equal layers, not for every placement.
    assert sum(model is dry.model for model in walked) == 2
