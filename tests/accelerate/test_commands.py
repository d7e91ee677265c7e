"""`accelerate test`, `env`, `estimate-memory` and `config update` with a config file of ours."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import zero_plugin
from zero_plugin import ZeroConfig, _autoload
from zero_plugin.integrations._huggingface.config_hooks import BLOCK
from zero_plugin.integrations._huggingface.packaged import replace
from zero_plugin.integrations._huggingface.selection import SETTINGS, SWITCH

zero_plugin.register()


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No selection, no default config file of the user's, and our programs first."""
    from accelerate.commands.config import config_args

    for name in (SWITCH, SETTINGS):
        monkeypatch.delenv(name, raising=False)
    for name in ("default_config_file", "default_json_config_file", "default_yaml_config_file"):
        monkeypatch.setattr(config_args, name, str(tmp_path / "default_config.yaml"))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv(_autoload.SWITCH, "1")


def write(place: Path, block: dict[str, Any], **values: Any) -> Path:
    common = {"compute_environment": "LOCAL_MACHINE", "use_cpu": True, "mixed_precision": "no"}
    kind = {"distributed_type": "NO", "num_processes": 1}
    place.write_text(yaml.safe_dump({**common, **kind, **values, BLOCK: block}))
    return place


@pytest.mark.dist
@pytest.mark.slow
def test_accelerate_test_runs_on_us_at_stage_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The real command: it launches two processes, each of which trains on engines."""
    from accelerate.commands.accelerate_cli import main

    block = {"stage": 3, "params": "host", "threads": 1, "trace": str(tmp_path / "trace.json")}
    place = write(
        tmp_path / "ours.yaml",
        block,
        distributed_type="MULTI_GPU",
        num_processes=2,
        main_process_port=0,
    )
    for name, value in (("ACCELERATE_USE_CPU", "true"), ("OMP_NUM_THREADS", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["accelerate", "test", "--config_file", str(place)])
    monkeypatch.chdir(tmp_path)
    main()
    said = capfd.readouterr().out
    assert "Test is a success" in said
    assert "Training yielded the same results on one CPU or distributed setup" in said
    for rank in range(2):
        trace = json.loads((tmp_path / f"trace.rank{rank}.json").read_text())
        assert any("gather" in event["name"] for event in trace["traceEvents"])


def test_the_test_script_is_replaced_where_parameters_are_sharded() -> None:
    from accelerate.test_utils import path_in_accelerate_package

    script = str(path_in_accelerate_package("test_utils", "scripts", "test_script.py"))

    def launched(block: dict[str, Any], given: str = script) -> tuple[str, bool]:
        arguments = argparse.Namespace(training_script=given, module=False)
        replace(arguments, block)
        return arguments.training_script, arguments.module

    ours = ("zero_plugin.integrations._huggingface.packaged", True)
    assert launched({"stage": 3}) == ours
    assert launched({"auto": True}) == ours
    assert launched({"stage": 2}) == (script, False)
    assert launched({"stage": 3}, "scripts/test_script.py") == ("scripts/test_script.py", False)


def test_env_shows_the_block(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from accelerate.commands.env import env_command

    place = write(tmp_path / "ours.yaml", {"stage": 3, "params": "host"})
    info: Any = env_command(argparse.Namespace(config_file=str(place)))
    assert info["`Accelerate` configs"][BLOCK] == {"stage": 3, "params": "host"}
    assert f"- {BLOCK}: {{'stage': 3, 'params': 'host'}}" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["yaml", "json"])
def test_config_update_keeps_the_block(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from accelerate.commands.config.update import update_config_command

    block = {"stage": 3, "optimizer": "nvme", "nvme_path": ["/a", "/b"], "checkpoint": "file"}
    place = write(tmp_path / "ours.yaml", block)
    if kind == "json":
        values = yaml.safe_load(place.read_text())
        place = tmp_path / "ours.json"
        place.write_text(json.dumps(values))
    update_config_command(argparse.Namespace(config_file=str(place)))
    assert "Successfully updated" in capsys.readouterr().out
    assert yaml.safe_load(place.read_text())[BLOCK] == block


def estimated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> str:
    """What the command prints for a Llama of known size, which the Hub would have to be asked for."""
    from accelerate import init_empty_weights
    from accelerate.commands import estimate
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8000, hidden_size=512, intermediate_size=1024, num_hidden_layers=4
    )

    def created(*_: Any, **__: Any) -> Any:
        with init_empty_weights():
            return LlamaForCausalLM(config)

    monkeypatch.setattr(estimate, "create_empty_model", created)
    parsed = estimate.estimate_command_parser().parse_args(["llama", *arguments])
    estimate.estimate_command(parsed)
    assert estimate.create_empty_model is created
    return capsys.readouterr().out


def test_estimate_adds_our_bytes_where_we_are_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stock = estimated(monkeypatch, capsys)
    assert "zero" not in stock
    elements = 2 * 8000 * 512 + 4 * (512 * (4 * 512 + 3 * 1024) + 2 * 512) + 512

    def row(said: str, name: str) -> list[float]:
        units = {"bytes": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30}
        cells = next(
            line for line in said.splitlines()[::-1] if f"{name} " in line or f"{name}│" in line
        )
        numbers = [cell.split() for cell in cells.strip("│").split("│")[1:]]
        return [float(number) * units[unit] for number, unit in numbers]

    # by the environment: stage 2 with states in host memory, on one process
    monkeypatch.setenv(SWITCH, "true")
    said = estimated(monkeypatch, capsys)
    assert said.startswith(stock.rstrip("\n"))
    for name, width in (("float32", 4), ("float16", 2)):
        device, host, nvme = row(said.removeprefix(stock), name)
        assert device >= width * elements
        assert host >= 12 * elements  # fp32 master and two moments
        assert nvme == 0
    assert "each of 1 processes" in said

    # by the default config file: four processes, everything sharded
    monkeypatch.delenv(SWITCH)
    default = tmp_path / "default_config.yaml"
    block = {"stage": 3, "params": "host", "bucket_bytes": "1MiB"}
    write(default, block, distributed_type="MULTI_GPU", num_processes=4)
    said = estimated(monkeypatch, capsys, "--dtypes", "float16")
    device, host, _ = row(said, "float16")
    assert "each of 4 processes" in said
    assert device > 0
    assert 14 * elements / 4 <= host < 20 * elements / 4

    write(default, {"auto": True})
    assert "zero-plugin plan llama" in estimated(monkeypatch, capsys)
    default.write_text("use_cpu: true\n: broken")
    assert estimated(monkeypatch, capsys) == stock
    assert ZeroConfig()
