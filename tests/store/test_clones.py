"""What an extent held is read as it was while it is written to, where blocks are shared; elsewhere the store says that it cannot."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.clones import KINDS, cloning_disk, copy_range
from torch import Tensor

from zero_plugin.errors import StoreError
from zero_plugin.runtime.memory import allocate_host
from zero_plugin.store import clones
from zero_plugin.store.slab import Slab
from zero_plugin.store.store import NvmeStore

SIZES = (1 << 20, 4096, 300_001)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file system can clone."""
    monkeypatch.setattr(clones, "share_blocks", copy_range)


def filled(nbytes: int, seed: int) -> Tensor:
    """Aligned random bytes."""
    memory = allocate_host(nbytes)
    return memory.random_(0, 256, generator=torch.Generator().manual_seed(seed))


def check_rounds(store: NvmeStore) -> None:
    """Hold, write, read both, let go; several times, with an extent that is not held beside them."""
    extents = [store.reserve(size, f"extent {size}") for size in SIZES]
    loose = store.reserve(8192, "not held")
    contents = [filled(size, size) for size in SIZES]
    for extent, content in zip([*extents, loose], [*contents, filled(8192, 1)], strict=True):
        store.write(extent, 0, content)
    for turn in range(2):
        assert store.begin_clones(extents)
        assert all(map(store.clone, extents))
        later = [filled(size, size + turn + 1) for size in SIZES]
        for extent, before, after in zip(extents, contents, later, strict=True):
            store.write(extent, 0, after)
            for place, wanted in ((store.clone_of(extent), before), (extent, after)):
                got = allocate_host(extent.nbytes)
                store.read(place, 0, got)
                assert torch.equal(got, wanted)
        assert store.clone_of(loose) is loose
        store.drop_clones()
        assert [store.clone_of(extent) for extent in extents] == extents
        contents = later


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("checksum", [False, True])
def test_it_holds_what_was_there(
    count: int, checksum: bool, engine: str, make_store, stand_in: None
) -> None:
    store = make_store(count=count, checksum=checksum, engine=engine, block_bytes=65536)
    assert all(path.clones for path in store.describe().paths)
    assert "cloned by asynchronous saves" in str(store.describe())
    check_rounds(store)


@pytest.mark.parametrize("kind", KINDS)
def test_it_holds_on_a_file_system_that_shares_blocks(kind: str, tmp_path: Path) -> None:
    with cloning_disk(kind, tmp_path) as disk:
        store = NvmeStore([disk], checksum=True)
        try:
            assert store.describe().paths[0].clones
            check_rounds(store)
            extent = store.reserve(32 << 20, "large")
            store.write(extent, 0, filled(32 << 20, 5))
            os.sync()
            before = os.statvfs(disk).f_bavail
            assert store.clone(extent)
            os.sync()
            # Less than a tenth of it: nothing was copied.
            assert before - os.statvfs(disk).f_bavail < (3 << 20) // os.statvfs(disk).f_frsize
            store.drop_clones()
        finally:
            store.close()


def test_what_decayed_in_a_clone_is_seen(make_store, stand_in: None) -> None:
    store = make_store(checksum=True)
    extent = store.reserve(1 << 20, "states")
    store.write(extent, 0, filled(1 << 20, 1))
    assert store.begin_clones([extent])
    assert store.clone(extent)
    # What is written later has other sums.
    store.write(extent, 0, filled(1 << 20, 2))
    held = store.clone_of(extent)
    store.read(held, 0, allocate_host(1 << 20))
    with mmap.mmap(-1, 4096) as zeros:
        os.pwritev(store._clones.descriptors[0], [zeros], extent.bases[0] + 8192)
    with pytest.raises(StoreError, match=r"offset 8,192 of .* \(states\) are not those written"):
        store.read(held, 0, allocate_host(1 << 20))


@pytest.mark.parametrize("code", ["EOPNOTSUPP", "EXDEV", "EINVAL", "ENOTTY", "EPERM"])
def test_a_refusal_is_known_from_the_start(
    code: str, make_store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(getattr(errno, code), "refused")

    monkeypatch.setattr(clones, "share_blocks", refuse)
    store = make_store(count=2)
    assert not any(path.clones for path in store.describe().paths)
    assert errno.errorcode[getattr(errno, code)] in store._clones.refusal
    extent = store.reserve(8192, "states")
    with caplog.at_level(logging.INFO, logger="zero_plugin"):
        assert not store.begin_clones([extent])
    assert f"and not cloned: {store._clones.refusal}" in caplog.text
    assert store.clone_of(extent) is extent


def test_a_disk_that_fills_up_refuses_one_extent_and_says_the_cure(
    make_store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(clones, "share_blocks", copy_range)
    store = make_store(checksum=True)
    first, second = (store.reserve(8192, name) for name in ("first", "second"))
    content = filled(8192, 1)
    for extent in (first, second):
        store.write(extent, 0, content)
    assert store.clone(first)

    def fail(*_: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(clones, "share_blocks", fail)
    with caplog.at_level(logging.WARNING, logger="zero_plugin"):
        assert not store.clone(second)
    slab = store.describe().paths[0].folder / "slab"
    assert f"the second in {slab} could not be cloned" in caplog.text
    assert "ENOSPC" in caplog.text
    assert "free space there" in caplog.text
    store.write(first, 0, filled(8192, 2))
    got = allocate_host(8192)
    for extent in (first, second):
        store.read(store.clone_of(extent), 0, got)
        assert torch.equal(got, content)
    store.drop_clones()


def test_little_room_is_left_to_the_steps(
    make_store, disks: list[Path], stand_in: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written elsewhere and the checkpoint must fit, of every run that shares the folder."""
    store = make_store()
    extent = store.reserve(1 << 20, "states")
    monkeypatch.setattr(Slab, "free_bytes", lambda _: 2 << 20)
    assert store.begin_clones([extent])
    other = make_store()
    assert not store.begin_clones([extent])
    other.close()
    assert store.begin_clones([extent])
    monkeypatch.setattr(Slab, "free_bytes", lambda _: (2 << 20) - 1)
    assert not store.begin_clones([extent])
    # A file system that does not say how much is free.
    monkeypatch.setattr(Slab, "free_bytes", lambda _: None)
    assert store.begin_clones([extent])


class FullWhileHeld:
    """In place of a store's engine: a disk that has no room for a write to shared blocks."""

    def __init__(self, store: NvmeStore) -> None:
        self._engine: Any = store._parts.engine
        self._clones = store._clones
        self.refused = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def transfer(self, requests: list[tuple[bool, int, int, int, int]]) -> Any:
        write, file, offset, _, nbytes = requests[0]
        if write and self._clones._held:
            self.refused.set()
            return (file, True, offset, nbytes, 0, errno.ENOSPC)
        return self._engine.transfer(requests)


def check_a_write_waits(
    store: NvmeStore, extent: Any, refused: threading.Event, content: Tensor, after: Tensor
) -> None:
    """A write that finds no room goes on when nothing is held any more; what was held is as it was until then."""
    errors: list[StoreError] = []

    def write() -> None:
        try:
            store.write(extent, 0, after)
        except StoreError as error:
            errors.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    assert refused.wait(10)
    writer.join(0.2)
    assert writer.is_alive()
    got = allocate_host(extent.nbytes)
    store.read(store.clone_of(extent), 0, got)
    assert torch.equal(got, content)
    store.drop_clones()
    writer.join(20)
    assert not writer.is_alive()
    assert errors == []
    store.read(extent, 0, got)
    assert torch.equal(got, after)


def test_a_write_that_finds_the_disk_full_waits_for_the_save(
    make_store, stand_in: None, caplog: pytest.LogCaptureFixture
) -> None:
    store = make_store(checksum=True)
    extent = store.reserve(1 << 20, "states")
    content = filled(1 << 20, 1)
    store.write(extent, 0, content)
    assert store.clone(extent)
    full = FullWhileHeld(store)
    store._parts.engine = full
    with caplog.at_level(logging.WARNING, logger="zero_plugin"):
        check_a_write_waits(store, extent, full.refused, content, filled(1 << 20, 2))
    slab = store.describe().paths[0].folder / "slab"
    assert f"{slab} is full: a step's write waits" in caplog.text
    assert "Free space there" in caplog.text


def test_a_disk_that_is_full_without_clones_fails_at_once(
    make_store, stand_in: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store()
    extent = store.reserve(8192, "states")
    full = FullWhileHeld(store)
    monkeypatch.setattr(full, "_clones", SimpleNamespace(_held=True))  # It stays full.
    store._parts.engine = full
    for held_before in (False, True):
        if held_before:
            assert store.clone(extent)
            store.drop_clones()
        with pytest.raises(StoreError, match=r"writing 8,192 bytes .* ENOSPC .*free space there"):
            store.write(extent, 0, filled(8192, 1))


def test_a_full_file_system_that_shares_blocks_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real one: others take the space that a write to shared blocks needs; without the clone it needs none."""
    with cloning_disk("xfs", tmp_path) as disk:
        store = NvmeStore([disk], checksum=True)
        try:
            size = 64 << 20
            extent = store.reserve(size, "states")
            content, after = filled(size, 1), filled(size, 2)
            store.write(extent, 0, content)
            assert store.clone(extent)
            with (disk / "other").open("wb") as other:
                status = os.statvfs(disk)
                os.posix_fallocate(other.fileno(), 0, (status.f_bavail - 2048) * status.f_frsize)
                waits = threading.Event()
                wait = store._clones.wait_for_space

                def noted(path: object) -> bool:
                    waits.set()
                    return wait(path)

                monkeypatch.setattr(store._clones, "wait_for_space", noted)
                check_a_write_waits(store, extent, waits, content, after)
        finally:
            store.close()


@pytest.fixture
def forked() -> Iterator[list[int]]:
    """Children that are ended after the test."""
    children: list[int] = []
    yield children
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def hold_for_ever(folder: Path, told: int) -> None:
    """A run that holds an extent until it is killed; `told` is written to then."""
    torch.set_num_threads(1)  # A fork has none of the others.
    store = NvmeStore([folder])
    extent = store.reserve(8192, "states")
    store.write(extent, 0, filled(8192, 1))
    os.write(told, b"held" if store.clone(extent) else b"lost")
    signal.pause()


def test_a_killed_run_leaves_nothing_of_it(
    disks: list[Path], make_store, stand_in: None, forked: list[int]
) -> None:
    hears, told = os.pipe()
    forked.append(os.fork())
    if forked[-1] == 0:
        try:
            hold_for_ever(disks[0], told)
        finally:
            os._exit(1)
    os.close(told)
    with os.fdopen(hears, "rb") as line:
        assert line.read(4) == b"held"
    (left,) = disks[0].iterdir()
    # It has no name: the system takes it back when the process ends.
    assert sorted(path.name for path in left.iterdir()) == ["lock", "slab"]
    child = forked.pop()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    store = make_store()
    assert list(disks[0].iterdir()) == [store.describe().paths[0].folder]


def test_its_space_comes_back_though_a_forked_child_has_it_open(
    make_store, stand_in: None, forked: list[int]
) -> None:
    """A data loader's worker that began during a save lives as long as the loader."""
    store = make_store()
    extent = store.reserve(1 << 20, "states")
    store.write(extent, 0, filled(1 << 20, 1))
    assert store.clone(extent)
    descriptor = store._clones.descriptors[0]
    assert os.fstat(descriptor).st_blocks * 512 >= 1 << 20
    forked.append(os.fork())
    if forked[-1] == 0:
        signal.pause()
    store.drop_clones()
    assert os.fstat(descriptor).st_blocks == 0
