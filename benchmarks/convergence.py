"""Whether a setting that changes the result changes how well a model trains: the MiniLM example, several seeds, each setting.

Every setting trains the same model on the same reviews in the same order; only the seed differs between runs of one setting, so
that the spread over the seeds is what a difference has to be held against. Printed are the training loss (mean of the last ten steps)
and the validation accuracy, as mean and standard deviation over the seeds, and the paired difference from the first setting.

Run: python benchmarks/convergence.py [--seeds 5] [--steps 60] [--set NAME KEY=VALUE ...] [--json out.json]
(the example's packages must be installed, see examples/data-packages.txt)
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).parent))

import finetune_minilm as example
from _report import Report, write_json

from zero_plugin.integrations.lightning import ZeroOffloadStrategy

LAST = 10
SETTINGS: dict[str, dict[str, Any]] = {
    "exact": {},
    "delayed update": {"delayed_update": True, "delayed_update_warmup": 10},
}


def trained(settings: Mapping[str, Any], *, seed: int, steps: int) -> tuple[float, float]:
    """Loss and accuracy of one run."""
    chosen = example.Settings(steps=steps, validate_every=steps, seed=seed)
    series = example.train(
        ZeroOffloadStrategy(**settings),  # type: ignore[arg-type] - Lightning takes either
        chosen,
        accelerator="cpu",
        devices=1,
    )
    return statistics.fmean(series.loss[-LAST:]), series.accuracy[-1]


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):.4f} ± {deviation:.4f}"


def value_of(text: str) -> Any:
    """A setting's value from the command line."""
    words = {"true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return int(text)
    except ValueError:
        return text


def main() -> None:
    """Train every setting with every seed, and compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument(
        "--set",
        nargs="+",
        action="append",
        default=[],
        metavar=("NAME", "KEY=VALUE"),
        help="another setting to compare with the exact step; given once, the delayed update is left out",
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sides = {"exact": {}} if options.set else SETTINGS
    for name, *pairs in options.set:
        sides[name] = {key: value_of(text) for key, text in (pair.split("=") for pair in pairs)}
    example.quiet()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for seed in range(options.seeds):
        for name, settings in sides.items():
            found[name].append(trained(settings, seed=seed, steps=options.steps))
            print(
                f"seed {seed}, {name}: loss {found[name][-1][0]:.4f}", file=sys.stderr, flush=True
            )
    first = found["exact"]
    rows: list[list[str | float]] = []
    for name, runs in found.items():
        losses, accuracies = ([run[part] for run in runs] for part in (0, 1))
        apart = [
            spread([mine[part] - theirs[part] for mine, theirs in zip(runs, first, strict=True)])
            for part in (0, 1)
        ]
        rows.append([name, spread(losses), apart[0], spread(accuracies), apart[1]])
    report = Report(
        benchmark="MiniLM on review snippets",
        settings={"steps": options.steps, "seeds": options.seeds, "torch": torch.__version__},
        columns=("setting", f"loss, last {LAST}", "- exact", "accuracy", "- exact"),
        rows=rows,
    )
    report.show()
    if options.json:
        write_json(options.json, [report])


if __name__ == "__main__":
    main()
