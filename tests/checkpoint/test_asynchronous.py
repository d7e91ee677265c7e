"""A save beside the training holds the state of the moment of the call; its errors are raised, on every rank, soon after."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import Case, build, content_of, rows, state_of, train
from support.models import OddMLP, make
from support.ranks import run_ranks
from support.training import PRELOAD, adamw, assert_same_bits, config

from zero_plugin import ZeroEngine
from zero_plugin.checkpoint import pieces, shardfile
from zero_plugin.errors import CheckpointError
from zero_plugin.kernels import Kernels
from zero_plugin.store.store import NvmeStore

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
        original = shardfile.pieces_of
        passed = [0]

        def held_back(parts: Any) -> Any:
            for piece in original(parts):
                passed[0] += 1
                if passed[0] > free:
                    self.held.set()
                    self.opened.wait(20)
                yield piece

        monkeypatch.setattr(pieces, "pieces_of", held_back)


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


class HeldUpdates:
    """Holds back every update of a block until it is opened, and has states reach their files some time later."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self.opened.set()
        self.ended = 0
        self.late = 0.0
        update, write = Kernels.update, NvmeStore.write

        def held_back(*args: Any, **options: Any) -> None:
            self.opened.wait(20)
            update(*args, **options)
            self.ended += 1

        def write_late(*args: Any, **options: Any) -> None:
            time.sleep(self.late)
            write(*args, **options)

        monkeypatch.setattr(Kernels, "update", held_back)
        monkeypatch.setattr(NvmeStore, "write", write_late)


BESIDE: dict[str, dict[str, Any]] = {
    "host": {"stage": 2},
    "chaos": {"stage": 2, "backend": "chaos"},
    "nvme": {"stage": 2, "optimizer": "nvme"},
    "nvme with a cache": {"stage": 1, "optimizer": "nvme", "nvme_cache_bytes": 1 << 20},
    "int8": {"stage": 2, "moment_dtype": "int8"},
    "bf16 in files": {"stage": 2, "optimizer": "nvme", "moment_dtype": "bf16"},
    "sharded": {"stage": 3, "params": "host"},
    "sharded in files": {"stage": 3, "params": "nvme", "optimizer": "nvme"},
    "delayed": {"stage": 2, "delayed_update": True, "delayed_update_warmup": 2},
    "delayed, sharded": {"stage": 3, "delayed_update": True, "delayed_update_warmup": 2},
}


def build_half(folder: Path, form: str) -> tuple[Any, Any, ZeroEngine]:
    """A seeded bf16 model, whose masters lie apart from its weights."""
    settings = (
        {"nvme_path": folder, **BESIDE[form]} if "nvme" in str(BESIDE[form]) else BESIDE[form]
    )
    model = make(OddMLP).to(torch.bfloat16)
    optimizer = adamw(model.parameters())
    return model, optimizer, ZeroEngine(model, optimizer, config(**settings))


def train_half(model: Any, engine: ZeroEngine, steps: range) -> None:
    for step in steps:
        engine.backward(model(rows(step, 0, 1).bfloat16()).square().mean())
        engine.step()
        engine.zero_grad()


@pytest.mark.parametrize("form", BESIDE)
def test_the_call_waits_for_no_update_and_is_the_save_of_that_moment(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _, engine = build_half(tmp_path, form)
    train_half(model, engine, range(4))
    engine.save_checkpoint(tmp_path / "then")
    engine.close()
    held = HeldUpdates(monkeypatch)
    model, _, engine = build_half(tmp_path, form)
    train_half(model, engine, range(3))
    engine.wait_for_update()
    held.opened.clear()
    held.ended = 0
    held.late = 0.1
    train_half(model, engine, range(3, 4))
    engine.save_checkpoint(tmp_path / "beside", asynchronous=True)
    assert held.ended == 0
    time.sleep(0.1)  # What does not wait for the update copies the state before it now.
    held.opened.set()
    train_half(model, engine, range(4, 5))
    held.late = 0.0
    train_half(model, engine, range(5, 7))
    engine.close()
    tensors, described = content_of(tmp_path / "beside")
    wanted, description = content_of(tmp_path / "then")
    assert_same_bits(tensors, wanted)
    assert described == description


@pytest.mark.parametrize(
    "early",
    [
        {"speculate": True},
        {"speculate": True, "moment_dtype": "bf16"},
        {"update_in_backward": True, "nonfinite": "propagate"},
    ],
    ids=str,
)
def test_an_update_inside_backward_comes_after_the_copy(
    early: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _, engine = build(tmp_path, stage=2, bucket_bytes=256, **early)
    train(model, engine, range(3))
    wanted = state_of(engine)
    gate = Gate(monkeypatch, free=12)
    engine.save_checkpoint(tmp_path / "ck", asynchronous=True)
    assert gate.held.wait(10)
    # Backward begins the updates, which wait for the copy.
    engine.backward(model(rows(3, 0, 1)).square().mean())
    gate.opened.set()
    engine.step()
    assert engine.speculation["taken"] > 0
    engine.zero_grad()
    train(model, engine, range(4, 6))
    engine.close()
    _, _, engine = build(tmp_path, stage=2)
    engine.load_checkpoint(tmp_path / "ck")
    assert_same_bits(state_of(engine), wanted)
    engine.close()


def test_an_update_that_fails_fails_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _, engine = build(tmp_path, stage=2)
    train(model, engine, range(2))
    engine.save_checkpoint(tmp_path / "ck", extra="first")

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(Kernels, "update", fail)
    train(model, engine, range(2, 3))
    engine.save_checkpoint(tmp_path / "ck", extra="second", asynchronous=True)
    with pytest.raises(CheckpointError, match=r"saving .*ck failed: .*no kernel"):
        engine.drain()
    monkeypatch.undo()
    engine.abort_step()
    engine.zero_grad()
    assert engine.load_checkpoint(tmp_path / "ck") == "first"
    train(model, engine, range(2, 4))
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
