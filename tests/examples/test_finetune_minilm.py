"""The example: its data, and that its runs under DDP and under our strategies agree."""

from __future__ import annotations

import json
import runpy
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.sources import REPOSITORY

SCRIPT = REPOSITORY / "examples" / "finetune_minilm.py"
STEPS = 6
TINY = [
    *("--steps", str(STEPS), "--batch-size", "8", "--max-length", "24"),
    *("--validation-size", "32", "--accelerator", "cpu"),
]
FP32_TOLERANCE = 1e-5
"""The promised distance of the loss curves, over a run in fp32."""


@pytest.fixture(scope="module")
def example() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(SCRIPT), run_name="finetune_minilm"))


def run_example(folder: Path, *options: str) -> dict[str, Any]:
    command = [sys.executable, str(SCRIPT), *TINY, "--output", str(folder), *options]
    done = subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "minilm_loss_accuracy.json").read_text())


def apart(record: dict[str, Any], one: str, other: str) -> float:
    runs = record["runs"]
    pairs = zip(runs[one]["loss"], runs[other]["loss"], strict=True)
    return max(abs(a - b) for a, b in pairs)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("strategy", "devices"), [("zero_offload", 1), ("zero_offload", 2), ("zero_1", 2)]
)
def test_losses_are_those_of_ddp(strategy: str, devices: int, tmp_path: Path) -> None:
    record = run_example(tmp_path, "--strategy", strategy, "--devices", str(devices))
    losses = record["runs"][strategy]["loss"]
    assert len(losses) == STEPS
    assert losses[-1] < losses[0]  # something was learned, so that equal curves mean something
    assert apart(record, "ddp", strategy) <= FP32_TOLERANCE
    assert record["runs"]["ddp"]["accuracy"] == record["runs"][strategy]["accuracy"]
    figure = (tmp_path / "minilm_loss_accuracy.png").read_bytes()
    width, height = struct.unpack(">II", figure[16:24])
    assert figure.startswith(b"\x89PNG")
    assert width > height > 300


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_runs_in_bf16(tmp_path: Path) -> None:
    # DDP has no fp32 master weights in bf16-true: the curves need not agree, but ours has to learn
    record = run_example(
        tmp_path, "--strategy", "zero_offload", "--precision", "bf16-true", "--no-compare"
    )
    assert list(record["runs"]) == ["zero_offload"]
    losses = record["runs"]["zero_offload"]["loss"]
    assert losses[-1] < losses[0]


def test_batches_must_divide() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--batch-size", "7", "--devices", "2"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "--batch-size 7 cannot be divided by --devices 2" in done.stderr


def test_reviews_are_labelled_once(example: SimpleNamespace) -> None:
    reviews = example.read_reviews()
    assert len(reviews) == len({text for text, _, _ in reviews}) == 12752
    assert {label for _, label, _ in reviews} == {0, 1}


def test_no_film_is_in_both_sets(example: SimpleNamespace) -> None:
    settings = example.Settings(steps=300)
    train, validation = example.split_reviews(settings)
    film_of = {text: film for text, _, film in example.read_reviews()}
    films = [{film_of[text] for text, _ in part} for part in (train, validation)]
    assert not films[0] & films[1]
    assert len(train) == 300 * settings.batch_size
    assert len(validation) == settings.validation_size


def test_split_is_the_same_every_time(example: SimpleNamespace) -> None:
    one, two = example.Settings(seed=3), example.Settings(seed=3)
    assert example.split_reviews(one) == example.split_reviews(two)
    assert example.split_reviews(one) != example.split_reviews(example.Settings(seed=4))


def test_a_missing_package_is_named(example: SimpleNamespace) -> None:
    with pytest.raises(SystemExit, match=r"no_such_package_here is not installed: pip install"):
        example.package_folder("no_such_package_here")
