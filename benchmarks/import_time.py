"""What `import torch; import lightning` costs more with zero-plugin installed, in a run that does not ask for it.

    python benchmarks/import_time.py [--runs 15] [--json import_time.json]

Interpreters with the registration on and off start in turn, so that a drift of the machine meets both alike; the
first figures are medians of the differences of neighbours, of wall time and of the interpreter's processor time. Both
drift by more than the bound of 20 ms where other programs run. So the last row times what is added itself, in new
interpreters: loading the entry point, calling it, and importing and running the registration.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

BOUND_MS = 20.0
CODE = "import torch; import lightning"
OWN_CODE = """
import importlib.metadata, time, types
class Registry(dict):
    def register(self, name, strategy, description, **init_params):
        self[name] = {"strategy": strategy, "init_params": init_params}
modules = [
    types.ModuleType("lightning.pytorch.strategies"), types.ModuleType("lightning.fabric.strategies")
]
modules[0].StrategyRegistry = modules[1].STRATEGY_REGISTRY = Registry()
(entry_point,) = importlib.metadata.entry_points(group="torch.backends", name="zero_plugin")
start = time.perf_counter()
entry_point.load()()
from zero_plugin.integrations.registration import register_strategies
for module in modules:
    register_strategies(module)
print(time.perf_counter() - start)
"""


def seconds(*, on: bool) -> tuple[float, float]:
    """Wall and processor time of one new interpreter, start included."""
    environment = {**os.environ, "ZERO_PLUGIN_AUTOLOAD": "1" if on else "0"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", CODE], env=environment, check=True)
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def own_seconds() -> float:
    """Time what an import of Lightning does for us, in a new interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", OWN_CODE], capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def summary(on: list[float], off: list[float]) -> dict[str, object]:
    """Medians in milliseconds, and the quartiles of what is added."""
    added = [1e3 * (a - b) for a, b in zip(on, off, strict=True)]
    return {
        "with_ms": round(1e3 * statistics.median(on), 1),
        "without_ms": round(1e3 * statistics.median(off), 1),
        "added_ms": round(statistics.median(added), 1),
        "added_quartiles_ms": [round(value, 1) for value in statistics.quantiles(added, n=4)],
    }


def main() -> int:
    """Measure, print and write; returns 1 when the bound is missed."""
    parser = argparse.ArgumentParser(description="Time added to importing torch and lightning.")
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    seconds(on=True)  # fills the file cache
    seconds(on=False)
    on: list[tuple[float, float]] = []
    off: list[tuple[float, float]] = []
    for run in range(options.runs):
        for switch in (True, False) if run % 2 else (False, True):
            (on if switch else off).append(seconds(on=switch))
    result = {
        name: summary([pair[i] for pair in on], [pair[i] for pair in off])
        for i, name in enumerate(("wall", "processor"))
    }
    print(f"{CODE!r}, {options.runs} pairs")
    print(f"{'':12}{'with':>12}{'without':>12}{'added':>12}   quartiles")
    for name, row in result.items():
        cells = "".join(f"{row[key]:>9} ms" for key in ("with_ms", "without_ms", "added_ms"))
        print(f"{name:12}{cells}   {row['added_quartiles_ms']}")
    own_ms = round(1e3 * statistics.median(own_seconds() for _ in range(options.runs)), 1)
    print(f"{'own code':12}{'':>12}{'':>12}{own_ms:>9} ms")
    met = own_ms < BOUND_MS
    print(f"bound {BOUND_MS} ms: {'met' if met else 'MISSED'}")
    if options.json is not None:
        everything = {
            "code": CODE,
            "runs": options.runs,
            "bound_ms": BOUND_MS,
            "own_code_ms": own_ms,
            **result,
        }
        options.json.write_text(json.dumps(everything, indent=2) + "\n")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
