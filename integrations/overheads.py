"""What a step costs beside bytes and operations: the fixed time of a step, a block, a gathered unit and a file's tile.

Found from steps of engines on a model of tiny layers, where bytes and operations take no time: each figure is the difference of
two engines that differ in that one number. Under several ranks their messages are in it. For `zero-plugin bench`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zero_plugin.config import ZeroConfig
from zero_plugin.engine import ZeroEngine

_WIDTH = 16
_LAYERS = 24
_FEW = 4
_WARM_UP = 3
_STEPS = 7
_ROUNDS = 2


class _Layers(nn.Module):
    """Linear layers one after another, each a unit at stage 3."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(count))

    def forward(self, features: Tensor) -> Tensor:
        for layer in self.layers:
            features = layer(features)
        return features.sum()


def measure_overheads(folder: Path | None = None) -> dict[str, float]:
    """Seconds of a step, a block, a unit's gather, and of a block in files; all ranks call it.

    Args:
        folder: of the `nvme` tier; None: files are not tried.
    """
    one_block: dict[str, Any] = {"stage": 2, "bucket_bytes": "1MiB"}
    blocks = {**one_block, "bucket_bytes": 64}
    sharded = {"stage": 3, "bucket_bytes": "1MiB", "params": "device"}
    times: dict[str, list[float]] = {}
    cases: dict[str, tuple[int, Mapping[str, Any] | None]] = {
        "plain": (_LAYERS, None),
        "plain few": (_FEW, None),
        "one block": (_LAYERS, one_block),
        "blocks": (_LAYERS, blocks),
        "units": (_LAYERS, sharded),
        "few units": (_FEW, sharded),
    }
    if folder is not None:
        files = {"optimizer": "nvme", "gradients": "nvme", "nvme_path": str(folder)}
        files |= {"nvme_buffer_bytes": "1MiB"}
        cases |= {
            "block of files": (_LAYERS, {**one_block, **files}),
            "blocks of files": (_LAYERS, {**blocks, **files}),
        }
    for _ in range(_ROUNDS):
        for name, (layers, settings) in cases.items():
            times.setdefault(name, []).append(_step_seconds(layers, settings))
    taken = {name: min(values) for name, values in times.items()}
    found = {
        "step_seconds": taken["one block"] - taken["plain"],
        "launch_seconds": (taken["blocks"] - taken["one block"]) / (_LAYERS - 1),
    }
    more = (taken["units"] - taken["plain"]) - (taken["few units"] - taken["plain few"])
    # A unit more is a block more, and two gathers.
    found["unit_seconds"] = (more / (_LAYERS - _FEW) - found["launch_seconds"]) / 2
    if folder is not None:
        more = taken["blocks of files"] - taken["block of files"]
        found["tile_seconds"] = more / (_LAYERS - 1) - found["launch_seconds"]
    return {name: max(seconds, 1e-6) for name, seconds in found.items()}


def _step_seconds(layers: int, settings: Mapping[str, Any] | None) -> float:
    """Median of a step; without settings of a forward and backward alone."""
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    model = _Layers(layers).to(device)
    features = torch.ones(1, _WIDTH, device=device)
    engine = None
    if settings is not None:
        optimizer = torch.optim.AdamW(model.parameters())
        engine = ZeroEngine(model, optimizer, ZeroConfig(**settings))
    taken: list[float] = []
    try:
        for _ in range(_WARM_UP + _STEPS):
            begin = time.perf_counter()
            loss: Tensor = model(features)
            if engine is None:
                loss.backward()
                model.zero_grad()
            else:
                engine.backward(loss)
                engine.step()
                engine.zero_grad()
                engine.drain()
            if device.type != "cpu":
                torch.accelerator.synchronize()
            taken.append(time.perf_counter() - begin)
    finally:
        if engine is not None:
            engine.close()
    return statistics.median(taken[_WARM_UP:])
