"""Run in a process with fault_shim.c preloaded: every scenario's outcome, as JSON on the last line.

python fault_scenarios.py SHIM ENGINE FOLDER [FOLDER]
"""

from __future__ import annotations

import ctypes
import errno
import json
import random
import sys
import time
from typing import Any

import torch

from zero_plugin.errors import StoreError
from zero_plugin.runtime.memory import allocate_host
from zero_plugin.store.store import NvmeStore

BLOCK = 64 << 10
NBYTES = 40 * BLOCK + 4096
ERRORS = ("EIO", "ENOSPC", "EDQUOT", "EROFS", "ENODEV", "EFBIG", "ESTALE", "EINVAL", "EPERM")


class Faults:
    def __init__(self, shim: str) -> None:
        self._shim = ctypes.CDLL(shim)
        self._shim.shim_plan.argtypes = [
            ctypes.c_int,
            *[ctypes.c_long] * 2,
            ctypes.c_int,
            ctypes.c_long,
        ]
        self._shim.shim_enter.argtypes = [ctypes.c_long, ctypes.c_int]
        self._shim.shim_hits.restype = ctypes.c_long

    def plan(self, act: str, first: int, count: int, *, error: int = 0, short: int = 0) -> None:
        self._shim.shim_plan(act == "write", first, count, error, short)

    def enter(self, count: int, error: int) -> None:
        self._shim.shim_enter(count, error)

    def clear(self) -> None:
        self._shim.shim_plan(0, 0, 0, 0, 0)
        self._shim.shim_enter(0, 0)

    def hits(self) -> int:
        return self._shim.shim_hits()


class Bench:
    def __init__(self, faults: Faults, engine: Any, folders: list[str]) -> None:
        self.faults = faults
        self.store = NvmeStore(folders, engine=engine, block_bytes=BLOCK, queue_depth=4)
        self.extent = self.store.reserve(NBYTES, "states")
        self.source, self.back = allocate_host(NBYTES), allocate_host(NBYTES)
        self.turn = 0

    def trial(self, act: str) -> dict[str, Any]:
        """Writes new bytes and reads them back while the plan stands; then once more without it."""
        self.turn += 1
        self.source.copy_(
            torch.randint(0, 256, (NBYTES,), generator=torch.Generator().manual_seed(self.turn))
        )
        self.back.fill_(0xAA)
        begin = time.monotonic()
        outcome: dict[str, Any] = {"error": None}
        try:
            if act == "read":
                self.quietly(lambda: self.store.write(self.extent, 0, self.source))
                self.store.read(self.extent, 0, self.back)
            else:
                self.store.write(self.extent, 0, self.source)
                self.quietly(lambda: self.store.read(self.extent, 0, self.back))
            outcome["equal"] = torch.equal(self.source, self.back)
        except StoreError as error:
            outcome |= {"error": str(error), "errno": error.errno}
        outcome |= {"hits": self.faults.hits(), "seconds": time.monotonic() - begin}
        self.faults.clear()
        self.store.write(self.extent, 0, self.source)
        self.store.read(self.extent, 0, self.back)
        outcome["right_after"] = torch.equal(self.source, self.back)
        return outcome

    @staticmethod
    def quietly(act: Any) -> None:
        # The plan counts only the other direction.
        act()


def outcomes(bench: Bench) -> dict[str, dict[str, Any]]:
    faults, found = bench.faults, {}
    for act in ("read", "write"):
        for name in ("EINTR", "EAGAIN"):
            faults.plan(act, 2, 30, error=getattr(errno, name))
            found[f"{act} {name} often"] = bench.trial(act)
        for short in (4096, 12288, 5000):
            faults.plan(act, 1, 60, short=short)
            found[f"{act} short {short}"] = bench.trial(act)
        faults.plan(act, 3, 4, short=100)
        found[f"{act} short 100"] = bench.trial(act)
        faults.plan(act, 5, 10**6, short=0)
        found[f"{act} nothing moved"] = bench.trial(act)
        for name in ERRORS:
            for first in (1, 3, 41):
                faults.plan(act, first, 1, error=getattr(errno, name))
                found[f"{act} {name} {first}"] = bench.trial(act)
        if act == "read" and len(bench.store.describe().paths) == 1:
            faults.plan(act, 2, 10**6, error=errno.EAGAIN)
            found["EAGAIN for ever"] = bench.trial(act)
        if bench.store.describe().engine == "uring":
            for name in ("EINTR", "EAGAIN", "EBUSY", "ENOMEM"):
                faults.enter(25, getattr(errno, name))
                found[f"{act} enter {name}"] = bench.trial(act)
            faults.enter(1, errno.EPERM)
            found[f"{act} enter EPERM"] = bench.trial(act)
    draw = random.Random(5)
    for seed in range(60):
        act = draw.choice(("read", "write"))
        error = draw.choice((0, 0, errno.EINTR, errno.EAGAIN, errno.EIO))
        faults.plan(
            act, draw.randint(1, 50), draw.randint(1, 7), error=error, short=draw.randint(0, BLOCK)
        )
        found[f"random {seed}"] = bench.trial(act)
    return found


def main() -> None:
    shim, engine, *folders = sys.argv[1:]
    found: dict[int, Any] = {}
    for count in range(1, len(folders) + 1):
        bench = Bench(Faults(shim), engine, folders[:count])
        paths = [str(path.folder / "slab") for path in bench.store.describe().paths]
        found[count] = {"outcomes": outcomes(bench), "paths": paths}
        bench.store.close()
    sys.stdout.write("\n" + json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
