"""A save beside the training holds the state of the moment of the call; its errors are raised, on every rank, soon after."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import Case, build, state_of, train
from support.ranks import run_ranks
from support.training import PRELOAD, assert_same_bits

from zero_plugin.checkpoint import saving, shardfile
from zero_plugin.errors import CheckpointError

CASES = [
    Case(1, 1, "device"),
    Case(1, 2, "host"),
    Case(1, 2, "nvme"),
    Case(1, 3, "device"),
    Case(1, 3, "host"),
    Case(1, 3, "nvme"),
]


class Gate:
    """Holds back every piece that a save copies after the first ones, until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: int) -> None:
        self.opened = threading.Event()
        self.held = threading.Event()
        pieces = shardfile.pieces_of
        passed = [0]

        def held_back(parts: Any) -> Any:
            for piece in pieces(parts):
                passed[0] += 1
                if passed[0] > free:
                    self.held.set()
                    self.opened.wait(20)
                yield piece

        monkeypatch.setattr(saving, "pieces_of", held_back)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_holds_the_state_of_the_call(case: Case, tmp_path: Path) -> None:
    model, optimizer, engine = build(tmp_path, case)
    train(model, engine, range(2))
    wanted = state_of(engine)
    engine.save_checkpoint(tmp_path / "ck", extra="then", asynchronous=True)
    # What user code may do at any time.
    with torch.no_grad(), engine.full_params(writeback=True):
        model.first.weight.add_(1.0)
        model.frozen.add_(1.0)
    optimizer.param_groups[0]["lr"] = 0.5
    torch.rand(3)
    train(model, engine, range(2, 5))
    engine.drain()
    engine.close()
    model, optimizer, engine = build(tmp_path, Case(1, 2, "host"))
    assert engine.load_checkpoint(tmp_path / "ck") == "then"
    assert optimizer.param_groups[0]["lr"] == 3e-3
    assert_same_bits(state_of(engine), wanted)
    engine.close()


def test_a_step_waits_for_what_is_not_copied_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _, engine = build(tmp_path, stage=2)
    train(model, engine, range(2))
    wanted = state_of(engine)
    gate = Gate(monkeypatch, free=12)
    engine.save_checkpoint(tmp_path / "ck", asynchronous=True)
    assert gate.held.wait(10)
    # Forward and backward go on meanwhile.
    engine.backward(model(torch.ones(4, 7)).square().mean())
    stepped = threading.Event()

    def step() -> None:
        engine.step()
        stepped.set()

    thread = threading.Thread(target=step)
    thread.start()
    assert not stepped.wait(0.3)
    gate.opened.set()
    thread.join()
    engine.zero_grad()
    train(model, engine, range(2, 4))
    engine.close()
    _, _, engine = build(tmp_path, stage=2)
    engine.load_checkpoint(tmp_path / "ck")
    assert_same_bits(state_of(engine), wanted)
    engine.close()


def test_a_disk_that_is_slow_does_not_stop_the_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is copied and not written yet does not hold a step up; the checkpoint appears later."""
    opened = threading.Event()
    sync = os.fsync

    def slow(descriptor: int) -> None:
        if threading.current_thread().name == "checkpoint":
            opened.wait(20)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    model, _, engine = build(tmp_path, stage=2)
    train(model, engine, range(2))
    engine.save_checkpoint(tmp_path / "ck", asynchronous=True)
    train(model, engine, range(2, 5))
    assert not (tmp_path / "ck").exists()
    opened.set()
    engine.drain()
    assert (tmp_path / "ck" / "index.json").exists()
    engine.close()


def test_close_ends_it_and_an_exception_drops_it(tmp_path: Path) -> None:
    model, _, engine = build(tmp_path)
    train(model, engine, range(1))
    engine.save_checkpoint(tmp_path / "ck", asynchronous=True)
    engine.close()
    assert [path.name for path in tmp_path.iterdir()] == ["ck"]
    model, _, engine = build(tmp_path)

    def fail() -> None:
        try:
            train(model, engine, range(1))
            engine.save_checkpoint(tmp_path / "other", asynchronous=True)
            raise ValueError("a bug")
        finally:
            engine.close()

    with pytest.raises(ValueError, match="a bug"):
        fail()
    assert [path.name for path in tmp_path.iterdir()] == ["ck"]


def test_the_next_save_waits_for_it(tmp_path: Path) -> None:
    model, _, engine = build(tmp_path)
    for number in range(3):
        train(model, engine, range(number, number + 1))
        engine.save_checkpoint(
            tmp_path / f"step-{number}", extra=number, asynchronous=True, keep_last=2
        )
    assert engine.load_checkpoint(tmp_path / "step-1") == 1
    engine.drain()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-2"]
    engine.close()


def failing(rank: int, size: int, folder: Path) -> str:
    model, _, engine = build(folder, stage=3)
    train(model, engine, range(1))
    engine.save_checkpoint(folder / "ck", extra="first")
    write = os.write

    def full(descriptor: int, content: Any) -> int:
        if threading.current_thread().name == "checkpoint":
            raise OSError(28, "No space left on device")
        return write(descriptor, content)

    if rank == size - 1:
        os.write = full
    engine.save_checkpoint(folder / "ck", extra="second", asynchronous=True)
    with pytest.raises(CheckpointError) as caught:
        train(model, engine, range(1, 400))
    os.write = write
    engine.abort_step()
    engine.zero_grad()
    assert engine.load_checkpoint(folder / "ck") == "first"
    train(model, engine, range(1, 2))
    engine.close()
    return str(caught.value)


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.dist)])
def test_its_error_is_raised_in_a_step_of_every_rank(size: int, tmp_path: Path) -> None:
    for message in run_ranks(size, failing, tmp_path, preload=PRELOAD):
        assert "No space left on device" in message
        assert size == 1 or "failed on rank 1" in message


def several_ranks(rank: int, size: int, folder: Path) -> None:
    for case in (Case(size, 2, "nvme"), Case(size, 3, "host")):
        model, _, engine = build(folder, case)
        train(model, engine, range(2))
        wanted = state_of(engine)
        engine.save_checkpoint(folder / str(case), asynchronous=True)
        train(model, engine, range(2, 6))
        engine.drain()
        engine.load_checkpoint(folder / str(case))
        assert_same_bits(state_of(engine), wanted)
        engine.close()


@pytest.mark.dist
def test_several_ranks_save_beside_the_training(tmp_path: Path) -> None:
    run_ranks(2, several_ranks, tmp_path, preload=PRELOAD)
