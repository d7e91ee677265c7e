"""`accelerate launch` with our block in its YAML and `auto: true`: from the command line to a step of a planned engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from zero_plugin import _autoload
from zero_plugin.integrations._huggingface.config_hooks import BLOCK
from zero_plugin.machine import cache

KEPT = {
    "update": 8e9,
    "flops": 5e10,
    "up": 4e9,
    "down": 4e9,
    "device_bandwidth": 9e9,
    "collective": 5e8,
    "step_seconds": 0.001,
}

YAML = f"""
compute_environment: LOCAL_MACHINE
distributed_type: 'NO'
use_cpu: true
num_processes: 1
num_machines: 1
machine_rank: 0
mixed_precision: 'no'
{BLOCK}:
  auto: true
  batch: 3
  seq: 12
  nonfinite: raise
"""

SCRIPT = """
import json, logging
import torch
from accelerate import Accelerator

logging.basicConfig(level=logging.INFO)
accelerator = Accelerator()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(12, 40), torch.nn.Tanh(), torch.nn.Linear(40, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.005)
model, optimizer = accelerator.prepare(model, optimizer)
losses = []
for _ in range(8):
    loss = model(torch.linspace(-1, 1, 36).view(3, 12)).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
(engine,) = accelerator.zero_engines
tiers = {tier: sum(kinds.values()) for tier, kinds in engine.memory().items()}
print(json.dumps({"losses": losses, "nonfinite": engine.config.nonfinite, "tiers": tiers}))
"""


def test_a_launch_with_our_yaml_plans_for_itself(tmp_path: Path) -> None:
    place, script = tmp_path / "accelerate.yaml", tmp_path / "train.py"
    place.write_text(YAML)
    script.write_text(SCRIPT)
    # As after `zero-plugin bench`: nothing is measured in a test.
    cache.save_measurement(KEPT, tmp_path / "zero_plugin")
    # What the program `accelerate` runs.
    # Run so, the module that is entered is not imported under its own name.
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    done = subprocess.run(
        [*command, "--config_file", str(place), str(script)],
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path), _autoload.SWITCH: "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["nonfinite"] == "raise"
    assert found["losses"][-1] < found["losses"][0]
    # Weights, gradients, master and moments of 561 parameters, wherever they were planned.
    assert sum(found["tiers"].values()) >= 16 * 561
    assert "plan for Sequential, 561 parameters, on 1 rank" in done.stderr
    assert "not measured" not in done.stderr
