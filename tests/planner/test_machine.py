"""Doctor, bench and the commands: what they say, and how they end."""

from __future__ import annotations

import atexit
import gc
import json
import os
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from zero_plugin import cli
from zero_plugin.errors import ConfigError
from zero_plugin.machine import cache, doctor, system
from zero_plugin.machine.hardware import Hardware, shipped

LLAMA_70B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
    "vocab_size": 128256,
}
PLAN_KEYS = {
    "fits",
    "config",
    "peak_bytes",
    "step_seconds",
    "bound_by",
    "lower_bound_seconds",
    "alternatives",
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4})
    )
    return str(tmp_path)


def test_plan_as_json(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    from zero_plugin.config import ZeroConfig

    assert cli.main(["plan", model, "--json", "--hardware", "dgx-a100", "--seq", "64"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.keys() >= PLAN_KEYS
    assert found["fits"] is True
    assert found["peak_bytes"].keys() == {"device", "host", "nvme"}
    assert found["lower_bound_seconds"] <= found["step_seconds"]
    assert found["alternatives"]
    ZeroConfig.from_dict(found["config"])


def test_plan_as_a_table_with_bars(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", model, "--hardware", "rtx-4090", "--optimizer", "host"]) == 0
    shown = capsys.readouterr().out
    assert "best" in shown
    assert "bound by" in shown
    assert "device |#" in shown
    assert "host   |#" in shown


def test_a_plan_leaves_the_collector_as_it_was(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planner = import_module("zero_plugin.planner.plan")
    original: Any = planner.plan
    during: list[bool] = []
    at_exit: list[Any] = []
    frozen = gc.get_freeze_count()

    def noted(*arguments: Any, **named: Any) -> Any:
        during.append(gc.isenabled())
        return original(*arguments, **named)

    monkeypatch.setattr(planner, "plan", noted)
    monkeypatch.setattr(atexit, "register", at_exit.append)
    arguments = ["plan", model, "--hardware", "dgx-a100", "--seq", "64", "--stage", "2"]
    try:
        for change, is_on in ((gc.disable, False), (gc.enable, True)):
            change()
            assert cli.main(arguments) == 0
            assert gc.isenabled() is is_on
    finally:
        gc.enable()
    assert during == [False, False]
    assert at_exit == [gc.freeze, gc.freeze]
    assert gc.get_freeze_count() <= frozen


def test_plan_draws(model: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the picture is drawn with it")
    file = tmp_path / "plan.png"
    assert cli.main(["plan", model, "--hardware", "rtx-4090", "--draw", str(file)]) == 0
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--gpu=-1GiB"], 2, "not a byte count"),
        (["--world", "0"], 2, "world=0"),
        (["--batch", "-2"], 2, "batch=-2"),
        (["--hardware", "abacus"], 2, "neither a file nor one of"),
        (["--stage", "2", "--params", "host"], 2, "needs stage=3"),
        (["--nvme", "/no/such/folder"], 2, "is not a folder"),
        (["--optim", "adamx"], 2, "rule='adamx'"),
    ],
)
def test_bad_input_of_plan(
    arguments: list[str], status: int, message: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", model, *arguments]) == status
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.out == ""


def test_nothing_fits_is_status_1(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = ["--hardware", "rtx-4090", "--gpu", "632MB", "--host", "1kB", "--nvme-size", "1kB"]
    assert cli.main(["plan", model, *tiny]) == 1
    shown = capsys.readouterr().out
    assert "Nothing fits" in shown
    assert "lacking" in shown


def test_an_unknown_command_ends_with_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["plann"])
    assert ended.value.code == 2
    assert "plan" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.serial
def test_70_billion_parameters_are_planned_in_a_gibibyte(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    command = [sys.executable, "-m", "zero_plugin.cli", "plan", str(tmp_path), "--json"]
    command += ["--batch", "4", "--seq", "2048", "--hardware", "dgx-a100"]
    output = tmp_path / "plan.json"
    with output.open("w") as file:
        process = subprocess.Popen(command, stdout=file)
        # Of this child alone: the largest of all children says nothing about it.
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    assert json.loads(output.read_text())["fits"]
    assert usage.ru_maxrss * 1024 < 2**30


# Hardware --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", shipped())
def test_machines_that_come_with_the_package(name: str) -> None:
    hardware = Hardware.load(name)
    assert hardware.device_bytes >= 20e9
    assert hardware.host_bytes > hardware.device_bytes


def test_a_hardware_file_goes_round(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(Hardware.load("dgx-2").to_json())
    assert Hardware.load(file) == Hardware.load("dgx-2")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"flopz": 1}, "did you mean 'flops'"),
        ({"flops": 0}, "flops=0"),
        ({"up": -1}, "up=-1"),
        ({"up": "fast"}, "is not a number"),
        ({"devices": 0}, "devices=0"),
        ({"host_bytes": "64 boxes"}, "not a byte count"),
    ],
)
def test_bad_hardware_is_refused(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=message):
        Hardware.load(file)


# Doctor ----------------------------------------------------------------------------------------------------------


def test_doctor_of_this_machine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["doctor", "--nvme", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is True
    subjects = {item["subject"]: item["value"] for item in found["findings"]}
    assert {"python", "torch", "kernels", "host memory", "pinning", "huge pages", "file I/O"} <= (
        subjects.keys()
    )
    assert "threads" in subjects["kernels"]
    assert "free" in subjects["nvme"]
    assert list(tmp_path.iterdir()) == []


def test_doctor_of_a_folder_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--nvme", "/no/such/folder"]) == 1
    assert "problem: nvme_path='/no/such/folder' does not exist" in capsys.readouterr().out


def test_versions_out_of_range() -> None:
    present = {"torch": "2.10.1", "numpy": "2.4.0", "lightning": "9.0.0"}
    found = {item.subject: item for item in doctor.versions(present.get)}
    assert "install torch>=2.11" in found["torch"].problem
    assert not found["numpy"].problem
    assert "newer than 2.6.6" in found["lightning"].note
    assert found["accelerate"].value == "not installed"


def test_what_a_disk_costs(tmp_path: Path) -> None:
    costs = system._costs(tmp_path, "tmpfs", direct=False, free=2**40)
    assert "this is memory" in costs[0]
    costs = system._costs(tmp_path, "nfs4", direct=True, free=10)
    assert "not a local disk" in costs[0]
    assert "less than 1 GiB" in costs[-1]


# Bench -----------------------------------------------------------------------------------------------------------


def test_a_measurement_expires_and_belongs_to_its_machine(tmp_path: Path) -> None:
    assert cache.load_measurement(tmp_path) is None
    cache.save_measurement({"flops": 2.0, "disks": {"a": {"read": 1}}}, tmp_path)
    cache.save_measurement({"up": 3.0, "disks": {"b": {"read": 2}}}, tmp_path)
    assert cache.load_measurement(tmp_path) == {
        "flops": 2.0,
        "up": 3.0,
        "disks": {"a": {"read": 1}, "b": {"read": 2}},
    }
    file = tmp_path / "bench.json"
    record = json.loads(file.read_text())
    old = datetime.now(timezone.utc) - cache.EXPIRY - timedelta(minutes=1)
    for changed in ({"at": old.isoformat()}, {"machine": {"host": "another"}}, {"values": 3}):
        file.write_text(json.dumps({**record, **changed}))
        assert cache.load_measurement(tmp_path) is None
    file.write_text("{")
    assert cache.load_measurement(tmp_path) is None


def test_bench_measures_and_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from zero_plugin.integrations import overheads
    from zero_plugin.machine import bench

    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in {"_LAYERS": 4, "_FEW": 2, "_STEPS": 1, "_ROUNDS": 1}.items():
        monkeypatch.setattr(overheads, name, value)
    monkeypatch.setattr(bench, "_STATE_BYTES", 1 << 20)
    monkeypatch.setattr(bench, "_FILE_BYTES", 1 << 20)
    monkeypatch.setattr(bench, "_LINK_BYTES", 1 << 20)
    disk = tmp_path / "disk"
    disk.mkdir()
    arguments = ["bench", "--seconds", "0.01", "--nvme", str(disk)]
    assert cli.main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rates = (
        "update",
        "host_bandwidth",
        "flops",
        "up",
        "down",
        "device_bandwidth",
        "norm",
        "gather",
    )
    fixed = ("step_seconds", "launch_seconds", "unit_seconds", "tile_seconds")
    assert all(found[name] > 0 for name in (*rates, *fixed))
    rates = found["disks"][str(disk.resolve())]
    assert {"read", "write", "mixed_read", "block_bytes", "queue_depth"} <= rates.keys()
    assert list(disk.iterdir()) == []
    # Kept: a second call measures nothing, and plan uses it.
    monkeypatch.setattr(bench, "measure", None)
    monkeypatch.setattr(overheads, "measure_overheads", None)
    assert cli.main(arguments) == 0
    assert "compiled AdamW" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--seconds", "0"], "above 0"), (["--nvme", "/no/such/folder"], "is not a folder")],
)
def test_bad_input_of_bench(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err
