"""Run in a process of its own by test_nvme_faults.py.

python nvme_scenarios.py faults SHIM ENGINE FOLDER: every fault's outcome, as JSON on the last line (SHIM is preloaded).
python nvme_scenarios.py train FOLDER [SETTING=VALUE ...]: trains until it is killed, a line for each step.
"""

from __future__ import annotations

import ctypes
import errno
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.models import gpt_batch, make_gpt
from support.training import adamw, config, snapshot

from zero_plugin.engine import ZeroEngine
from zero_plugin.errors import StoreError

PAGE = 4096
STEPS = 5


def build(folder: str, **settings: Any) -> tuple[Any, Any, ZeroEngine]:
    """A small model whose one block has many tiles."""
    model = make_gpt(torch.bfloat16, width=24, layers=1)
    optimizer = adamw(model.parameters())
    chosen = {
        "optimizer": "nvme",
        "nvme_path": folder,
        "nvme_buffer_bytes": 12 * PAGE,
        "bucket_bytes": "1MiB",
        "backend": "threads",
        **settings,
    }
    return model, optimizer, ZeroEngine(model, optimizer, config(**chosen))


def step(model: Any, optimizer: Any, engine: ZeroEngine, number: int) -> None:
    engine.backward(model(gpt_batch(number)))
    optimizer.step()
    engine.wait_for_update()
    optimizer.zero_grad()


def chain(error: BaseException | None) -> list[BaseException]:
    """An exception and its causes."""
    found: list[BaseException] = []
    while error is not None:
        found.append(error)
        error = error.__cause__
    return found


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


class Trial:
    """Training with one fault in it."""

    def __init__(self, shim: Any, engine: str, folder: str, right: list[Any]) -> None:
        self._shim = shim
        self._engine = engine
        self._folder = folder
        self._right = right

    def __call__(
        self, act: str, first: int, error: int = 0, short: int = 0, **settings: Any
    ) -> dict[str, Any]:
        model, optimizer, engine = build(self._folder, nvme_engine=self._engine, **settings)
        step(model, optimizer, engine, 0)
        engine.drain()
        count = 10**6 if short < 0 else 1
        self._shim.shim_plan(act == "write", first, count, error, max(short, 0))
        found: dict[str, Any] = {"raised_at": None, "wrong": [], "again": None}
        caught: BaseException | None = None
        hit_at = None
        begin = time.monotonic()
        number = 1
        for number in range(1, STEPS):
            try:
                step(model, optimizer, engine, number)
            except Exception as raised:  # noqa: BLE001 - which one is the outcome
                caught = raised
                break
            if hit_at is None and self._shim.shim_hits():
                hit_at = number
            if not same(engine.full_state_dict(), self._right[number]):
                found["wrong"].append(number)
        if caught is None:
            try:
                optimizer.state_dict()
            except Exception as raised:  # noqa: BLE001 - which one is the outcome
                caught = raised
                number = STEPS
        found["seconds"] = time.monotonic() - begin
        found["hits"] = self._shim.shim_hits()
        self._shim.shim_plan(0, 0, 0, 0, 0)
        if caught is not None:
            causes = chain(caught)
            stores = [item for item in causes if isinstance(item, StoreError)]
            found |= {
                "raised_at": number,
                "late": number - (hit_at or number),
                "type": type(caught).__name__,
                "message": " <- ".join(str(item) for item in causes),
                "errno": stores[-1].errno if stores else None,
                "is_store": bool(stores),
            }
            engine.abort_step()
            try:  # What could not be read or written is not taken for good afterwards.
                step(model, optimizer, engine, number)
                found["again"] = ""
            except Exception as raised:  # noqa: BLE001 - which one is the outcome
                found["again"] = type(raised).__name__
        begin = time.monotonic()
        found["close_raised"] = ""
        try:
            engine.close()
        except Exception as raised:  # noqa: BLE001 - which one is the outcome
            found["close_raised"] = repr(raised)
        found["closing"] = time.monotonic() - begin
        found["left"] = [path.name for path in Path(self._folder).iterdir()]
        return found


def faults(shim_path: str, engine: str, folder: str) -> dict[str, Any]:
    shim = ctypes.CDLL(shim_path)
    shim.shim_plan.argtypes = [ctypes.c_int, *[ctypes.c_long] * 2, ctypes.c_int, ctypes.c_long]
    shim.shim_hits.restype = ctypes.c_long
    model, optimizer, plain = build(folder)
    right = []
    for number in range(STEPS):
        step(model, optimizer, plain, number)
        right.append(snapshot(model))
    plain.close()
    trial = Trial(shim, engine, folder, right)
    found: dict[str, Any] = {}
    for act in ("read", "write"):
        for name in ("EIO", "ENOSPC"):
            for first in (1, 9, 23):
                found[f"{act} {name} {first}"] = trial(act, first, getattr(errno, name))
        found[f"{act} EIO late"] = trial(act, 34, errno.EIO)
        found[f"{act} EIO stage 3"] = trial(act, 4, errno.EIO, stage=3)
        found[f"{act} EIO cache"] = trial(act, 4, errno.EIO, nvme_cache_bytes=36 * PAGE // 2)
        found[f"{act} EIO chaos"] = trial(act, 4, errno.EIO, backend="chaos")
        found[f"{act} EIO inline"] = trial(act, 4, errno.EIO, backend="inline")
        found[f"{act} ends"] = trial(act, 6, short=-1)
        found[f"{act} short"] = trial(act, 6, short=PAGE)
    return found


def main() -> None:
    torch.set_num_threads(1)
    act, *rest = sys.argv[1:]
    if act == "faults":
        sys.stdout.write("\n" + json.dumps(faults(*rest)) + "\n")
        return
    folder, *pairs = rest
    model, optimizer, engine = build(folder, **dict(pair.split("=") for pair in pairs))
    number = 0
    while True:
        step(model, optimizer, engine, number)
        sys.stdout.write(f"step {number}\n")
        sys.stdout.flush()
        number += 1


if __name__ == "__main__":
    main()
