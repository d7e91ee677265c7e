"""Where measurements are kept and looked for, and what happens where they cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zero_plugin import cli, plan
from zero_plugin.errors import ConfigError
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
MODEL = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4}


@pytest.fixture
def measures_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A home without a cache, on a machine where measuring is a mistake."""
    from zero_plugin.integrations import overheads
    from zero_plugin.machine import bench

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(bench, "measure", None)
    monkeypatch.setattr(overheads, "measure_overheads", None)
    return tmp_path


def test_the_users_cache_folder(
    measures_nothing: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    monkeypatch.setenv("XDG_CACHE_HOME", str(elsewhere))
    assert cache.cache_folder() == elsewhere / "zero_plugin"
    assert cache.save_measurement(KEPT).parent == elsewhere / "zero_plugin"
    assert plan(MODEL, seq=64).hardware.update == 8e9
    for ignored in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert cache.cache_folder().is_relative_to(measures_nothing)
        assert cache.cache_folder() != elsewhere / "zero_plugin"
    assert "not measured" in plan(MODEL, seq=64).hardware.name


def test_a_folder_that_is_named(
    measures_nothing: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from zero_plugin.config import ZeroConfig

    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    folder = tmp_path / "kept"
    cache.save_measurement({**KEPT, "update": 7e9}, folder)
    assert cli.main(["bench", "--cache", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["update"] == 7e9
    assert plan(MODEL, seq=64, cache=folder).hardware.update == 7e9
    arguments = ["plan", str(tmp_path), "--seq", "64", "--cache", str(folder)]
    assert cli.main(arguments) == 0
    assert "not measured" not in capsys.readouterr().out
    from support.models import make_gpt

    assert ZeroConfig.auto(make_gpt(), seq=12, cache=folder, stage=2).stage == 2


def test_what_is_no_cache_is_an_error(
    measures_nothing: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    file = str(tmp_path / "config.json")
    for arguments, message in (
        (["bench", "--cache", file], "is not a folder"),
        (["plan", str(tmp_path), "--cache", str(tmp_path)], "has no measurement of this machine"),
    ):
        assert cli.main(arguments) == 2
        shown = capsys.readouterr()
        assert message in shown.err
        assert shown.out == ""
    with pytest.raises(ConfigError, match="nvme path '' is not a folder"):
        plan(MODEL, seq=64, nvme="")
    with pytest.raises(ConfigError, match=r"cannot be kept in .*config\.json/below.*--cache"):
        cache.save_measurement(KEPT, Path(file) / "below")


@pytest.mark.parametrize(
    ("arguments", "environment", "status", "message"),
    [
        (["bench", "--seconds", "nan"], {}, 2, "above 0 and at most 10"),
        (["bench"], {"WORLD_SIZE": "two"}, 2, "WORLD_SIZE='two', which is no number"),
        (["bench", "--nvme", __file__], {}, 2, "is not a folder"),
        (["bench", "--nvme", ""], {}, 2, "--nvme '' is not a folder"),
        (["doctor", "--nvme", __file__], {}, 1, "problem: "),
        (["doctor", "--nvme", ""], {}, 1, "problem: "),
    ],
)
def test_bad_input_of_bench_and_doctor(
    arguments: list[str],
    environment: dict[str, str],
    status: int,
    message: str,
    measures_nothing: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[Any],
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cli.main(arguments) == status
    shown = capsys.readouterr()
    assert message in shown.out + shown.err
    assert "Traceback" not in shown.out + shown.err


@pytest.mark.parametrize("command", ["bench", "doctor"])
def test_unknown_options_end_with_status_2(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--nvmee", "x"])
    assert ended.value.code == 2
    assert "unrecognized arguments: --nvmee" in capsys.readouterr().err
