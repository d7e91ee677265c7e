"""`ZeroConfig.auto`: this machine measured, the model planned for, and the plan agreed on by all ranks."""

from __future__ import annotations

import json
import logging
import socket
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero_plugin.config import ZeroConfig
from zero_plugin.errors import BudgetError
from zero_plugin.machine.bench import measure
from zero_plugin.machine.cache import load_measurement, save_measurement
from zero_plugin.machine.hardware import Hardware
from zero_plugin.planner.here import here
from zero_plugin.planner.plan import Plan, plan
from zero_plugin.planner.show import as_dict, summary
from zero_plugin.sharding.group import ProcessGroup
from zero_plugin.trace import Ledger

_logger = logging.getLogger("zero_plugin")

_SECONDS = 0.15
"""For each part of a measurement that a run makes itself; `zero-plugin bench` takes more time and is more exact."""

_TIMEOUT = 300.0


def auto_config(
    model: nn.Module,
    *,
    hardware: Hardware | str | Path | None = None,
    nvme: str | Path | Sequence[str | Path] | None = None,
    cache: str | Path | None = None,
    **options: Any,
) -> ZeroConfig:
    """The settings of the cheapest placement of a model on this machine and its ranks; all ranks call it.

    Args:
        model: what will be trained, in the dtype it will be trained in.
        hardware: plan for another machine than this one.
        nvme: folder or folders of the `nvme` tier; none are used without.
        cache: folder that measurements are kept in; None: the user's cache folder.
        **options: of `zero_plugin.plan`: the batch, limits, and settings that are fixed.

    Raises:
        BudgetError: nothing fits; says by how much, and what would help.
        ConfigError: an option is wrong.
    """
    group = ProcessGroup.create(
        device=torch.device("cpu"), ledger=Ledger(), timeout_seconds=_TIMEOUT
    )
    try:
        machine = _machine(group, nvme, cache) if hardware is None else hardware
        if nvme is None:
            # Another machine's disks are not a folder here.
            options["nvme_size"] = 0
        found: Plan | None = None
        said: dict[str, Any] = {}
        failure: Exception | None = None
        if group.rank == 0:
            try:
                found = plan(model, hardware=machine, nvme=nvme, alternatives=1, **options)
                said = as_dict(found)
            except Exception as error:  # noqa: BLE001 - told to the other ranks, then raised
                failure = error
        text = _from_first(group, json.dumps({} if failure else {"plan": said}, default=str))
    finally:
        group.close()
    if failure is not None:
        raise failure
    heard: dict[str, Any] = json.loads(text)
    if "plan" not in heard:
        raise BudgetError("planning failed on rank 0: see the error there")
    said = heard["plan"]
    if not said["fits"]:
        raise BudgetError(f"no placement of this model fits: {'; '.join(said['advice'])}")
    for line in () if found is None else summary(found):
        _logger.info("%s", line)
    settings = dict(said["config"])
    if isinstance(settings.get("nvme_path"), list):
        settings["nvme_path"] = tuple(settings["nvme_path"])
    return ZeroConfig(**settings)


def _machine(group: ProcessGroup, nvme: Any, cache: str | Path | None) -> Hardware:
    """This machine with the ranks that run on it, and as many like it as the others need."""
    mine = zlib.crc32(socket.gethostname().encode())
    rows = group.exchange(torch.tensor([mine], dtype=torch.int64, device="cpu"), label="host names")
    same = [rank for rank, row in enumerate(rows) if int(row[0]) == mine]
    paths = [] if nvme is None else [nvme] if isinstance(nvme, (str, Path)) else list(nvme)
    folders = [Path(path) for path in paths if Path(path).is_dir()]
    if same[0] == group.rank:
        kept = None if cache is None else Path(cache)
        known = load_measurement(kept)
        if known is None or any(str(p.resolve()) not in known.get("disks", {}) for p in folders):
            save_measurement(measure(folders, seconds=_SECONDS), kept)
    group.barrier(label="measured")
    machine = here(tuple(map(Path, paths)), world=len(same), cache=cache)
    return replace(machine, machines=max(1, group.size // len(same)))


def _from_first(group: ProcessGroup, text: str) -> str:
    """Rank 0's text, on every rank."""
    raw = text.encode()
    sizes = group.exchange(
        torch.tensor([len(raw)], dtype=torch.int64, device="cpu"), label="size of the plan"
    )
    nbytes = int(sizes[0][0])
    content = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
    if group.rank == 0:
        content = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    group.broadcast([content])
    return bytes(content.tolist()).decode()
