"""What `import torch; import lightning` costs more with zero-plugin installed, in a run that does not ask for it.

    python benchmarks/import_time.py [--runs 15] [--json import_time.json]

Interpreters with the registration on and off start in turn, so that a drift of the machine meets both alike; the
figure is the median of the differences of neighbours. The bound is 20 ms.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

BOUND_MS = 20.0
CODE = "import torch; import lightning"


def seconds(*, on: bool) -> float:
    """Time one new interpreter, start included."""
    environment = {**os.environ, "ZERO_PLUGIN_AUTOLOAD": "1" if on else "0"}
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", CODE], env=environment, check=True)
    return time.perf_counter() - start


def main() -> int:
    """Measure, print and write; returns 1 when the bound is missed."""
    parser = argparse.ArgumentParser(description="Time added to importing torch and lightning.")
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    seconds(on=True)  # fills the file cache
    seconds(on=False)
    on: list[float] = []
    off: list[float] = []
    for run in range(options.runs):
        for switch in (True, False) if run % 2 else (False, True):
            (on if switch else off).append(seconds(on=switch))
    added = [1e3 * (a - b) for a, b in zip(on, off, strict=True)]
    result = {
        "code": CODE,
        "runs": options.runs,
        "with_ms": round(1e3 * statistics.median(on), 1),
        "without_ms": round(1e3 * statistics.median(off), 1),
        "added_ms": round(statistics.median(added), 1),
        "added_quartiles_ms": [round(value, 1) for value in statistics.quantiles(added, n=4)],
        "bound_ms": BOUND_MS,
    }
    print(f"{'':24}{'median':>10}")
    print(f"{'zero-plugin registered':24}{result['with_ms']:>8} ms")
    print(f"{'switched off':24}{result['without_ms']:>8} ms")
    print(
        f"{'added':24}{result['added_ms']:>8} ms   (quartiles {result['added_quartiles_ms']}, bound {BOUND_MS} ms)"
    )
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if statistics.median(added) < BOUND_MS else 1


if __name__ == "__main__":
    sys.exit(main())
