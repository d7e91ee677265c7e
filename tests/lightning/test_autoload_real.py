"""The registration against the real torch, Lightning and Fabric, and what a process pays that never asks for us.

Four interpreters start once, side by side; every test reads what they found. Needs zero-plugin installed, since torch
finds the entry point through the installed metadata.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from zero_plugin import _autoload
from zero_plugin.config import ZeroConfig
from zero_plugin.errors import ConfigError
from zero_plugin.integrations.registration import STRATEGIES

REPORT = """
import json, sys
import importlib

def registry(module, name):
    return sorted(getattr(sys.modules[module], name)) if module in sys.modules else None

def error_of(call):
    try:
        call()
    except Exception as error:
        return type(error).__name__ + ": " + str(error)
    return None

trainer = importlib.import_module(sys.argv[2])
fabric = importlib.import_module(sys.argv[3])
print(json.dumps({
    "modules": sorted(sys.modules),
    "finders": [getattr(f, "__name__", type(f).__name__) for f in sys.meta_path],
    "trainer": registry(sys.argv[2] + ".strategies", "StrategyRegistry"),
    "fabric": registry(sys.argv[3] + ".strategies", "STRATEGY_REGISTRY"),
    "loader": type(sys.modules[sys.argv[2] + ".strategies"].__spec__.loader).__name__,
    "loads folders": getattr(importlib.import_module(sys.argv[2] + ".core.saving").pl_load, "loads_folders", False),
    "module class": type(sys.modules[sys.argv[2] + ".strategies"]).__name__,
    "unknown in Trainer": error_of(lambda: trainer.Trainer(strategy="zero_ofload", accelerator="cpu")),
    "unknown in Fabric": error_of(lambda: fabric.Fabric(strategy="zero_ofload", accelerator="cpu")),
    "default": type(trainer.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
                                    enable_model_summary=False, enable_progress_bar=False).strategy).__name__,
    "after": sorted(set(sys.modules)),
}))
"""

# name: (first import, Trainer's package, Fabric's package, value of the switch)
PROCESSES = {
    "lightning, torch from inside": ("lightning", "lightning.pytorch", "lightning.fabric", "1"),
    "lightning, switched off": ("lightning", "lightning.pytorch", "lightning.fabric", "0"),
    "torch, then pytorch_lightning": ("torch", "pytorch_lightning", "lightning_fabric", "1"),
    "pytorch_lightning, switched off": ("torch", "pytorch_lightning", "lightning_fabric", "0"),
}
PAIRS = [
    ("lightning, torch from inside", "lightning, switched off"),
    ("torch, then pytorch_lightning", "pytorch_lightning, switched off"),
]


@pytest.fixture(scope="module")
def reports() -> dict[str, dict[str, Any]]:
    running = {
        name: subprocess.Popen(
            [sys.executable, "-c", f"import {first}\n" + REPORT, "x", trainer, fabric],
            env={**os.environ, _autoload.SWITCH: switch},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name, (first, trainer, fabric, switch) in PROCESSES.items()
    }
    found: dict[str, dict[str, Any]] = {}
    for name, process in running.items():
        out, err = process.communicate(timeout=100)
        assert process.returncode == 0, err
        found[name] = json.loads(out.strip().splitlines()[-1])
    return found


@pytest.mark.parametrize(("on", "off"), PAIRS)
def test_all_names_are_registered_and_nothing_else_changes(
    on: str, off: str, reports: dict[str, dict[str, Any]]
) -> None:
    for kind in ("trainer", "fabric"):
        assert set(reports[on][kind]) - set(reports[off][kind]) == set(STRATEGIES)
        assert set(reports[off][kind]) <= set(reports[on][kind])


@pytest.mark.parametrize(("on", "off"), PAIRS)
def test_a_run_that_does_not_ask_for_us_imports_three_small_modules_of_ours(
    on: str, off: str, reports: dict[str, dict[str, Any]]
) -> None:
    """The measure of cost that does not drift: the milliseconds are in benchmarks/import_time.py."""
    added = set(reports[on]["after"]) - set(reports[off]["after"])
    assert added == {
        "zero_plugin",
        "zero_plugin.integrations",
        "zero_plugin.integrations.registration",
    }
    assert set(reports[off]["after"]) <= set(reports[on]["after"])


@pytest.mark.parametrize(("on", "off"), PAIRS)
def test_a_run_that_does_not_ask_for_us_behaves_the_same(
    on: str, off: str, reports: dict[str, dict[str, Any]]
) -> None:
    assert [finder for finder in reports[on]["finders"] if finder != "Finder"] == reports[off][
        "finders"
    ]
    assert reports[on]["finders"].count("Finder") == 1
    for key in ("loader", "module class", "unknown in Trainer", "unknown in Fabric", "default"):
        assert reports[on][key] == reports[off][key]
    assert "invalid strategy name" in reports[on]["unknown in Trainer"]


@pytest.mark.parametrize(("on", "off"), PAIRS)
def test_load_from_checkpoint_takes_folders(
    on: str, off: str, reports: dict[str, dict[str, Any]]
) -> None:
    """Nothing of ours imported; test_folders.py loads one through the same function."""
    assert reports[on]["loads folders"]
    assert not reports[off]["loads folders"]


def test_names_stand_for_exact_configs() -> None:
    configs = {
        name: ZeroConfig(**fields)
        for name, fields in STRATEGIES.items()
        if name not in ("zero_infinity", "zero_auto")
    }
    assert configs == {
        "zero_1": ZeroConfig(stage=1, optimizer="device", gradients="device"),
        "zero_2": ZeroConfig(stage=2, optimizer="device", gradients="device"),
        "zero_offload": ZeroConfig(stage=2, optimizer="host", gradients="host"),
        "zero_3": ZeroConfig(stage=3, params="device", optimizer="device", gradients="device"),
        "zero_3_offload": ZeroConfig(stage=3, params="host", optimizer="host", gradients="host"),
    }
    assert STRATEGIES["zero_infinity"] == {
        "stage": 3,
        "params": "nvme",
        "optimizer": "nvme",
        "gradients": "nvme",
    }


def test_zero_infinity_is_refused_without_a_folder() -> None:
    with pytest.raises(ConfigError, match="nvme"):
        ZeroConfig(**STRATEGIES["zero_infinity"])
