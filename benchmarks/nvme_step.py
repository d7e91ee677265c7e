"""The AdamW step with its states on NVMe, against the slowest of its three parts.

Every side handles the same states in the same tiles, in one run, interleaved:

- step: read, update and write of every tile in a pipeline, from bf16 gradients to bf16 weights;
- read alone, update alone, write alone: one part over all tiles, one after the other, on a lane of its own;
- read beside write: the two parts of the disk at once, half of the tiles apart, with nothing between. A disk that shares its
  rate between reading and writing does not go faster than this, and the step cannot.

The step's time includes its last write.

Run: python benchmarks/nvme_step.py PATH [--numel 100e6] [--buffer 256MiB] [--rounds 5] [--json out.json]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from _report import Report, interleaved, median_ratio, write_json

from zero_plugin import ZeroConfig, ZeroEngine
from zero_plugin.config import parse_bytes
from zero_plugin.grads.norm import Clip
from zero_plugin.optim.rule import ADAMW
from zero_plugin.optim.swap import Tile, TileUpdate
from zero_plugin.runtime.io import Read, Write
from zero_plugin.runtime.operations import Update

OPTIONS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
TARGET = 1.10
PART = 8_000_000
BOTH = "read beside write"
PARTS = ("read alone", "update alone", "write alone")


class Parts:
    """An engine's tiles, and its step taken apart.

    Args:
        engine: of one optimizer with states on NVMe.
    """

    def __init__(self, engine: ZeroEngine) -> None:
        swap = engine._swap
        if swap is None or swap._pool is None:
            raise RuntimeError("the engine keeps no states on NVMe")
        self.engine, self.swap = engine, swap
        self.blocks = engine._roster.blocks
        self.tiles = [tile for block in self.blocks for tile in swap.tiles(block)]
        self.slabs = [
            swap._pool.whole[start : start + swap._pool.slab_bytes]
            for start in range(0, swap._pool.nbytes, swap._pool.nbytes // swap._pool.slabs)
        ]
        self.gradients = {
            block.index: torch.full((block.chunk,), 1e-3, dtype=block.dtype)
            for block in self.blocks
        }
        largest = max(block.chunk for block in self.blocks)
        self.output = torch.empty(largest, dtype=torch.bfloat16)
        self.hyper = torch.tensor([ADAMW.hyper(OPTIONS, 10)], dtype=torch.float64)

    def each(self, lane: str, operation: Callable[[Tile, Tensor], Any]) -> None:
        """Runs one operation on every tile, on one lane."""
        chosen = self.engine._resources.backend.lane(lane, "host")
        for number, tile in enumerate(self.tiles):
            region = self.slabs[number % len(self.slabs)][: tile.nbytes]
            chosen.submit(operation(tile, region))
        chosen.drain()

    def both(self) -> None:
        """Reads and writes at once, never the same tile or slab."""
        backend = self.engine._resources.backend
        half, count = len(self.slabs) // 2, len(self.tiles)
        for number, tile in enumerate(self.tiles):
            region = self.slabs[number % half][: tile.nbytes]
            backend.lane("read states", "host").submit(Read(**self.place(tile), destination=region))
            other = self.tiles[(number + count // 2) % count]
            region = self.slabs[half + number % half][: other.nbytes]
            backend.lane("write states", "host").submit(Write(**self.place(other), source=region))
        backend.drain()

    def read(self) -> None:
        """Reads every tile."""
        self.each("read states", lambda tile, region: Read(**self.place(tile), destination=region))

    def write(self) -> None:
        """Writes every tile."""
        self.each("write states", lambda tile, region: Write(**self.place(tile), source=region))

    def update(self) -> None:
        """Updates every tile."""
        self.each("update", lambda tile, region: Update(updater=self.updater(tile, region)))

    def place(self, tile: Tile) -> dict[str, Any]:
        """Where a tile lies."""
        return {"store": self.swap._store, "extent": tile.extent, "offset": tile.offset}

    def updater(self, tile: Tile, region: Tensor) -> TileUpdate:
        """The update of a tile."""
        positions = tuple(range(len(tile.block.parameters)))
        return TileUpdate(
            tile=tile,
            region=region,
            positions=positions,
            rows=torch.zeros(len(positions), dtype=torch.int64).numpy(),
            gradient=self.gradients[tile.block.index],
            output=self.output[: tile.block.chunk],
            rule=ADAMW,
            hyper=self.hyper,
            clip=Clip(factor=1.0, value=None),
        )


def make_engine(args: argparse.Namespace) -> ZeroEngine:
    """A model of bf16 weights of 8 million elements each."""
    sizes = [min(PART, args.numel - start) for start in range(0, args.numel, PART)]
    model = torch.nn.Module()
    model.weights = torch.nn.ParameterList(
        torch.nn.Parameter(torch.empty(size, dtype=torch.bfloat16).normal_()) for size in sizes
    )
    config = ZeroConfig(
        optimizer="nvme",
        nvme_path=args.path,
        nvme_buffer_bytes=args.buffer,
        nvme_engine=args.engine,
        threads=args.threads,
    )
    return ZeroEngine(model, torch.optim.AdamW(model.parameters(), **OPTIONS), config)


def compare(args: argparse.Namespace) -> Report:
    engine = make_engine(args)
    try:
        parts = Parts(engine)
        optimizer = engine.optimizers[0]

        def step() -> None:
            # The gradients stay: only the step is timed.
            engine._reducer.spent.clear()
            optimizer.step()
            engine.drain()

        engine.backward(
            sum((p.float().sum() * 1e-6 for p in engine.model.parameters()), torch.zeros(()))
        )
        # The parts alone leave other tiles' bytes in the file, which changes no time.
        seconds = interleaved(
            {
                "step": step,
                PARTS[0]: parts.read,
                PARTS[1]: parts.update,
                PARTS[2]: parts.write,
                BOTH: parts.both,
            },
            args.rounds,
        )
        slowest = [max(times) for times in zip(*(seconds[name] for name in PARTS), strict=True)]
        seconds["slowest part"] = slowest
        nbytes = sum(tile.nbytes for tile in parts.tiles)
        rows = [
            [
                name,
                statistics.median(times),
                min(times),
                nbytes / statistics.median(times) / 1e9,
                median_ratio(seconds["step"], times),
            ]
            for name, times in seconds.items()
        ]
        ratio = median_ratio(seconds["step"], slowest)
        shared = median_ratio(seconds["step"], seconds[BOTH])
        return Report(
            benchmark="AdamW step with states on NVMe",
            settings={
                "parameters": args.numel,
                "tiles": len(parts.tiles),
                "buffer": args.buffer,
                "rounds": args.rounds,
                "threads": engine._resources.kernels.threads,
                "engine": parts.swap._store.describe().engine,
                "file system": parts.swap._store.describe().paths[0].file_system,
                "torch": torch.__version__,
            },
            columns=["side", "seconds", "least", "GB/s of states", "step / side"],
            rows=rows,
            notes=[
                f"step / slowest part: {ratio:.3f} (at most {TARGET:.2f}: {'yes' if ratio <= TARGET else 'no'})",
                f"step / read beside write: {shared:.3f}",
            ],
        )
    finally:
        engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path, help="a folder on the disk to measure")
    parser.add_argument("--numel", type=float, default=100e6, help="parameters")
    parser.add_argument("--buffer", type=parse_bytes, default=256 << 20)
    parser.add_argument("--engine", choices=("auto", "uring", "threads"), default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=None, help="default: every processor")
    parser.add_argument("--json", type=Path, default=None, help="file to write the results to")
    args = parser.parse_args()
    args.numel = int(args.numel)
    report = compare(args)
    report.show()
    write_json(args.json, [report])


if __name__ == "__main__":
    main()
