"""The AdamW step with its states on NVMe, against the slowest of its three parts.

Every side handles the same states in the same tiles, in one run, interleaved:

- step: read, update and write of every tile in a pipeline, from bf16 gradients to bf16 weights;
- read alone, update alone, write alone: one part over all tiles, one after the other, on a lane of its own;
- read beside write: the two parts of the disk at once, half of the tiles apart, with nothing between. A disk that shares its
  rate between reading and writing does not go faster than this, and the step cannot.

The step's time includes its last write. With `--deepspeed` the step of DeepSpeed's stage 3 with its pipelined optimizer swapper
(reads and writes overlapped, its compiled AdamW, bf16 weights) runs in turn with the others, on states of the same number, in
sub-groups of the same size, in the same folder. Its forward and backward are not timed, and neither are the gradients that it
writes to files there; that it reads them back is part of its step.

With `--moments bf16 int8` steps whose moments take 2 bytes, or about 1, run in turn with the fp32 one.

Run: python benchmarks/nvme_step.py PATH [--numel 100e6] [--buffer 256MiB] [--rounds 5] [--moments bf16 int8] [--deepspeed]
     [--json out.json]
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import socket
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from _report import Report, interleaved, median_ratio, write_json

from zero_plugin import ZeroConfig, ZeroEngine
from zero_plugin.config import MomentDType, parse_bytes
from zero_plugin.grads.norm import Clip
from zero_plugin.optim.rule import ADAMW
from zero_plugin.optim.swap import Tile, TileUpdate
from zero_plugin.runtime.io import Read, Write
from zero_plugin.runtime.operations import Update

OPTIONS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
TARGET = 1.10
PART = 8_000_000
BOTH = "read beside write"
SWAPPER = "DeepSpeed, pipelined swapper"
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


class Flat(torch.nn.Module):
    """bf16 weights of 8 million elements each, with a gradient for every one."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        sizes = [min(PART, numel - start) for start in range(0, numel, PART)]
        self.weights = torch.nn.ParameterList(
            torch.nn.Parameter(torch.empty(size, dtype=torch.bfloat16).normal_()) for size in sizes
        )

    def forward(self) -> Tensor:
        """A loss."""
        return sum((p.float().sum() * 1e-6 for p in self.weights), torch.zeros(()))


def make_engine(args: argparse.Namespace, moments: MomentDType = "fp32") -> ZeroEngine:
    """A model of bf16 weights of 8 million elements each."""
    model = Flat(args.numel)
    config = ZeroConfig(
        optimizer="nvme",
        nvme_path=args.path,
        nvme_buffer_bytes=args.buffer,
        nvme_engine=args.engine,
        threads=args.threads,
        moment_dtype=moments,
    )
    return ZeroEngine(model, torch.optim.AdamW(model.parameters(), **OPTIONS), config)


class DeepSpeed:
    """DeepSpeed's stage 3 with optimizer states on NVMe, in a pipeline.

    Args:
        args: numel, and the folder that its files go to.
        folder: a folder in it.
    """

    def __init__(self, args: argparse.Namespace, folder: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        # What it reads before anything can be told to it.
        os.environ.update(
            DS_ACCELERATOR="cpu",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            RANK="0",
            LOCAL_RANK="0",
            WORLD_SIZE="1",
        )
        deepspeed: Any = importlib.import_module("deepspeed")
        adam: Any = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
        model = Flat(args.numel)
        offload = {
            "device": "nvme",
            "nvme_path": folder,
            "pipeline_read": True,
            "pipeline_write": True,
            # Master, gradient and two moments of the sub-groups that are read, updated and written at one time: 384 MB.
            "buffer_count": 12,
        }
        settings = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "zero_optimization": {
                "stage": 3,
                "sub_group_size": PART,
                "stage3_param_persistence_threshold": 0,
                "offload_optimizer": offload,
            },
            "aio": {
                "block_size": 1 << 20,
                "queue_depth": 32,
                "single_submit": False,
                "overlap_events": True,
                "intra_op_parallelism": 1,
            },
        }
        optimizer = adam(model.parameters(), adamw_mode=True, **OPTIONS)
        self.engine = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]
        swapper = type(self.engine.optimizer.optimizer_swapper).__name__
        if swapper != "PipelinedOptimizerSwapper":
            raise RuntimeError(
                f"DeepSpeed took its {swapper}: only its pipelined swapper is measured here"
            )

    def prepare(self) -> None:
        """A gradient, as its step wants it."""
        self.engine.backward(self.engine())

    def step(self) -> None:
        """The step; its last write ends in it."""
        self.engine.step()


def deepspeed_side(args: argparse.Namespace, folder: str) -> DeepSpeed | str:
    """DeepSpeed's side, or why there is none."""
    if importlib.util.find_spec("deepspeed") is None:
        return "DeepSpeed is not installed"
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    builder: Any = importlib.import_module("deepspeed.ops.op_builder").AsyncIOBuilder
    if not builder().is_compatible(verbose=False):
        return "DeepSpeed's asynchronous I/O cannot be built here: it needs libaio and its headers"
    return DeepSpeed(args, folder)


def compare(args: argparse.Namespace) -> Report:
    """Measures every side; DeepSpeed's files go away with it."""
    with tempfile.TemporaryDirectory(dir=args.path) as folder:
        return measure(args, deepspeed_side(args, folder) if args.deepspeed else "not asked for")


def bytes_of(tiles: Sequence[Tile]) -> int:
    """Bytes that a step reads, and writes again."""
    return sum(tile.nbytes for tile in tiles)


def step_of(engine: ZeroEngine) -> Callable[[], None]:
    """A step of an engine whose gradients are there and stay: only the step is timed."""
    optimizer = engine.optimizers[0]

    def step() -> None:
        engine._reducer.spent.clear()
        optimizer.step()
        engine.drain()

    engine.backward(engine.model())
    return step


def measure(args: argparse.Namespace, other: DeepSpeed | str) -> Report:
    engine = make_engine(args)
    small = {moments: make_engine(args, moments) for moments in args.moments}
    try:
        parts = Parts(engine)
        step = step_of(engine)
        # The parts alone leave other tiles' bytes in the file, which changes no time.
        sides: dict[str, Callable[[], object]] = {
            "step": step,
            PARTS[0]: parts.read,
            PARTS[1]: parts.update,
            PARTS[2]: parts.write,
            BOTH: parts.both,
        }
        moved: dict[str, int] = {}
        for moments, each in small.items():
            name = f"step, {moments} moments"
            sides[name], moved[name] = step_of(each), bytes_of(Parts(each).tiles)
        prepare: dict[str, Callable[[], object]] = {}
        if isinstance(other, DeepSpeed):
            sides[SWAPPER], prepare[SWAPPER] = other.step, other.prepare
        seconds = interleaved(sides, args.rounds, prepare=prepare)
        slowest = [max(times) for times in zip(*(seconds[name] for name in PARTS), strict=True)]
        seconds["slowest part"] = slowest
        nbytes = bytes_of(parts.tiles)
        rows = [
            [
                name,
                statistics.median(times),
                min(times),
                moved.get(name, nbytes) / statistics.median(times) / 1e9,
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
                *deepspeed_notes(args, other, seconds),
            ],
        )
    finally:
        for each in (engine, *small.values()):
            each.close()


def deepspeed_notes(
    args: argparse.Namespace, other: DeepSpeed | str, seconds: dict[str, list[float]]
) -> list[str]:
    """What is said of DeepSpeed below the table."""
    if not args.deepspeed:
        return []
    if isinstance(other, str):
        return [f"{SWAPPER}: skipped, {other}"]
    return [f"{SWAPPER} / step: {median_ratio(seconds[SWAPPER], seconds['step']):.3f}"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path, help="a folder on the disk to measure")
    parser.add_argument("--numel", type=float, default=100e6, help="parameters")
    parser.add_argument("--buffer", type=parse_bytes, default=256 << 20)
    parser.add_argument("--engine", choices=("auto", "uring", "threads"), default="auto")
    parser.add_argument(
        "--moments",
        nargs="*",
        choices=("bf16", "int8"),
        default=[],
        help="also steps whose moments are kept so",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=None, help="default: every processor")
    parser.add_argument(
        "--deepspeed", action="store_true", help="also DeepSpeed's pipelined optimizer swapper"
    )
    parser.add_argument("--json", type=Path, default=None, help="file to write the results to")
    args = parser.parse_args()
    args.numel = int(args.numel)
    report = compare(args)
    report.show()
    write_json(args.json, [report])


if __name__ == "__main__":
    main()
