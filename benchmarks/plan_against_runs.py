"""Predicted against measured: bytes of each tier and seconds of a step, over stages, tiers, processes and model shapes.

    python benchmarks/plan_against_runs.py                     # one process
    torchrun --nproc-per-node 2 benchmarks/plan_against_runs.py

The engines of all placements of a shape are open at once and take their steps in turns, with plain forwards and backwards of the same
model between them, which give the rate of computation at that shape (the planner's `flops`); the machine's rates are measured as
`zero-plugin bench` does before, between and after. So what the machine does beside falls on all alike. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero_plugin import ZeroConfig, ZeroEngine, plan
from zero_plugin.integrations.overheads import measure_overheads
from zero_plugin.machine.bench import measure, measure_collectives
from zero_plugin.machine.hardware import Hardware
from zero_plugin.sharding.group import ProcessGroup
from zero_plugin.trace import Ledger

DEVICE = {"optimizer": "device", "gradients": "device"}
HOST = {"optimizer": "host", "gradients": "host"}
FILES = {
    "optimizer": "nvme",
    "gradients": "nvme",
    "nvme_cache_bytes": 0,
    "nvme_buffer_bytes": "64MiB",
}
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
SHAPES = {"4 x 512": (4, 512), "8 x 384": (8, 384), "2 x 768": (2, 768)}
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


@dataclass(kw_only=True)
class Row:
    """One placement of one shape."""

    name: str
    settings: dict[str, Any]
    model: nn.Module
    engine: ZeroEngine
    taken: list[float] = field(default_factory=list[float])


def plain_step(model: nn.Module, features: Tensor) -> None:
    """What a step computes beside the engine's part."""
    model(features).backward()
    model.zero_grad()


def engine_step(row: Row, features: Tensor) -> None:
    """One step to its end."""
    row.engine.backward(row.model(features))
    row.engine.step()
    row.engine.zero_grad()
    row.engine.drain()


def timed(step: Any, *arguments: Any) -> float:
    begin = time.perf_counter()
    step(*arguments)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=512, help="of a batch, all processes together")
    parser.add_argument("--steps", type=int, default=7, help="that are counted")
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--shape", action="append", choices=list(SHAPES), help="default: all")
    args = parser.parse_args()
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1:
        dist.init_process_group("gloo")
    args.rows //= size
    torch.set_num_threads(threads_of(size))
    rank = dist.get_rank() if size > 1 else 0
    with tempfile.TemporaryDirectory() as folder:
        fixed = measure_overheads(Path(folder))
        if rank == 0:
            shown = ", ".join(f"{key} {value * 1e3:.2f} ms" for key, value in fixed.items())
            print(f"{size} processes, {args.rows} rows each, fp32 weights; {shown}\n")
            print(
                "| shape | placement | predicted / measured MiB: device | host | nvme | predicted / measured ms | ratio |"
            )
            print("|---|---|---|---|---|---|---|")
        ratios = [
            ratio
            for shape in args.shape or SHAPES
            for ratio in one_shape(shape, fixed, folder, args, rank)
        ]
    if rank == 0:
        off = sorted(max(r, 1 / r) - 1 for r in ratios)
        print(
            f"\n{len(off)} runs: step time off by {statistics.median(off):.0%} in the median, {off[-1]:.0%} in the worst"
        )
    if size > 1:
        dist.destroy_process_group()


def threads_of(size: int) -> int:
    return max(1, (os.cpu_count() or 1) // size)


def rates(folder: Path, size: int) -> dict[str, float]:
    """This machine, all ranks measuring at once, as they work at once."""
    found = measure([folder], seconds=0.1, threads=threads_of(size))
    disk = next(iter(found.pop("disks").values()))
    group = ProcessGroup.create(device=torch.device("cpu"), ledger=Ledger(), timeout_seconds=100.0)
    if size > 1:
        found |= measure_collectives(group, threads_of(size))
    group.close()
    return {
        **found,
        # Each rank measured its part while the others measured theirs.
        "update": found["update"] * size,
        "nvme_read": disk["mixed_read"] * size,
        "nvme_write": disk["mixed_write"] * size,
        "nvme_read_alone": disk["read"] * size,
        "nvme_write_alone": disk["write"] * size,
    }


def one_shape(  # every placement of one shape, in turns
    shape: str, fixed: dict[str, float], folder: str, args: argparse.Namespace, rank: int
) -> list[float]:
    layers, width = SHAPES[shape]
    size = int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0)
    # fp32: processors without bf16 arithmetic take seconds for a backward in it.
    model = Blocks(layers, width)
    features = torch.randn(args.rows, width)
    found = [rates(Path(folder), size)]
    rows = [open_row(name, model, folder) for name in SETTINGS]
    plain: list[float] = []
    for turn in range(args.warm_up + args.steps):
        for number, row in enumerate(rows):
            if number % 3 == 0:
                plain.append(timed(plain_step, model, features))
            row.taken.append(timed(engine_step, row, features))
        if turn == (args.warm_up + args.steps) // 2:
            found.append(rates(Path(folder), size))
    found.append(rates(Path(folder), size))
    operations = 6 * args.rows * sum(p.numel() for p in model.parameters())
    values = {key: statistics.median(each[key] for each in found) for key in found[0]}
    values |= fixed
    values["flops"] = operations / statistics.median(plain[3 * args.warm_up :])
    values.pop("host_bandwidth")
    reached: dict[str, Any] = dict(values)
    hardware = Hardware(
        name="this one",
        devices=size,
        host_bytes=16 << 30,
        nvme_bytes=4 << 30,
        device_is_host=True,
        **reached,
    )
    if rank == 0:
        shown = ", ".join(f"{key} {value / 1e9:.2f}" for key, value in values.items())
        print(f"<!-- {shape}: {shown} (1e9 a second) -->")
    return [against_plan(shape, row, model, hardware, folder, args, rank) for row in rows]


def open_row(name: str, model: nn.Module, folder: str) -> Row:
    """An engine on a model of its own."""
    settings: dict[str, Any] = dict(SETTINGS[name])
    if "nvme" in settings.values():
        settings["nvme_path"] = folder
    own = copy.deepcopy(model)
    engine = ZeroEngine(own, torch.optim.AdamW(own.parameters()), ZeroConfig(**settings))
    return Row(name=name, settings=settings, model=own, engine=engine)


def against_plan(
    shape: str,
    row: Row,
    model: nn.Module,
    hardware: Hardware,
    folder: str,
    args: argparse.Namespace,
    rank: int,
) -> float:
    """One line of the table; closes the engine."""
    ahead: dict[str, Any] = {"prefetch_units": 1} if row.settings["stage"] == 3 else {}
    pinned = {key: value for key, value in row.settings.items() if key != "nvme_path"}
    found = plan(
        model,
        batch=args.rows,
        hardware=replace(hardware),
        nvme=folder,
        checkpointing=False,
        alternatives=0,
        **{**pinned, **ahead, "split_master": False},
    )
    best = found.best
    if best is None:
        raise SystemExit(f"{shape}, {row.name}: nothing fits: {found.advice}")
    measured = statistics.median(row.taken[args.warm_up :])
    table = row.engine.memory()
    gathered = row.engine._sharded.gatherer.peak_bytes if row.engine._sharded else 0
    row.engine.close()
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
            f"| {shape} | {row.name} | {' | '.join(cells)} | {times} | {best.seconds / measured:.2f} |",
            flush=True,
        )
    return best.seconds / measured


if __name__ == "__main__":
    main()
