"""`zero-plugin bench`: measure this machine once, for the planner. Under torchrun the ranks' collectives too."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_plugin.errors import ConfigError

if TYPE_CHECKING:
    from zero_plugin.sharding.group import ProcessGroup

_BAR = 30
_LINES = (
    ("host_bandwidth", "host memory", "B/s"),
    ("update", "compiled AdamW, 28 bytes a parameter", "B/s"),
    ("flops", "matrix products", "op/s"),
    ("up", "host to device, both ways busy", "B/s"),
    ("down", "device to host, both ways busy", "B/s"),
    ("device_bandwidth", "device memory", "B/s"),
    ("gather", "weights into new memory", "B/s"),
    ("norm", "exact norm of gradients", "B/s"),
    ("collective", "all-gather, sent by a rank", "B/s"),
    ("reduce", "reduce-scatter, sent by a rank", "B/s"),
)
_FIXED = (
    ("step_seconds", "a step"),
    ("launch_seconds", "a reduced and updated block"),
    ("unit_seconds", "a gathered unit"),
    ("tile_seconds", "more for a block in files"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--nvme",
        metavar="PATH",
        action="append",
        default=[],
        help="a folder of the nvme tier; again for more",
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="for each part, roughly")
    parser.add_argument(
        "--cache", metavar="PATH", help="folder to keep the result in; without: the user's cache"
    )
    parser.add_argument("--fresh", action="store_true", help="measure even if a result is kept")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Measure, keep the result, and print it."""
    from zero_plugin.integrations.overheads import measure_overheads
    from zero_plugin.machine.bench import measure, measure_collectives
    from zero_plugin.machine.cache import load_measurement, save_measurement

    for path in arguments.nvme:
        # An empty one (a variable that is not set) would be the working folder.
        if not path or not Path(path).is_dir():
            raise ConfigError(f"--nvme {path!r} is not a folder: name one on a fast local disk")
    paths = [Path(path) for path in arguments.nvme]
    if not 0 < arguments.seconds <= 10:
        raise ConfigError(f"--seconds {arguments.seconds:g} must be above 0 and at most 10")
    folder = _folder(arguments.cache)
    kept = None if arguments.fresh else load_measurement(folder)
    with _ranks() as group:
        first = group is None or group.rank == 0
        wants = _any_lacks(group, kept, "reduce") and group is not None
        fixed = "step_seconds" if not paths else "tile_seconds"
        known = all(str(path.resolve()) in (kept or {}).get("disks", {}) for path in paths)
        found: dict[str, Any] = {}
        if first and (kept is None or not known):
            shows = _show if sys.stderr.isatty() else None
            found = measure(paths, seconds=arguments.seconds, progress=shows)
        if group is not None and wants:
            found |= measure_collectives(group)
        if _any_lacks(group, kept, fixed):
            found |= measure_overheads(paths[0] if paths else None)
    if not first:
        return 0
    if found:
        file = save_measurement(found, folder)
        if not arguments.json:
            say(f"kept in {file}")
    _report({**(kept or {}), **found}, say, as_json=arguments.json)
    return 0


def _any_lacks(group: ProcessGroup | None, kept: Mapping[str, Any] | None, key: str) -> bool:
    """Whether some rank has no figure of that name; all ranks call it."""
    lacks = key not in (kept or {})
    if group is None:
        return lacks
    import torch

    mine = torch.tensor([int(lacks)], dtype=torch.int64, device="cpu")
    return any(int(row[0]) for row in group.exchange(mine, label="what is kept"))


def _folder(cache: str | None) -> Path | None:
    """Where results are kept if not in the user's cache."""
    if cache is not None and Path(cache).exists() and not Path(cache).is_dir():
        raise ConfigError(f"--cache {cache} is not a folder: name one, or a path to make one at")
    return None if cache is None else Path(cache)


def _number(name: str, default: str) -> int:
    value = os.environ.get(name, default)
    try:
        return int(value)
    except ValueError:
        raise ConfigError(
            f"the environment has {name}={value!r}, which is no number: start ranks with torchrun, or unset it"
        ) from None


@contextmanager
def _ranks() -> Generator[ProcessGroup | None]:
    """The ranks that torchrun started, or None."""
    if _number("WORLD_SIZE", "1") < 2:
        yield None
        return
    import torch
    import torch.distributed as dist

    from zero_plugin.sharding.group import ProcessGroup
    from zero_plugin.trace import Ledger

    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if device.type != "cpu":
        torch.accelerator.set_device_index(_number("LOCAL_RANK", "0"))
    group = ProcessGroup.create(device=device, ledger=Ledger(), timeout_seconds=300.0)
    try:
        yield group
    finally:
        group.close()
        dist.destroy_process_group()


def _show(done: int, every: int, name: str) -> None:
    """A progress bar on standard error."""
    filled = _BAR * done // every
    text = f"\r[{'#' * filled}{'.' * (_BAR - filled)}] {done}/{every} {name}"
    sys.stderr.write(f"{text:<100.100}" + ("\n" if done == every else ""))
    sys.stderr.flush()


def _report(found: Mapping[str, Any], say: Callable[[str], None], *, as_json: bool) -> None:
    if as_json:
        say(json.dumps(found, indent=2))
        return
    for key, name, unit in _LINES:
        if key in found:
            say(f"{name:40} {_rate(found[key])}{unit}")
    for key, name in _FIXED:
        if key in found:
            say(f"{'fixed cost of ' + name:40} {found[key] * 1e3:.2f} ms")
    for path, rates in found.get("disks", {}).items():
        if "error" in rates:
            say(f"disk {path}: {rates['error']}")
            continue
        say(
            f"disk {path}: read {_rate(rates['read'])}B/s, write {_rate(rates['write'])}B/s, both at once "
            f"{_rate(rates['mixed_read'])}B/s each; {rates['engine']}, blocks of {rates['block_bytes'] >> 10} KiB, depth "
            f"{rates['queue_depth']}, {'direct' if rates['direct'] else 'through the page cache'} on {rates['file_system']}"
        )


def _rate(value: float) -> str:
    for power, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= power:
            return f"{value / power:.3g} {prefix}"
    return f"{value:.3g} "
