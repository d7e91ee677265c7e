"""Runs of real engines, and what was predicted of them: used by the tests and by the table in the documentation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from support.models import gpt_batch, make_gpt
from support.training import config, engine_for
from zero_plugin.engine import ZeroEngine
from zero_plugin.planner.dry import DryModel, meta_twin

TIERS = ("device", "host", "nvme")

DEVICE = {"optimizer": "device", "gradients": "device"}
FILES = {"optimizer": "nvme", "gradients": "nvme", "nvme_buffer_bytes": "1MiB"}
SETTINGS: dict[str, dict[str, Any]] = {
    "stage 0, device": {"stage": 0, **DEVICE},
    "stage 0, host": {"stage": 0},
    "stage 1, device": {"stage": 1, **DEVICE},
    "stage 1, host": {"stage": 1},
    "stage 1, nvme": {"stage": 1, **FILES},
    "stage 2, device": {"stage": 2, **DEVICE},
    "stage 2, host": {"stage": 2},
    "stage 2, half on the device": {"stage": 2, "device_fraction": 0.5, "bucket_bytes": 65536},
    "stage 2, optimizer host, gradients device": {"stage": 2, "gradients": "device"},
    "stage 2, nvme": {"stage": 2, **FILES},
    "stage 2, moments in 8 bits": {"stage": 2, "moment_dtype": "int8"},
    "stage 2, undone where it does not hold": {"stage": 2, "speculate": True},
    "stage 3, nvme, moments in bf16": {
        "stage": 3,
        "params": "host",
        "optimizer": "nvme",
        "nvme_buffer_bytes": "1MiB",
        "moment_dtype": "bf16",
    },
    "stage 3, device": {"stage": 3, **DEVICE},
    "stage 3, host": {"stage": 3, "params": "host"},
    "stage 3, host, prefetch 3": {"stage": 3, "params": "host", "prefetch_units": 3},
    "stage 3, params device, rest host": {"stage": 3},
    "stage 3, nvme": {"stage": 3, "params": "nvme", **FILES},
}


class Wide(nn.Module):
    """Layers of different widths that no container holds, a layer norm, and one layer that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(33, 150)
        self.norm = nn.LayerNorm(150)
        self.second = nn.Linear(150, 210, bias=False).requires_grad_(requires_grad=False)
        self.third = nn.Linear(210, 33)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Mean square of what comes out; features are [batch, 33]."""
        hidden = self.second(self.norm(self.first(features)).tanh())
        return self.third(hidden).square().mean()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "GPT fp32, 51 thousand": make_gpt,
    "GPT bf16, 6 blocks": lambda: make_gpt(torch.bfloat16, width=32, layers=6),
    "wide layers, one frozen": Wide,
}


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """One micro-batch's loss."""
    if isinstance(model, Wide):
        return model(torch.linspace(-1, 1, 33).roll(step + rank).view(1, 33))
    return model(gpt_batch(step, rank=rank))


class HighWater:
    """Most bytes an engine declares, asked before and after every module and every gradient."""

    def __init__(self, engine: ZeroEngine) -> None:
        self._engine = engine
        self.peak: dict[str, int] = dict.fromkeys(TIERS, 0)

    def look(self, *_: Any) -> None:
        """Ask now."""
        for tier, kinds in self._engine.memory().items():
            self.peak[tier] = max(self.peak[tier], sum(kinds.values()))


def run(name: str, model_name: str, rank: int, accumulate: int, folder: str) -> dict[str, int]:
    """Train two steps, the second on a known order; the most bytes of each tier that `engine.memory()` gave."""
    settings = dict(SETTINGS[name])
    if "nvme" in settings.values():
        settings["nvme_path"] = folder
    model = MODELS[model_name]()
    with engine_for(model, **settings) as (engine, optimizer):
        water = HighWater(engine)
        water.look()
        handles = [
            hook(water.look)
            for module in model.modules()
            for hook in (module.register_forward_pre_hook, module.register_forward_hook)
        ]
        handles += [
            p.register_post_accumulate_grad_hook(water.look)
            for p in model.parameters()
            if p.requires_grad
        ]
        for step in range(2):
            for micro in range(accumulate):
                # As frameworks do: all but the last backward of a step say so.
                last = micro == accumulate - 1
                with nullcontext() if last else engine.no_sync():
                    engine.backward(loss_of(model, accumulate * step + micro, rank))
                water.look()
            optimizer.step()
            water.look()
            optimizer.zero_grad()
        for handle in handles:
            handle.remove()
        return water.peak


def predict(name: str, model_name: str, world_size: int, accumulate: int) -> dict[str, int]:
    """The same bytes, without an engine."""
    settings = dict(SETTINGS[name])
    if "nvme" in settings.values():
        settings["nvme_path"] = "nvme"
    dry = DryModel(meta_twin(MODELS[model_name]()))
    found = dry.footprint(config(**settings), world_size, accumulate=accumulate)
    # Gradients on their way are autograd's, and not in memory().
    return {tier: found.tier(tier) - (found.unreduced if tier == "device" else 0) for tier in TIERS}


def cases() -> list[tuple[str, str, int]]:
    """Setting, model and micro-batches: each setting with the models in turn, every third one with accumulation."""
    names = list(MODELS)
    return [
        (setting, names[number % 3], 2 if number % 4 == 0 else 1)
        for number, setting in enumerate(SETTINGS)
    ]


def all_runs(rank: int, size: int, folder: str) -> dict[tuple[str, str, int], dict[str, int]]:
    """In a rank: every case."""
    del size
    Path(folder).mkdir(exist_ok=True)
    return {
        (setting, model, accumulate): run(setting, model, rank, accumulate, folder)
        for setting, model, accumulate in cases()
    }
