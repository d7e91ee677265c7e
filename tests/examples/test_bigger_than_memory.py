"""The example: a model trains in less memory than its states take, where plain PyTorch cannot."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.sources import REPOSITORY

SCRIPT = REPOSITORY / "examples" / "bigger_than_memory.py"
LIMIT = 500 << 20
"""Of which Python and torch take about 300 MB."""
MODEL = [
    *("--parameters", "6e7", "--vocabulary", "2048", "--host-memory", str(LIMIT)),
    *("--tokens", "32", "--threads", "1"),
]


@pytest.fixture(scope="module")
def example() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(SCRIPT), run_name="bigger_than_memory"))


def run_example(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *MODEL, *options],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.timeout(300)
def test_it_trains_under_a_hard_limit_below_its_states(tmp_path: Path) -> None:
    disk, numbers = tmp_path / "disk", tmp_path / "numbers.json"
    disk.mkdir()
    done = run_example("--nvme", str(disk), "--steps", "2", "--rlimit", "--output", str(numbers))
    assert done.returncode == 0, done.stdout + done.stderr
    record: dict[str, Any] = json.loads(numbers.read_text())
    parameters = record["parameters"]
    assert record["state_bytes"] == parameters * 14 > 1.7 * LIMIT
    assert record["loss"][1] < record["loss"][0]
    held = {tier: sum(kinds.values()) for tier, kinds in record["memory"].items()}
    assert held["nvme"] >= parameters * 14
    assert record["memory"]["nvme"]["master"] < 2.05 * parameters
    assert held["device"] + held["host"] < LIMIT
    # Every step reads and writes each state, weights and gradients included; weights also for forward and backward, where a
    # part of them (the embedding's) is not needed.
    assert record["moved"]["nvme_read"] >= 2 * (14 + 3) * parameters
    assert record["moved"]["nvme_write"] >= 2 * 14 * parameters
    assert record["busy"]["update"] > 0
    for line in ("what lies where", "bytes moved", "seconds", "peak resident"):
        assert line in done.stdout
    assert not list(disk.iterdir())


@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.timeout(300)
def test_plain_torch_cannot_under_that_limit() -> None:
    refused = run_example("--plain", "--steps", "1", "--rlimit")
    assert refused.returncode != 0
    assert "can't allocate memory" in refused.stderr or "MemoryError" in refused.stderr
    # It is the limit that stops it: with enough memory the same command trains.
    enough = run_example("--plain", "--steps", "1", "--rlimit", "--host-memory", "3GiB")
    assert enough.returncode == 0, enough.stderr
    assert "step 1 of 1: loss" in enough.stdout


@pytest.mark.parametrize("parameters", [5e5, 6e7, 1e9, 4e9])
def test_the_shape_has_the_parameters_asked_for(
    example: SimpleNamespace, parameters: float
) -> None:
    shape = example.choose_shape(parameters, 2048)
    assert parameters <= shape.parameters <= 1.3 * parameters
    with torch.device("meta"):
        model = example.Llama(shape, 1 << 20)
    assert sum(p.numel() for p in model.parameters()) == shape.parameters
    assert shape.width % shape.heads == 0


def test_a_disk_without_room_is_refused_before_anything_is_built(
    example: SimpleNamespace, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match=r"GB free and .* parameters need .* GB .*moments"):
        example.main(["--nvme", str(tmp_path), "--parameters", "1e13"])
    assert not list(tmp_path.iterdir())


def test_a_missing_folder_is_refused(example: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="there is no such folder"):
        example.main(["--nvme", str(tmp_path / "absent"), "--parameters", "1e6"])


def test_a_budget_below_the_libraries_is_refused(example: SimpleNamespace) -> None:
    with pytest.raises(SystemExit, match="is too little"):
        example.divide(300 << 20, 250 << 20)


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--nvme", ".", "--parameters", "12"],
        ["--nvme", ".", "--host-memory", "much"],
        ["--nvme", ".", "--steps", "0"],
        ["--nvme", ".", "--vocabulary", "60"],
    ],
)
def test_wrong_options_are_refused(
    example: SimpleNamespace, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        example.main(options)
    assert stopped.value.code == 2
    assert "error: " in capsys.readouterr().err
