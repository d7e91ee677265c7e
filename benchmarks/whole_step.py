"""A whole training step under `zero_offload` against plain DDP with torch's fused AdamW, same model and precision.

Both sides run in one process (or on the same ranks), step by step in turn, so that a drift of the machine's speed hits
both; the figure is the median of the per-pair ratios. Run with one or two processes:

    python benchmarks/whole_step.py --processes 1
    python benchmarks/whole_step.py --processes 2 --parameters 30e6
"""

from __future__ import annotations

import argparse
import os
import statistics
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

from zero_plugin import ZeroConfig, ZeroEngine


class Block(nn.Module):
    """A pre-norm transformer block with a gated feed-forward layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states in and out."""
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """A causal language model of about the given number of parameters."""

    def __init__(self, parameters: float, width: int = 768, vocabulary: int = 16_000) -> None:
        super().__init__()
        depth = max(1, round((parameters - 2 * vocabulary * width) / (12 * width * width)))
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, width // 64) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss of predicting each next token."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x[:, :-1]))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Plain:
    """Plain torch: DDP where there are several processes, fused AdamW."""

    def __init__(self, model: nn.Module) -> None:
        distributed = dist.is_initialized()
        self.model = nn.parallel.DistributedDataParallel(model) if distributed else model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(self, tokens: Tensor) -> tuple[float, float]:
        """One step; its seconds and its loss."""
        start = time.perf_counter()
        loss = self.model(tokens)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - start, loss.item()


class Ours:
    """The same under zero_offload: states and gradients in host memory, sharded over the processes."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        config = ZeroConfig(stage=2, optimizer="host", gradients="host")
        self.engine = ZeroEngine(model, self.optimizer, config)

    def step(self, tokens: Tensor) -> tuple[float, float]:
        """One step; its seconds and its loss."""
        start = time.perf_counter()
        loss = self.model(tokens)
        self.engine.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        # The step returns early: what is left of the update belongs to it.
        self.engine.wait_for_update()
        return time.perf_counter() - start, loss.item()


def step_in_turn(
    one: Any, other: Any, options: argparse.Namespace, rank: int
) -> tuple[list[tuple[float, float]], float]:
    """Both sides' seconds of each step after the warm-up, and the largest difference of their losses."""
    generator = torch.Generator().manual_seed(rank)
    pairs: list[tuple[float, float]] = []
    worst = 0.0
    for number in range(options.warmup + options.steps):
        tokens = torch.randint(16_000, (options.batch, options.length), generator=generator)
        (a, loss_a), (b, loss_b) = one.step(tokens), other.step(tokens)
        worst = max(worst, abs(loss_a - loss_b))
        if number >= options.warmup:
            pairs.append((a, b))
    return pairs, worst


def run(options: argparse.Namespace) -> Report | None:
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[options.dtype]
    rank = dist.get_rank() if dist.is_initialized() else 0
    models: list[nn.Module] = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Model(options.parameters).to(dtype))
    plain, ours = Plain(models[0]), Ours(models[1])
    pairs, worst = step_in_turn(plain, ours, options, rank)
    memory = ours.engine.memory()
    ours.engine.close()
    if rank:
        return None
    ratios = [b / a for a, b in pairs]
    count = sum(p.numel() for p in models[0].parameters())
    return Report(
        benchmark="whole training step",
        settings={
            "parameters": count,
            "dtype": options.dtype,
            "batch": options.batch,
            "tokens": options.length,
            "processes": options.processes,
            "steps": len(pairs),
        },
        columns=("side", "median", "min", "max"),
        rows=(
            row("plain DDP, fused AdamW (s)", [a for a, _ in pairs]),
            row("zero_offload (s)", [b for _, b in pairs]),
            row("ours / plain, pair by pair", ratios),
        ),
        notes=(
            f"largest difference of losses: {worst:.2g}",
            f"host bytes a parameter and rank: {sum(memory['host'].values()) / count:.2f}",
        ),
    )


def row(name: str, values: list[float]) -> tuple[str | float, ...]:
    """One side's line of the table."""
    return name, statistics.median(values), min(values), max(values)


def _worker(rank: int, options: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // options.processes))
    store = dist.FileStore(str(Path(folder) / "store"), options.processes)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options.processes)
    try:
        report = run(options)
    finally:
        dist.destroy_process_group()
    if report is not None:
        finish(report, options)


def finish(report: Report, options: argparse.Namespace) -> None:
    report.show()
    write_json(options.json, [report])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--parameters", type=float, default=100e6)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.processes == 1:
        report = run(options)
        if report is not None:
            finish(report, options)
        return
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_worker, (options, folder), nprocs=options.processes)


if __name__ == "__main__":
    main()
