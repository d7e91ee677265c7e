"""A whole training step with sharded parameters: stage 3 against FSDP2 or DeepSpeed's ZeRO-3, same model, on gloo.

Both sides run on the same ranks, step by step in turn, so that a drift of the machine's speed hits both; the figure is the
median of the per-pair ratios. FSDP2 shards each block and the root, with torch's fused AdamW where it takes sharded
parameters. DeepSpeed runs its stage 3 on its CPU accelerator in fp32 with torch's fused AdamW, and gathers every parameter
just in time, as the two others do.

    python benchmarks/stage3_step.py --processes 2 --parameters 30e6
    python benchmarks/stage3_step.py --processes 2 --parameters 30e6 --peer deepspeed
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from _report import Report, write_json
from whole_step import Model, row, step_in_turn

from zero_plugin import ZeroConfig, ZeroEngine

PEERS = {"fsdp": "FSDP2, fused AdamW", "deepspeed": "DeepSpeed ZeRO-3"}


class Fsdp:
    """torch's own sharding of parameters, block by block."""

    def __init__(self, model: Any) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(self, tokens: Tensor) -> tuple[float, float]:
        """One step; its seconds and its loss."""
        dist.barrier()
        start = time.perf_counter()
        loss = self.model(tokens)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - start, loss.item()


class DeepSpeed:
    """DeepSpeed's ZeRO stage 3; with states in host memory, its own compiled AdamW."""

    def __init__(self, model: nn.Module, options: argparse.Namespace) -> None:
        rank = str(dist.get_rank())
        # What it reads before anything can be told to it.
        os.environ.update(
            DS_ACCELERATOR="cpu", RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=str(options.processes)
        )
        deepspeed: Any = importlib.import_module("deepspeed")
        zero: dict[str, Any] = {"stage": 3, "stage3_param_persistence_threshold": 0}
        if options.tier == "host":
            zero |= {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
            adam: Any = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
            optimizer = adam(model.parameters(), lr=1e-4, weight_decay=1e-2)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        settings = {
            "train_micro_batch_size_per_gpu": options.batch,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": zero,
        }
        self.engine = deepspeed.initialize(
            model=model, optimizer=optimizer, config=settings, dist_init_required=False
        )[0]

    def step(self, tokens: Tensor) -> tuple[float, float]:
        """One step; its seconds and its loss."""
        dist.barrier()
        start = time.perf_counter()
        loss = self.engine(tokens)
        self.engine.backward(loss)
        self.engine.step()
        return time.perf_counter() - start, loss.item()


class Ours:
    """Stage 3."""

    def __init__(self, model: nn.Module, tier: Any) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        config = ZeroConfig(stage=3, params=tier, optimizer=tier, gradients=tier)
        self.engine = ZeroEngine(model, self.optimizer, config)

    def step(self, tokens: Tensor) -> tuple[float, float]:
        """One step; its seconds and its loss."""
        dist.barrier()
        start = time.perf_counter()
        loss = self.model(tokens)
        self.engine.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        # The step returns early: what is left of the update belongs to it.
        self.engine.wait_for_update()
        return time.perf_counter() - start, loss.item()


def run(options: argparse.Namespace) -> Report | None:
    models: list[nn.Module] = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Model(options.parameters))
    count = sum(p.numel() for p in models[0].parameters())
    peer = Fsdp(models[0]) if options.peer == "fsdp" else DeepSpeed(models[0], options)
    ours = Ours(models[1], options.tier)
    pairs, worst = step_in_turn(peer, ours, options, dist.get_rank())
    ours.engine.close()
    if dist.get_rank():
        return None
    if worst > options.tolerance:
        raise RuntimeError(
            f"the losses of both sides differ by {worst:.2g}, more than {options.tolerance:g}: they do not do the same work"
        )
    name = PEERS[options.peer]
    ratios = [b / a for a, b in pairs]
    return Report(
        benchmark="training step with sharded parameters",
        settings={
            "parameters": count,
            "batch": options.batch,
            "tokens": options.length,
            "processes": options.processes,
            "tier": options.tier,
            "steps": len(pairs),
        },
        columns=("side", "median", "min", "max"),
        rows=(
            row(f"{name} (s)", [a for a, _ in pairs]),
            row("stage 3 (s)", [b for _, b in pairs]),
            row(f"ours / {name}, pair by pair", ratios),
        ),
        notes=(f"largest difference of losses: {worst:.2g}",),
    )


def _worker(rank: int, options: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // options.processes))
    store = dist.FileStore(str(Path(folder) / "store"), options.processes)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options.processes)
    try:
        report = run(options)
    finally:
        dist.destroy_process_group()
    if report is not None:
        report.show()
        write_json(options.json, [report])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", choices=tuple(PEERS), default="fsdp")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--parameters", type=float, default=30e6)
    parser.add_argument("--tier", choices=("device", "host"), default="device")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument(
        "--tolerance", type=float, default=1e-4, help="largest difference of losses"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.peer == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        print("skipped: DeepSpeed is not installed")
        return
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_worker, (options, folder), nprocs=options.processes)


if __name__ == "__main__":
    main()
