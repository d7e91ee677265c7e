"""Saves, loads and exports go through small buffers, whatever the model's size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from support.training import PRELOAD, adamw, config
from torch import nn

from zero_plugin import ZeroEngine
from zero_plugin.checkpoint.export import export
from zero_plugin.checkpoint.imports import import_checkpoint

SIDE = 2304
STATES = 3 * 4 * SIDE * SIDE
"""Bytes of masters and moments: 64 MB."""

MOST = STATES // 2


def peak(act: Callable[[], Any]) -> int:
    """Bytes by which resident memory grew at most during a call."""
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    act()
    return status("VmHWM") - before


def status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(name)


def grown(rank: int, size: int, folder: Path) -> dict[str, int]:
    settings = {
        "stage": 3,
        **dict.fromkeys(("params", "optimizer", "gradients"), "nvme"),
        "nvme_path": folder,
        "nvme_buffer_bytes": "8MiB",
    }
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SIDE, SIDE, bias=False, dtype=torch.bfloat16))
    found: dict[str, int] = {}
    with ZeroEngine(model, adamw(model.parameters()), config(**settings)) as engine:
        for number in range(2):
            found["save"] = peak(lambda: engine.save_checkpoint(folder / "ck"))
            found["load"] = peak(lambda: engine.load_checkpoint(folder / "ck"))
            found["asynchronous save"] = peak(
                lambda: (
                    engine.save_checkpoint(folder / "other", asynchronous=True),
                    engine.drain(),
                )
            )
            del number
    for form in ("hf", "torch"):
        found[f"export to {form}"] = peak(
            lambda form=form: export(folder / "ck", folder / f"out-{form}", form=form)
        )
    torch.save({"w": torch.empty(SIDE, SIDE)}, folder / "plain.pt")
    found["import"] = peak(lambda: import_checkpoint(folder / "plain.pt", folder / "taken"))
    return found


@pytest.mark.serial
@pytest.mark.dist
def test_memory_does_not_grow_with_the_states(tmp_path: Path) -> None:
    (found,) = run_ranks(1, grown, tmp_path, preload=PRELOAD, deadline=100)
    print(found)
    # The snapshot beside the training may hold up to 256 MiB, which is all of this.
    limits = {"asynchronous save": STATES + MOST}
    for name, nbytes in found.items():
        assert nbytes < limits.get(name, MOST), found
