"""Whatever happens during a save, the place holds a whole checkpoint: the one before, or the new one."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import build, state_of, train
from support.ranks import run_ranks
from support.training import PRELOAD, assert_same_bits

from zero_plugin.checkpoint import folder as folders
from zero_plugin.checkpoint.index import Catalog
from zero_plugin.checkpoint.loading import verify
from zero_plugin.errors import CheckpointError, ZeroError

KILLS = 200 if os.environ.get("ZERO_PLUGIN_WHOLE_MATRIX") == "1" else 40
"""docs/checkpoints.md says how the run of 200 went."""


# ------------------------------------------------------------------ killed


def counting(limit: int | None) -> list[int]:
    """Count every call that Python makes from now on, and die at one of them."""
    seen = [0]

    def profile(_frame: Any, event: str, _argument: Any) -> None:
        if event in ("call", "c_call"):
            seen[0] += 1
            if seen[0] == limit:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(profile)
    return seen


def save_in_child(engine: Any, place: Path, limit: int, step: int) -> int:
    """Save in a forked child that dies at its `limit`-th call; returns how the child ended."""
    child = os.fork()
    if child == 0:
        try:
            counting(limit)
            engine.save_checkpoint(place, extra={"step": step})
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1]


def killed_saves(rank: int, size: int, folder: Path, kills: int) -> dict[str, int]:
    model, _, engine = build(folder, backend="inline", stage=2)
    place = folder / "ck"
    engine.save_checkpoint(place, extra={"step": 0})
    states = {0: state_of(engine)}
    # What a killed save left is removed by the next one, which takes calls too.
    counts: dict[bool, int] = {}
    for left in (True, False):
        if left:
            assert save_in_child(engine, place, 1500, 0) == signal.SIGKILL
        seen = counting(None)
        engine.save_checkpoint(place, extra={"step": 0})
        sys.setprofile(None)
        counts[left] = seen[0]
    chooser = random.Random(3)
    exchange = folders._exchange
    outcome = {"killed": 0, "old": 0, "new": 0, "moved aside": 0, "torn": 0}
    current = 0
    for number in range(1, 2 * kills):
        if outcome["killed"] == kills:
            break
        # On every second save as on a file system that cannot exchange two folders.
        folders._exchange = exchange if number % 2 else lambda *_: False
        train(model, engine, range(number, number + 1))
        states[number] = state_of(engine)
        # The last calls move the folder: half of all kills are there.
        calls = counts[any(folder.glob(".ck.partial-*"))]
        limit = chooser.randint(1 if number % 4 < 2 else calls - 400, calls)
        status = save_in_child(engine, place, limit, number)
        outcome["killed"] += status == signal.SIGKILL
        partials = list(folder.glob(".ck.partial-*"))
        assert len(partials) <= 1
        for partial in partials:
            outcome["torn"] += 1
            with pytest.raises(CheckpointError, match="left by a save that did not end"):
                engine.load_checkpoint(partial)
        outcome["moved aside"] += not place.exists()
        found = engine.load_checkpoint(place)["step"]
        assert found in (current, number)
        outcome["new" if found == number else "old"] += 1
        current = found
        assert_same_bits(state_of(engine), states[found], f"kill {number}: ")
        states = {current: states[current]}
    engine.save_checkpoint(place, extra={"step": -1})
    assert [path.name for path in folder.iterdir()] == ["ck"]
    engine.close()
    return outcome


def test_kills_leave_a_whole_checkpoint(tmp_path: Path) -> None:
    (outcome,) = run_ranks(
        1, killed_saves, tmp_path, KILLS, preload=PRELOAD, store="none", deadline=110
    )
    assert outcome["killed"] == KILLS, outcome
    assert outcome["old"] >= KILLS / 4, outcome
    assert min(outcome["new"], outcome["torn"]) > KILLS / 20, outcome


def one_rank_dies(rank: int, size: int, folder: Path) -> str:
    model, _, engine = build(folder, stage=3, timeout_seconds=10.0)
    train(model, engine, range(1))
    engine.save_checkpoint(folder / "ck", extra="first")
    if rank == 1:
        counting(900)
    try:
        engine.save_checkpoint(folder / "ck", extra="second")
    except ZeroError as error:
        message = f"{type(error).__name__}: {error}"
    else:
        message = "saved"
    with contextlib.suppress(ZeroError):
        engine.close()
    return message


@pytest.mark.dist
def test_a_rank_that_dies_in_a_save_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    message, _ = run_ranks(
        2, one_rank_dies, tmp_path, preload=PRELOAD, kill={1: 60.0}, deadline=60, errors="return"
    )
    assert "rank 1" in str(message)
    catalog = Catalog.open(tmp_path / "ck")
    verify(catalog)
    assert catalog.index["extra"] == "first"


# ------------------------------------------------------------------ refused by the system


def no_room(rank: int, size: int, folder: Path) -> str:
    model, _, engine = build(folder, stage=2)
    train(model, engine, range(1))
    engine.save_checkpoint(folder / "ck", extra="first")
    before = state_of(engine)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == size - 1:
        # The system refuses to write more of a file than this, as it does where a disk is full.
        resource.setrlimit(resource.RLIMIT_FSIZE, (600, limits[1]))
    try:
        with pytest.raises(CheckpointError) as caught:
            engine.save_checkpoint(folder / "ck", extra="second")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert_same_bits(state_of(engine), before)
    assert [path.name for path in folder.iterdir()] == ["ck"]
    assert engine.load_checkpoint(folder / "ck") == "first"
    train(model, engine, range(1, 2))
    engine.save_checkpoint(folder / "ck", extra="third")
    assert engine.load_checkpoint(folder / "ck") == "third"
    engine.close()
    return str(caught.value)


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.dist)])
def test_a_full_disk_is_an_error_of_all_and_the_run_goes_on(size: int, tmp_path: Path) -> None:
    for message in run_ranks(size, no_room, tmp_path, preload=PRELOAD):
        assert "File too large" in message
        assert size == 1 or "failed on rank 1" in message


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("file/ck", "File exists|Not a directory"),
        ("file", r"file is a file, wanted a new place or an earlier checkpoint"),
        ("other", r"other is a folder of other files"),
    ],
)
def test_a_place_that_cannot_be_written(place: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine").write_text("mine")
    model, _, engine = build(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        engine.save_checkpoint(tmp_path / place)
    assert (tmp_path / "file").read_text() == (tmp_path / "other" / "mine").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "other"]
    train(model, engine, range(1))
    engine.close()


# ------------------------------------------------------------------ again, and the last few


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_second_save_to_one_place_replaces_the_first(
    exchanges: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchanges:
        monkeypatch.setattr(folders, "_exchange", lambda *_: False)
    _, _, engine = build(tmp_path)
    for number in range(3):
        engine.save_checkpoint(tmp_path / "ck", extra=number)
        assert engine.load_checkpoint(tmp_path / "ck") == number
        assert [path.name for path in tmp_path.iterdir()] == ["ck"]
    engine.close()


def test_keep_last_removes_the_oldest_of_its_kind_only(tmp_path: Path) -> None:
    _, _, engine = build(tmp_path)
    engine.save_checkpoint(tmp_path / "best")
    engine.save_checkpoint(tmp_path / "epoch-1")
    (tmp_path / "step-7").mkdir()  # Not a checkpoint.
    for number in (90, 100, 110, 120):
        engine.save_checkpoint(tmp_path / f"step-{number}", keep_last=2)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["best", "epoch-1", "step-110", "step-120", "step-7"]
    # The oldest by the time of its save, not by its name.
    engine.save_checkpoint(tmp_path / "step-110", keep_last=2)
    engine.save_checkpoint(tmp_path / "step-5", keep_last=2)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["best", "epoch-1", "step-110", "step-5", "step-7"]
    with pytest.raises(CheckpointError, match="keep_last=0"):
        engine.save_checkpoint(tmp_path / "step-6", keep_last=0)
    with pytest.raises(CheckpointError, match=r"keep_last=2 .*'last'.* has none"):
        engine.save_checkpoint(tmp_path / "last", keep_last=2)
    engine.close()


def test_what_another_live_save_writes_is_left_alone(tmp_path: Path) -> None:
    other = folders.PartialFolder(tmp_path / "ck")
    dead = tmp_path / ".ck.partial-000000000001"
    dead.mkdir()
    _, _, engine = build(tmp_path)
    engine.save_checkpoint(tmp_path / "ck")
    assert other.path.exists()
    assert not dead.exists()
    other.discard()
    engine.close()


def test_a_link_to_a_disk_is_followed(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    _, _, engine = build(tmp_path)
    engine.save_checkpoint(tmp_path / "link" / "ck")
    assert (tmp_path / "disk" / "ck" / "index.json").exists()
    shutil.rmtree(tmp_path / "disk")
    assert torch.get_num_threads() == 1
    engine.close()
