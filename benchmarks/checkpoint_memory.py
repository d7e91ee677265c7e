"""Host memory that saves and loads take over what is resident, for a model of any size.

A bf16 model with AdamW: 12 bytes of masters and moments a parameter, in host memory and in files. Of each act the most resident
memory (`VmHWM`, with the pages of mapped files) over what was resident before is shown. The aim is 512 MiB.

    python benchmarks/checkpoint_memory.py --numel 200e6 --folder /mnt/disk
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from _report import Report, write_json

from zero_plugin import ZeroConfig, ZeroEngine

SIDE = 4096
TIERS = ("host", "nvme")


def resident(name: str) -> int:
    """Bytes of a line of this process's status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {name}")


def taken_by(act: Callable[[], object]) -> float:
    """Most MB over what was resident before."""
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    act()
    return (resident("VmHWM") - before) / 1e6


def measure(tier: str, numel: int, folder: Path) -> list[Any]:
    """A tier's row."""
    layers = max(1, numel // SIDE**2)
    model = nn.Sequential(
        *(nn.Linear(SIDE, SIDE, bias=False, dtype=torch.bfloat16) for _ in range(layers))
    )
    settings: dict[str, Any] = {"optimizer": tier}
    if tier == "nvme":
        settings["nvme_path"] = folder
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with ZeroEngine(model, optimizer, ZeroConfig(**settings)) as engine:
        engine.backward(model(torch.ones(1, SIDE, dtype=torch.bfloat16)).sum())
        optimizer.step()
        optimizer.zero_grad()
        engine.wait_for_update()
        place = folder / "ck"

        def beside() -> None:
            engine.save_checkpoint(place, asynchronous=True)
            engine.drain()

        return [
            tier,
            12 * layers * SIDE**2 / 1e6,
            resident("VmRSS") / 1e6,
            taken_by(lambda: engine.save_checkpoint(place)),
            taken_by(lambda: engine.load_checkpoint(place)),
            taken_by(beside),
        ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--numel", type=float, default=200e6, help="parameters, bf16")
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to use")
    parser.add_argument("--tier", choices=TIERS, action="append", help="only these")
    parser.add_argument("--json", type=Path, default=None, help="file to write the results to")
    args = parser.parse_args()
    rows: list[list[Any]] = []
    for tier in args.tier or TIERS:
        with tempfile.TemporaryDirectory(dir=args.folder, prefix="zero-plugin-bench-") as folder:
            rows.append(measure(tier, int(args.numel), Path(folder)))
    report = Report(
        benchmark="memory of saves and loads",
        settings={"parameters": int(args.numel)},
        columns=("states", "MB of states", "resident", "save", "load", "asynchronous save"),
        rows=rows,
    )
    report.show()
    write_json(args.json, [report])


if __name__ == "__main__":
    main()
