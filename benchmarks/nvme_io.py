"""The I/O engine against fio: same file, block size, queue depth and bytes, in one run.

Every side reads, writes, or does both at once (the first half read while the second is written, by a lane each)
straight through one extent of a store; fio does the same to the store's own file with io_uring and direct I/O, once
with files and buffers registered and once without. fio's seconds are those it reports for its jobs, without its start. The engine's slabs
are of huge pages where the system has them, fio's buffers of ordinary ones: "small pages" is the engine without that.

Run: python benchmarks/nvme_io.py PATH [--bytes 2GiB] [--block 1MiB] [--depth 32] [--rounds 5] [--json out.json]
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from _report import SETTLE_SECONDS, Report, median_ratio, write_json

from zero_plugin.config import parse_bytes
from zero_plugin.runtime.memory import allocate_host, page_aligned
from zero_plugin.store.layout import Extent
from zero_plugin.store.store import NvmeStore

MODES = ("read", "write", "mixed")
TARGET = 0.95
FIO = ("fio", "fio (registered)")


class Ours:
    """One extent of a store and memory to move it to and from, registered as the engine's slabs are."""

    def __init__(self, store: NvmeStore, extent: Extent, memory: Tensor) -> None:
        self.store, self.extent, self.memory = store, extent, memory
        self.half = memory.numel() // 2
        memory.view(torch.int64).random_()
        store.register(memory)
        store.write(extent, 0, memory)

    def seconds(self, mode: str) -> float:
        """Moves every byte once."""
        store, extent, memory = self.store, self.extent, self.memory
        begin = time.perf_counter()
        if mode == "read":
            store.read(extent, 0, memory)
        elif mode == "write":
            store.write(extent, 0, memory)
        else:
            reader = threading.Thread(target=store.read, args=(extent, 0, memory[: self.half]))
            reader.start()
            store.write(extent, self.half, memory[self.half :])
            reader.join()
        return time.perf_counter() - begin

    def file(self) -> Path:
        """Where the bytes lie."""
        return self.store.describe().paths[0].folder / "slab"


def fio_seconds(
    ours: Ours, args: argparse.Namespace, direct: bool, registered: bool, mode: str
) -> float:
    """Seconds of the longest job."""
    base, half = ours.extent.bases[0], ours.half
    jobs = {
        "read": [("read", base, args.bytes)],
        "write": [("write", base, args.bytes)],
        "mixed": [("read", base, half), ("write", base + half, args.bytes - half)],
    }[mode]
    command = ["fio", "--output-format=json", "--ioengine=io_uring", f"--direct={int(direct)}"]
    command += [f"--bs={args.block}", f"--iodepth={args.depth}", f"--filename={ours.file()}"]
    command += ["--overwrite=1", "--allow_file_create=0"]
    if registered:
        command += ["--registerfiles=1", "--fixedbufs=1"]
    # fio's own work on its buffers is switched off.
    command += ["--fallocate=none", "--scramble_buffers=0"]
    for act, offset, size in jobs:
        command += [f"--name={act}", f"--rw={act}", f"--offset={offset}", f"--size={size}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode != 0:
        raise RuntimeError(f"fio failed: {done.stderr or done.stdout}")
    report: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
    moved = [job[act] for job, (act, _, _) in zip(report["jobs"], jobs, strict=True)]
    if sum(part["io_bytes"] for part in moved) != args.bytes:
        raise RuntimeError(f"fio moved {[part['io_bytes'] for part in moved]} bytes")
    # Bandwidth has a finer clock than the runtime, which is in milliseconds.
    return max(part["io_bytes"] / part["bw_bytes"] for part in moved)


def compare(path: Path, args: argparse.Namespace) -> Report:
    stores = [
        NvmeStore([path], engine=engine, queue_depth=args.depth, block_bytes=args.block)
        for engine in (args.engine, "threads")
    ]
    extents = [store.reserve(args.bytes, "benchmark") for store in stores]
    huge = allocate_host(args.bytes)
    small = page_aligned(torch.empty(args.bytes + 8192, dtype=torch.uint8))[: args.bytes]
    ours = Ours(stores[0], extents[0], huge)
    description = ours.store.describe()
    direct = description.paths[0].direct
    sides: dict[str, Callable[[str], float]] = {
        f"ours ({description.engine})": ours.seconds,
        f"ours ({description.engine}, small pages)": Ours(stores[0], extents[0], small).seconds,
    }
    if description.engine != "threads":
        sides["ours (threads)"] = Ours(stores[1], extents[1], huge).seconds
    notes = [str(description)]
    if shutil.which("fio") is None:
        notes.append("fio is not installed here: no ratio (apt-get install fio)")
    else:
        for name, registered in zip(FIO, (False, True), strict=True):
            sides[name] = partial(fio_seconds, ours, args, direct, registered)
    seconds: dict[tuple[str, str], list[float]] = {}
    for turn in range(args.rounds + 1):
        for mode in MODES:
            for name, run in sides.items():
                time.sleep(SETTLE_SECONDS)
                spent = run(mode)
                if turn:
                    seconds.setdefault((name, mode), []).append(spent)
    first = next(iter(sides))
    rows: list[list[str | float]] = []
    for mode in MODES:
        for name in sides:
            spent = seconds[name, mode]
            ratio: str | float = "-"
            if FIO[0] in sides and name not in FIO:
                best = [
                    min(pair) for pair in zip(*(seconds[fio, mode] for fio in FIO), strict=True)
                ]
                ratio = median_ratio(best, spent)
            rows.append([mode, name, args.bytes / statistics.median(spent) / 1e9, ratio])
            if name == first and isinstance(ratio, float) and ratio < TARGET:
                notes.append(f"{mode}: below {TARGET} of fio")
    notes.append(
        "GB/s is of the median round; the ratio, our bandwidth / that of fio's faster run of the round, is the median"
    )
    notes.append(ours.store.registration() or "files and memory are registered")
    for store in stores:
        store.close()
    settings = {
        "bytes": args.bytes,
        "block": args.block,
        "depth": args.depth,
        "rounds": args.rounds,
    }
    return Report(
        benchmark="NVMe I/O",
        settings=settings,
        columns=("mode", "side", "GB/s", "of fio"),
        rows=rows,
        notes=notes,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("path", type=Path, help="folder on the disk to measure")
    parser.add_argument("--bytes", type=parse_bytes, default=parse_bytes("2GiB"))
    parser.add_argument("--block", type=parse_bytes, default=parse_bytes("1MiB"))
    parser.add_argument("--depth", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--engine", choices=("auto", "uring", "threads"), default="auto")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.bytes -= args.bytes % (2 * args.block)
    report = compare(args.path, args)
    report.show()
    write_json(args.json, [report])


if __name__ == "__main__":
    main()
