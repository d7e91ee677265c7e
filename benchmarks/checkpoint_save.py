"""A save against plain writes of the same bytes, and training steps with an asynchronous save beside them.

Two tables, each for optimizer states in host memory and in files, and a third where the folder can clone (XFS, btrfs):

- save: `save_checkpoint`, checksums and all, against writing as many bytes with plain 16 MiB writes and one fsync, in the same
  folder, in turn. The aim is 1.1. States in files are read from the disk that is written to: what reading alone takes is shown, and
  the ratio to both, one after the other;
- beside: an asynchronous save and the steps until it has ended, against as many steps without one. The aim is 1.05. As in
  `overlap_step.py` the device only sleeps, and the update is the real one. A step's sleep is `--pace` times the plain
  write, so that the disk keeps up. "Call" is the part of it before the call returns;
- clones: the same for states in files, which are cloned or read before the next update, in turn on one engine; with a device that
  takes no time, and with the sleep of the table before. "First update" is from the call to the end of the next step's update;
  "alone" is a step's without a save.

    python benchmarks/checkpoint_save.py --numel 32e6 --folder /mnt/disk
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from _report import SETTLE_SECONDS, Report, interleaved, machine, median_ratio, write_json
from overlap_step import Block, Pace

from zero_plugin import ZeroConfig, ZeroEngine
from zero_plugin.checkpoint.shardfile import pieces_of
from zero_plugin.store.clones import Clones

BLOCKS = 8
WRITE_BYTES = 16 << 20
SAVE, PLAIN, READ = "save", "plain writes", "reading alone"
TIERS = ("host", "nvme")
CLONED, READ_FIRST, ALONE = "cloned", "read first", "alone"


class Side:
    """An engine whose device sleeps, with its states in one tier.

    Args:
        tier: of the optimizer's states.
        numel: parameters, bf16.
        folder: for states in files, and for checkpoints.
    """

    def __init__(self, tier: str, numel: int, folder: Path) -> None:
        self.folder = folder / tier
        self.folder.mkdir()
        self.pace = Pace()
        gradient = torch.full((numel // BLOCKS,), 1e-3, dtype=torch.bfloat16)
        blocks = (Block(numel // BLOCKS, gradient, self.pace) for _ in range(BLOCKS))
        self.model = nn.Sequential(*blocks).to(torch.bfloat16)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        settings: dict[str, Any] = {"optimizer": tier, "bucket_bytes": 2 * numel // BLOCKS}
        if tier == "nvme":
            settings["nvme_path"] = self.folder
        self.engine = ZeroEngine(self.model, self.optimizer, ZeroConfig(**settings))
        self.step()
        self.nbytes = self.save()

    @property
    def place(self) -> Path:
        """Where it saves."""
        return self.folder / "ck"

    def step(self) -> None:
        """One step."""
        start = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
        self.engine.backward(self.model(start).sum())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self) -> int:
        """Save; the bytes written."""
        self.engine.save_checkpoint(self.place)
        return sum(path.stat().st_size for path in self.place.iterdir())

    def clear(self) -> None:
        """Before a save: nothing runs, and nothing is at its place."""
        self.engine.wait_for_update()
        shutil.rmtree(self.place, ignore_errors=True)
        os.sync()

    def read(self) -> None:
        """Read states in files, as a save does."""
        for item in self.engine._checkpoints._holdings.state_parts()[1]:
            for _ in pieces_of(item.parts):
                pass

    def settle(self) -> None:
        """As `clear`, and the last step's update has begun just now."""
        self.clear()
        forward, backward = self.pace.forward, self.pace.backward
        self.pace.forward = self.pace.backward = 0.0
        self.step()
        self.pace.forward, self.pace.backward = forward, backward

    def first_update(self, how: str) -> tuple[float, float]:
        """Seconds from the call of a save, or without one, to the end of the next step's update, and to the end of the save."""
        self.settle()
        self.engine.wait_for_update()
        os.sync()
        start = time.perf_counter()
        if how != ALONE:
            with (
                mock.patch.object(Clones, "has_room", return_value=False)
                if how == READ_FIRST
                else nullcontext()
            ):
                self.engine.save_checkpoint(self.place, asynchronous=True)
        self.step()
        self.engine.wait_for_update()
        updated = time.perf_counter() - start
        self.engine.drain()
        return updated, time.perf_counter() - start

    def steps_beside(self, *, save: bool, steps: int = 0) -> tuple[float, float, int]:
        """Seconds of some steps, or of those that a save takes; seconds of the call, and the number of steps."""
        self.settle()
        start, count = time.perf_counter(), 0
        if save:
            self.engine.save_checkpoint(self.place, asynchronous=True)
        called = time.perf_counter() - start
        while count < steps or (save and not self.place.exists()):
            self.step()
            count += 1
        return time.perf_counter() - start, called, count


@dataclass(kw_only=True, slots=True)
class Spent:
    """Processor seconds of a side's runs, beside the time that passes."""

    seconds: list[float] = field(default_factory=list)

    def measured(self, run: Callable[[], object]) -> Callable[[], object]:
        """The same act, counted."""

        def act() -> None:
            before = resource.getrusage(resource.RUSAGE_SELF)
            run()
            after = resource.getrusage(resource.RUSAGE_SELF)
            self.seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)

        return act


def write_plainly(path: Path, nbytes: int, content: memoryview) -> None:
    """As many bytes in large writes, and one sync."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        for start in range(0, nbytes, WRITE_BYTES):
            left = content[: min(WRITE_BYTES, nbytes - start)]
            while left:
                left = left[os.write(descriptor, left) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def compare_saves(side: Side, tier: str, rounds: int, content: memoryview) -> list[Any]:
    """The first table's row of a tier."""
    path = side.folder / "plain"

    def clear() -> None:
        side.clear()
        path.unlink(missing_ok=True)
        os.sync()

    spent = {SAVE: Spent(), PLAIN: Spent()}
    runs: dict[str, Callable[[], object]] = {
        SAVE: spent[SAVE].measured(side.save),
        PLAIN: spent[PLAIN].measured(lambda: write_plainly(path, side.nbytes, content)),
    }
    if tier == "nvme":
        runs[READ] = side.read
    seconds = interleaved(runs, rounds, prepare=dict.fromkeys(runs, clear))
    clear()
    medians = [statistics.median(seconds[name]) for name in (SAVE, PLAIN)]
    reading = statistics.median(seconds[READ]) if READ in seconds else 0.0
    processor = [statistics.median(spent[name].seconds[1:]) for name in (SAVE, PLAIN)]
    ratio = median_ratio(seconds[SAVE], seconds[PLAIN])
    side.pace.forward = side.pace.backward = medians[1] / (2 * BLOCKS)
    both = [sum(pair) for pair in zip(seconds[PLAIN], seconds.get(READ, []), strict=False)]
    floor = median_ratio(seconds[SAVE], both) if both else ratio
    return [tier, side.nbytes / 1e6, *medians, reading, *processor, ratio, floor]


def compare_steps(side: Side, tier: str, rounds: int) -> list[Any]:
    """The second table's row of a tier."""
    with_save: list[float] = []
    without: list[float] = []
    calls: list[float] = []
    counts: list[int] = []
    for turn in range(rounds + 1):
        time.sleep(SETTLE_SECONDS)
        beside, called, count = side.steps_beside(save=True)
        time.sleep(SETTLE_SECONDS)
        alone, *_ = side.steps_beside(save=False, steps=count)
        if turn:
            with_save.append(beside)
            without.append(alone)
            calls.append(called)
            counts.append(count)
    sleep = BLOCKS * (side.pace.forward + side.pace.backward)
    return [
        tier,
        sleep,
        statistics.median(counts),
        statistics.median(calls),
        statistics.median(with_save),
        statistics.median(without),
        median_ratio(with_save, without),
    ]


def compare_clones(side: Side, rounds: int) -> list[list[Any]]:
    """The third table's rows."""
    rows: list[list[Any]] = []
    sleeping = side.pace.forward
    for sleep in (0.0, sleeping):
        side.pace.forward = side.pace.backward = sleep
        ways = (CLONED, READ_FIRST, ALONE)
        updated: dict[str, list[float]] = {how: [] for how in ways}
        ended: dict[str, list[float]] = {how: [] for how in ways}
        for turn in range(rounds + 1):
            for how in ways:
                time.sleep(SETTLE_SECONDS)
                first, end = side.first_update(how)
                if turn:
                    updated[how].append(first)
                    ended[how].append(end)
        rows.append(
            [
                2 * BLOCKS * sleep,
                *(statistics.median(updated[how]) for how in ways),
                median_ratio(updated[CLONED], updated[ALONE]),
                median_ratio(updated[READ_FIRST], updated[ALONE]),
                *(statistics.median(ended[how]) for how in (CLONED, READ_FIRST)),
            ]
        )
    return rows


def compare(args: argparse.Namespace) -> list[Report]:
    """The tables."""
    content = memoryview(os.urandom(WRITE_BYTES))
    saves: list[list[Any]] = []
    beside: list[list[Any]] = []
    clones: list[list[Any]] = []
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="zero-plugin-bench-") as folder:
        for tier in args.tiers:
            side = Side(tier, args.numel, Path(folder))
            try:
                saves.append(compare_saves(side, tier, args.rounds, content))
                side.pace.forward *= args.pace
                side.pace.backward *= args.pace
                beside.append(compare_steps(side, tier, max(1, args.rounds // 2)))
                store = side.engine._checkpoints._holdings.store
                if store is not None and store.describe().paths[0].clones:
                    clones = compare_clones(side, args.rounds)
            finally:
                side.engine.close()
    settings = {
        "parameters": args.numel,
        "rounds": args.rounds,
        "load": round(machine()["load"], 1),
    }
    reports = [
        Report(
            benchmark="a save against plain writes",
            settings=settings,
            columns=(
                "states",
                "MB",
                SAVE,
                PLAIN,
                READ,
                "its CPU",
                "their CPU",
                "save / plain",
                "save / both",
            ),
            rows=saves,
        ),
        Report(
            benchmark="steps with an asynchronous save beside them",
            settings=settings | {"pace": args.pace},
            columns=("states", "sleep", "steps", "call", "with", "without", "with / without"),
            rows=beside,
        ),
    ]
    if clones:
        reports.append(
            Report(
                benchmark="the first update beside a save of states in files",
                settings=settings,
                columns=(
                    "sleep",
                    *(CLONED, READ_FIRST, ALONE),
                    "cloned / alone",
                    "read / alone",
                    "saved, cloned",
                    "saved, read",
                ),
                rows=clones,
            )
        )
    return reports


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--numel", type=float, default=32e6, help="parameters, bf16")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument(
        "--tiers", nargs="+", choices=TIERS, default=list(TIERS), help="where the states lie"
    )
    parser.add_argument("--pace", type=float, default=3.0, help="sleep of a step / plain write")
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure")
    parser.add_argument("--json", type=Path, default=None, help="file to write the results to")
    args = parser.parse_args()
    args.numel = int(args.numel)
    reports = compare(args)
    for report in reports:
        report.show()
    write_json(args.json, reports)


if __name__ == "__main__":
    main()
