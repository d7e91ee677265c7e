"""An asynchronous save of states in files, where these can be cloned: steps go on while it reads, and it is the state of the call."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import Case, build, content_of, rows, state_of, train
from support.clones import KINDS, cloning_disk, copy_range
from support.models import OddMLP, make
from support.ranks import run_ranks
from support.training import PRELOAD, adamw, assert_same_bits, config
from torch import Tensor

from zero_plugin import ZeroEngine
from zero_plugin.checkpoint.later import LaterReads
from zero_plugin.checkpoint.shardfile import whole
from zero_plugin.errors import CheckpointError
from zero_plugin.kernels import Kernels
from zero_plugin.store import clones
from zero_plugin.store.layout import Extent
from zero_plugin.store.store import NvmeStore

FORMS: dict[str, dict[str, Any]] = {
    "plain": {"stage": 2},
    "cache": {"stage": 1, "nvme_cache_bytes": 1 << 20},
    "int8 moments, sums": {"stage": 2, "moment_dtype": "int8", "nvme_checksum": True},
    "sharded in files": {"stage": 3, "params": "nvme", "gradients": "nvme"},
    "delayed": {"stage": 2, "delayed_update": True, "delayed_update_warmup": 2},
    "fp32": {"stage": 2, "dtype": torch.float32},
    **{
        f"chaos {seed}": {"stage": 3, "params": "host", "backend": "chaos", "backend_seed": seed}
        for seed in range(3)
    },
}


class Held:
    """What the runs of a test wait for: updates, and reads of what a save has cloned."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.updates, self.reads = threading.Event(), threading.Event()
        self.updates.set()
        self.reads.set()
        self.updated = 0
        self.is_read = threading.Event()
        self.stores: list[NvmeStore] = []
        update, read, drop = Kernels.update, NvmeStore.read, NvmeStore.drop_clones
        self.dropped = 0

        def held_update(*args: Any, **options: Any) -> None:
            assert self.updates.wait(20)
            update(*args, **options)
            self.updated += 1

        def held_read(store: NvmeStore, extent: Extent, offset: int, to: Tensor) -> None:
            if extent.first_file:
                self.is_read.set()
                assert self.reads.wait(30)
            read(store, extent, offset, to)

        def counted_drop(store: NvmeStore) -> None:
            drop(store)
            self.dropped += 1

        monkeypatch.setattr(Kernels, "update", held_update)
        monkeypatch.setattr(NvmeStore, "read", held_read)
        monkeypatch.setattr(NvmeStore, "drop_clones", counted_drop)
        monkeypatch.setattr(clones, "share_blocks", copy_range)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    """A stand-in for cloning on any file system, and everything open."""
    events = Held(monkeypatch)
    yield events
    events.updates.set()
    events.reads.set()


def build_half(folder: Path, settings: dict[str, Any]) -> tuple[Any, ZeroEngine]:
    """A seeded model whose masters lie apart from its weights, bf16 unless said otherwise; its states in files."""
    chosen = {
        "optimizer": "nvme",
        "nvme_path": folder,
        "nvme_buffer_bytes": 1 << 18,
        "bucket_bytes": 256,
        **settings,
    }
    model = make(OddMLP).to(chosen.pop("dtype", torch.bfloat16))
    return model, ZeroEngine(model, adamw(model.parameters()), config(**chosen))


def train_half(model: Any, engine: ZeroEngine, steps: range) -> None:
    dtype = model.first.weight.dtype
    for step in steps:
        batch = rows(step, engine.rank, engine.world_size).to(dtype)
        engine.backward(model(batch).square().mean())
        engine.step()
        engine.zero_grad()


def check_steps_go_on(folder: Path, settings: dict[str, Any], held: Held) -> None:
    """A save while an update is under way, and whole steps before the first byte of it is read."""
    model, engine = build_half(folder, settings)
    train_half(model, engine, range(4))
    engine.save_checkpoint(folder / "then")
    train_half(model, engine, range(4, 8))
    engine.drain()
    later = state_of(engine)
    engine.close()
    model, engine = build_half(folder, settings)
    train_half(model, engine, range(3))
    engine.wait_for_update()
    held.updated = 0
    held.updates.clear()
    held.reads.clear()
    train_half(model, engine, range(3, 4))
    engine.save_checkpoint(folder / "beside", asynchronous=True)
    assert held.updated == 0
    held.updates.set()
    train_half(model, engine, range(4, 7))
    engine.wait_for_update()
    assert held.is_read.wait(10)
    assert not (folder / "beside").exists()
    held.reads.set()
    train_half(model, engine, range(7, 8))
    engine.drain()
    assert held.dropped == 1
    assert list(folder.glob(".*")) == []  # Hidden folders are of saves that have not ended.
    # The steps beside the save are those of the run without one, and what it wrote is the state of the call.
    assert_same_bits(state_of(engine), later)
    engine.close()
    tensors, described = content_of(folder / "beside")
    wanted, description = content_of(folder / "then")
    assert_same_bits(tensors, wanted)
    assert described == description


@pytest.mark.parametrize("form", FORMS)
def test_steps_go_on_while_it_reads_and_it_is_the_state_of_the_call(
    form: str, tmp_path: Path, held: Held
) -> None:
    check_steps_go_on(tmp_path, FORMS[form], held)


def test_states_on_several_disks(tmp_path: Path, held: Held) -> None:
    disks = [tmp_path / f"zdisk{number}" for number in range(2)]
    for disk in disks:
        disk.mkdir()
    check_steps_go_on(tmp_path, {"stage": 2, "nvme_path": disks}, held)


@pytest.mark.parametrize("kind", KINDS)
def test_on_a_file_system_that_shares_blocks(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = clones.share_blocks
    held = Held(monkeypatch)
    monkeypatch.setattr(clones, "share_blocks", share)
    with cloning_disk(kind, tmp_path) as disk:
        check_steps_go_on(disk, {"stage": 2, "nvme_checksum": True}, held)


@pytest.mark.parametrize("refused", [1, 3])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_clone_that_is_refused_midway_is_read_instead(
    refused: int,
    code: int,
    tmp_path: Path,
    held: Held,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = {"stage": 2}
    model, engine = build_half(tmp_path, settings)
    train_half(model, engine, range(2))
    wanted = state_of(engine)
    asked: list[bool] = []

    def share(*args: int) -> None:
        asked.append(len(asked) < refused)
        if not asked[-1]:
            raise OSError(code, os.strerror(code))
        copy_range(*args)

    monkeypatch.setattr(clones, "share_blocks", share)
    with caplog.at_level(logging.WARNING, logger="zero_plugin"):
        engine.save_checkpoint(tmp_path / "ck", asynchronous=True)
        train_half(model, engine, range(2, 5))
        engine.drain()
    assert asked.count(True) == refused
    assert asked.count(False) > 1
    assert f"could not be cloned for an asynchronous save: {errno.errorcode[code]}" in caplog.text
    assert str(tmp_path) in caplog.text
    engine.load_checkpoint(tmp_path / "ck")
    assert_same_bits(state_of(engine), wanted)
    engine.close()


def test_what_cannot_be_read_fails_the_save_and_not_the_run(
    tmp_path: Path, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"stage": 2}
    model, engine = build_half(tmp_path, settings)
    train_half(model, engine, range(2))
    engine.save_checkpoint(tmp_path / "ck", extra="first")
    read = NvmeStore.read

    def fail(store: NvmeStore, extent: Extent, offset: int, to: Tensor) -> None:
        if extent.first_file:
            raise OSError(errno.EIO, "no such sector")
        read(store, extent, offset, to)

    monkeypatch.setattr(NvmeStore, "read", fail)
    engine.save_checkpoint(tmp_path / "ck", extra="second", asynchronous=True)
    with pytest.raises(CheckpointError, match=r"saving .*ck failed: .*no such sector"):
        engine.drain()
    assert held.dropped == 1
    monkeypatch.setattr(NvmeStore, "read", read)
    train_half(model, engine, range(2, 4))
    wanted = state_of(engine)
    engine.save_checkpoint(tmp_path / "ck", extra="third", asynchronous=True)
    train_half(model, engine, range(4, 5))
    assert engine.load_checkpoint(tmp_path / "ck") == "third"
    assert_same_bits(state_of(engine), wanted)
    engine.close()


def test_a_folder_that_has_gone_fails_the_save_and_not_the_run(
    tmp_path: Path, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room is asked about where the files lie; that can fail as any look at a disk can."""
    model, engine = build_half(tmp_path, {"stage": 2})
    train_half(model, engine, range(2))

    def fail(_: Path) -> int:
        raise OSError(errno.ESTALE, "no such mount")

    monkeypatch.setattr(clones, "neighbours", fail)
    engine.save_checkpoint(tmp_path / "ck", extra="first")
    with pytest.raises(CheckpointError, match=r"saving .*ck failed: .*no such mount"):
        engine.save_checkpoint(tmp_path / "ck", extra="second", asynchronous=True)
    train_half(model, engine, range(2, 4))
    assert engine.load_checkpoint(tmp_path / "ck") == "first"
    engine.close()


def test_a_place_that_is_full_lets_the_clones_go(
    tmp_path: Path, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write

    def full(descriptor: int, content: Any) -> int:
        if threading.current_thread().name == "checkpoint":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, content)

    model, engine = build_half(tmp_path, {"stage": 2})
    train_half(model, engine, range(2))
    monkeypatch.setattr(os, "write", full)
    engine.save_checkpoint(tmp_path / "ck", asynchronous=True)
    with pytest.raises(CheckpointError, match="No space left on device"):
        engine.drain()
    assert held.dropped == 1
    monkeypatch.setattr(os, "write", write)
    train_half(model, engine, range(2, 4))
    engine.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("held_back", [False, True])
def test_a_full_disk_makes_steps_wait_and_fails_nothing(
    held_back: bool,
    tmp_path: Path,
    held: Held,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also where, as on btrfs, every write needs new space: a write of the step before then waits for half a save."""
    model, engine = build_half(tmp_path, {"stage": 2})
    train_half(model, engine, range(3))
    engine.save_checkpoint(tmp_path / "then")
    store = engine._resources.store
    assert store is not None
    native = store._parts.engine
    assert native is not None
    refused = threading.Event()

    class Full:
        def transfer(self, requests: Any) -> Any:
            write, file, offset, _, nbytes = requests[0]
            if write and store._clones._held:
                # Only now is read what is held.
                refused.set()
                held.reads.set()
                return (file, True, offset, nbytes, 0, errno.ENOSPC)
            return native.transfer(requests)

        def __getattr__(self, name: str) -> Any:
            return getattr(native, name)

    monkeypatch.setattr(store._parts, "engine", Full())
    if held_back:
        # Of the step before, the last blocks are written after the first ones are cloned.
        write = NvmeStore.write

        def late(store: NvmeStore, extent: Extent, offset: int, source: Tensor) -> None:
            time.sleep(0.05)
            write(store, extent, offset, source)

        monkeypatch.setattr(NvmeStore, "write", late)
        engine.load_checkpoint(tmp_path / "then")
        train_half(model, engine, range(3, 4))
    wanted = None if held_back else state_of(engine)
    held.reads.clear()
    with caplog.at_level(logging.WARNING, logger="zero_plugin"):
        engine.save_checkpoint(tmp_path / "beside", asynchronous=True)
        if held_back:
            assert refused.wait(10)
        train_half(model, engine, range(4, 6))
        engine.drain()
    assert refused.is_set()
    assert "is full: a step's write waits" in caplog.text
    later = state_of(engine)
    engine.load_checkpoint(tmp_path / "then" if held_back else tmp_path / "beside")
    if held_back:
        train_half(model, engine, range(3, 4))
        wanted = state_of(engine)
        engine.load_checkpoint(tmp_path / "beside")
    assert_same_bits(state_of(engine), wanted)
    train_half(model, engine, range(4, 6))
    assert_same_bits(state_of(engine), later)
    engine.close()


def test_an_exception_drops_it_with_its_clones(tmp_path: Path, held: Held) -> None:
    model, engine = build_half(tmp_path, {"stage": 2})
    train_half(model, engine, range(2))
    held.reads.clear()

    def fail() -> None:
        try:
            engine.save_checkpoint(tmp_path / "ck", asynchronous=True)
            train_half(model, engine, range(2, 3))
            assert held.is_read.wait(10)
            threading.Timer(0.2, held.reads.set).start()
            raise ValueError("a bug")
        finally:
            engine.close()

    with pytest.raises(ValueError, match="a bug"):
        fail()
    assert held.dropped == 1
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_held_after_the_end() -> None:
    """A lane may come to a block when the save has failed already: what it held then would be held for ever."""
    taken: list[str] = []

    class Files:
        wants_space = False

        def clone(self, extent: Extent) -> bool:
            del extent
            taken.append("clone")
            return True

        def drop_clones(self) -> None:
            taken.append("drop")

    class Line:
        def read(self, parts: Any) -> None:
            taken.extend("read" for _ in parts)

        def end(self, error: BaseException | None = None) -> None:
            taken.append(f"end, {error}")

    extent = Extent(number=0, label="states", nbytes=1, padded=4096, bases=(0,))
    ended = threading.Event()
    later = LaterReads(Line(), Files(), ended)
    part = whole("weight", torch.zeros(1))
    assert later.put(extent, [part])
    later.settle()
    ended.set()
    later.join()
    assert not later.put(extent, [part])
    later.settle()
    assert taken == ["clone", "read", "drop", "end, None"]


def two_ranks(rank: int, size: int, folder: Path) -> None:
    clones.share_blocks = copy_range
    case = Case(size, 2, "nvme")
    model, _, engine = build(folder, case)
    train(model, engine, range(2))
    wanted = state_of(engine)
    engine.save_checkpoint(folder / "ck", asynchronous=True)
    train(model, engine, range(2, 5))
    engine.drain()
    engine.load_checkpoint(folder / "ck")
    assert_same_bits(state_of(engine), wanted)
    engine.close()


@pytest.mark.dist
def test_several_ranks(tmp_path: Path) -> None:
    run_ranks(2, two_ranks, tmp_path, preload=PRELOAD)
