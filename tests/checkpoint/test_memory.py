"""Saves, loads and exports go through small buffers, whatever the model's size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.foreign import write_deepspeed
from support.ranks import run_ranks
from support.training import PRELOAD, adamw, config
from torch import nn

from zero_plugin import ZeroConfig, ZeroEngine
from zero_plugin.checkpoint import foreign, pieces, shardfile, source
from zero_plugin.checkpoint.export import export
from zero_plugin.checkpoint.imports import import_checkpoint
from zero_plugin.checkpoint.pieces import AHEAD_BYTES, SNAPSHOT_BYTES
from zero_plugin.checkpoint.shardfile import PIECE_BYTES

SIDE = 2304
STATES = 3 * 4 * SIDE * SIDE
"""Bytes of masters and moments: 64 MB."""

PIECE, AHEAD, SNAPSHOT, TILES = 1 << 20, 2 << 20, 8 << 20, 8 << 20
"""Sizes of the buffers here; the real ones are larger, as test_real_buffers_are_within_the_promise adds up."""

SLACK = 8 << 20
"""What threads, headers, the interpreter and the allocator take."""

LIMITS = {
    # What was read ahead, what is being written, summed and read, and a tile; a load has a tile, too.
    "save": AHEAD + 3 * PIECE + TILES // 4 + SLACK,
    "load": 2 * PIECE + TILES // 4 + SLACK,
    "asynchronous save": SNAPSHOT + 3 * PIECE + TILES // 4 + SLACK,
    # A range put together, the same converted, and the pages of a mapped file since they were let go of.
    "import": 4 * PIECE + SLACK,
    # Torch reads a tensor of a file whole; here it has 4 MiB.
    "import from DCP": 3 * (4 << 20) + 4 * PIECE + SLACK,
    "export": 4 * PIECE + SLACK,
}


def shrink() -> None:
    """Give every buffer of saves, loads and imports its size here."""
    shardfile.PIECE_BYTES = pieces.PIECE_BYTES = foreign.PIECE_BYTES = PIECE
    pieces.AHEAD_BYTES, pieces.SNAPSHOT_BYTES = AHEAD, SNAPSHOT
    source._RANGE = PIECE // 4


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
    shrink()
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
    torch.save({"w": torch.empty(SIDE, SIDE, 3)}, folder / "plain.pt")
    found["import from torch"] = peak(lambda: import_checkpoint(folder / "plain.pt", folder / "t"))
    halves = {"w": torch.zeros(SIDE, SIDE, 3, dtype=torch.bfloat16)}
    moments = {"step": 1.0, "exp_avg": halves["w"].clone(), "exp_avg_sq": halves["w"].clone()}
    group = {"params": [0], "lr": 0.1}
    content = {"model": halves, "optimizer": {"state": {0: moments}, "param_groups": [group]}}
    torch.save(content, folder / "half.pt")
    del halves, moments, content
    found["import from torch, bf16"] = peak(
        lambda: import_checkpoint(folder / "half.pt", folder / "h")
    )
    for stage in (2, 3):
        write_deepspeed(folder / f"ds-{stage}", stage, parameters=5, side=1024)
        found[f"import from DeepSpeed {stage}"] = peak(
            lambda stage=stage: import_checkpoint(folder / f"ds-{stage}", folder / f"d-{stage}")
        )
    write_dcp(folder / "dcp")
    found["import from DCP"] = peak(
        lambda: import_checkpoint(folder / "dcp", folder / "f", trust=True)
    )
    return found


def write_dcp(place: Path) -> None:
    """A checkpoint of torch.distributed.checkpoint with 60 MiB in tensors of 4 MiB."""
    import torch.distributed.checkpoint as dcp

    names = [f"layer.{number}" for number in range(5)]
    state = {
        name: {
            "step": torch.tensor(1.0),
            "exp_avg": torch.ones(1 << 20),
            "exp_avg_sq": torch.ones(1 << 20),
        }
        for name in names
    }
    content = {
        "model": {name: torch.ones(1 << 20) for name in names},
        "optim": {"state": state, "param_groups": [{"params": names, "lr": 0.1}]},
    }
    dcp.save(content, checkpoint_id=str(place), no_dist=True)


@pytest.mark.serial
@pytest.mark.dist
def test_memory_does_not_grow_with_the_states(tmp_path: Path) -> None:
    (found,) = run_ranks(1, grown, tmp_path, preload=PRELOAD, deadline=100)
    print(found)
    for name, nbytes in found.items():
        limit = next(value for key, value in reversed(LIMITS.items()) if name.startswith(key))
        assert nbytes < limit < STATES / 2, (name, found)


def test_real_buffers_are_within_the_promise() -> None:
    """Of any model, beside the slabs that the engine holds in any case: 512 MiB at most."""
    tile = ZeroConfig().nvme_buffer_size // 4
    # Decoding a piece of bytes takes at most six tensors of its numbers at a time.
    decoded = 6 * PIECE_BYTES
    save = max(SNAPSHOT_BYTES, AHEAD_BYTES) + 3 * PIECE_BYTES + decoded + tile
    load = 2 * PIECE_BYTES + decoded
    assert source._RANGE * 4 == PIECE_BYTES
    assert max(save, load) <= 512 << 20
