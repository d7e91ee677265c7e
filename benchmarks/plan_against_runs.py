"""Predicted against measured: bytes of each tier and seconds of a step, over stages, tiers, processes and model shapes.

    python benchmarks/plan_against_runs.py                     # one process
    torchrun --nproc-per-node 2 benchmarks/plan_against_runs.py

The machine is measured first (`zero-plugin bench` does the same), and a plain forward and backward of each model gives the rate
of computation at that model's shapes, as the planner's `flops` is to be. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero_plugin import ZeroConfig, ZeroEngine, plan
from zero_plugin.machine.bench import measure, measure_collectives
from zero_plugin.machine.hardware import Hardware
from zero_plugin.sharding.group import ProcessGroup
from zero_plugin.trace import Ledger

DEVICE = {"optimizer": "device", "gradients": "device"}
HOST = {"optimizer": "host", "gradients": "host"}
FILES = {"optimizer": "nvme", "gradients": "nvme", "nvme_cache_bytes": 0}
SETTINGS: dict[str, dict[str, Any]] = {
    "0 device": {"stage": 0, **DEVICE},
    "1 device": {"stage": 1, **DEVICE},
    "1 host": {"stage": 1, **HOST},
    "2 device": {"stage": 2, **DEVICE},
    "2 host": {"stage": 2, **HOST},
    "2 nvme": {"stage": 2, **FILES},
    "3 device": {"stage": 3, "params": "device", **DEVICE},
    "3 host": {"stage": 3, "params": "host", **HOST},
    "3 nvme": {"stage": 3, "params": "nvme", **FILES},
}
SHAPES = {"4 x 384": (4, 384), "8 x 256": (8, 256), "2 x 640": (2, 640)}
TIERS = ("device", "host", "nvme")


class Blocks(nn.Module):
    """Residual two-layer networks of one width."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(layers)
        )

    def forward(self, features: Tensor) -> Tensor:
        """Mean square of what comes out."""
        for block in self.blocks:
            features = features + block(features)
        return features.square().mean()


def step_seconds(
    model: nn.Module, features: Tensor, steps: int, engine: ZeroEngine | None
) -> float:
    """Median seconds of a step; without an engine of a forward and backward alone."""
    taken: list[float] = []
    for _ in range(steps + 2):
        begin = time.perf_counter()
        if engine is None:
            model(features).backward()
            model.zero_grad()
        else:
            engine.backward(model(features))
            engine.step()
            engine.zero_grad()
            engine.drain()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1:
        dist.init_process_group("gloo")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    rank = dist.get_rank() if size > 1 else 0
    with tempfile.TemporaryDirectory() as folder:
        hardware = machine(Path(folder), size)
        if rank == 0:
            print(f"{size} processes, {args.rows} rows, fp32 weights on a machine of\n{hardware}\n")
            print(
                "| shape | placement | predicted / measured MiB: device | host | nvme | predicted / measured ms | ratio |"
            )
            print("|---|---|---|---|---|---|---|")
        ratios = [
            one(shape, name, hardware, folder, args, rank) for shape in SHAPES for name in SETTINGS
        ]
    if rank == 0:
        off = sorted(max(r, 1 / r) - 1 for r in ratios)
        print(
            f"\nstep time off by {statistics.median(off):.0%} in the median, {off[-1]:.0%} in the worst"
        )
    if size > 1:
        dist.destroy_process_group()


def machine(folder: Path, size: int) -> Hardware:
    """This machine, all ranks measuring at once, as they work at once."""
    found = measure([folder], seconds=0.3)
    group = ProcessGroup.create(device=torch.device("cpu"), ledger=Ledger(), timeout_seconds=100.0)
    if size > 1:
        found |= measure_collectives(group)
    group.close()
    disk = next(iter(found.pop("disks").values()))
    return Hardware(
        name="this one",
        devices=size,
        host_bytes=8 << 30,
        nvme_bytes=4 << 30,
        device_is_host=True,
        flops=found["flops"],
        device_bandwidth=found["device_bandwidth"],
        up=found["up"],
        down=found["down"],
        # Each rank measured its part while the others measured theirs.
        update=found["update"] * size,
        nvme_read=disk["mixed_read"] * size,
        nvme_write=disk["mixed_write"] * size,
        collective=found.get("collective", 1e9),
    )


def one(  # one row of the table
    shape: str, name: str, hardware: Hardware, folder: str, args: argparse.Namespace, rank: int
) -> float:
    layers, width = SHAPES[shape]
    torch.manual_seed(0)
    # fp32: processors without bf16 arithmetic take seconds for a backward in it.
    model = Blocks(layers, width)
    features = torch.randn(args.rows, width)
    plain = step_seconds(model, features, 3, None)
    operations = 6 * args.rows * sum(p.numel() for p in model.parameters())
    settings: dict[str, Any] = dict(SETTINGS[name])
    if "nvme" in settings.values():
        settings["nvme_path"] = folder
    ahead: dict[str, Any] = {"prefetch_units": 1} if settings["stage"] == 3 else {}
    found = plan(
        model,
        batch=args.rows,
        hardware=replace(hardware, flops=operations / plain),
        nvme=folder,
        checkpointing=False,
        alternatives=0,
        **{key: value for key, value in settings.items() if key != "nvme_path"},
        **ahead,
        split_master=False,
    )
    best = found.best
    if best is None:
        raise SystemExit(f"{shape}, {name}: nothing fits: {found.advice}")
    engine = ZeroEngine(model, torch.optim.AdamW(model.parameters()), ZeroConfig(**settings))
    measured = step_seconds(model, features, args.steps, engine)
    table = engine.memory()
    gathered = engine._sharded.gatherer.peak_bytes if engine._sharded else 0
    engine.close()
    if rank == 0:
        cells: list[str] = []
        for tier in TIERS:
            predicted = sum(best.footprint.table[tier].values())
            have = sum(table[tier].values())
            if tier == "device":
                predicted, have = predicted + best.footprint.gathered, have + gathered
            cells.append(f"{predicted / 2**20:.2f} / {have / 2**20:.2f}")
        times = f"{best.seconds * 1e3:.0f} / {measured * 1e3:.0f}"
        print(
            f"| {shape} | {name} | {' | '.join(cells)} | {times} | {best.seconds / measured:.2f} |",
            flush=True,
        )
    return best.seconds / measured


if __name__ == "__main__":
    main()
