"""What is written is what is read, whatever its size, place, paths and engine."""

from __future__ import annotations

import gc
import logging
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from zero_plugin.errors import BudgetError, ConfigError, EngineStateError, StoreError
from zero_plugin.runtime.memory import allocate_host
from zero_plugin.store.store import NvmeStore
from zero_plugin.trace import Ledger

Make = Callable[..., NvmeStore]
BLOCK = 16384
AROUND = (
    1,
    2,
    3,
    511,
    512,
    513,
    1023,
    1024,
    1025,
    2047,
    2048,
    2049,
    4095,
    4096,
    4097,
    8191,
    8192,
    8193,
)


def pattern(numel: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    bits = torch.randint(
        0,
        256,
        (numel * dtype.itemsize,),
        dtype=torch.uint8,
        generator=torch.Generator().manual_seed(seed),
    )
    return bits.view(dtype)


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(first.view(torch.uint8), second.view(torch.uint8))


def slabs(store: NvmeStore) -> list[Path]:
    return [path.folder / "slab" for path in store.describe().paths]


# ------------------------------------------------------------------ round trips


@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_size_around_the_alignment_comes_back(
    make_store: Make, engine: str, count: int
) -> None:
    store = make_store(count=count, engine=engine, block_bytes=4096, checksum=True)
    sizes = [*AROUND, *random.Random(count).sample(range(1, 8194), 60)]
    dtypes = (torch.float32, torch.bfloat16, torch.uint8, torch.float64)
    extents = [
        store.reserve(numel * dtypes[i % 4].itemsize, f"t{i}") for i, numel in enumerate(sizes)
    ]
    sources = [pattern(numel, i, dtypes[i % 4]) for i, numel in enumerate(sizes)]
    for extent, source in zip(extents, sources, strict=True):
        store.write(extent, 0, source)
    for extent, source in zip(extents, sources, strict=True):
        back = torch.zeros_like(source)
        store.read(extent, 0, back)
        assert same(back, source), (extent, source.numel())


@pytest.mark.parametrize("count", [1, 2, 3])
def test_ranges_of_an_extent(make_store: Make, engine: str, count: int) -> None:
    """Blocks written out of order and read in others, from aligned and from unaligned memory."""
    store, draw = (
        make_store(count=count, engine=engine, block_bytes=BLOCK, checksum=True),
        random.Random(count),
    )
    nbytes = 50 * 4096 + 100
    store.reserve(3 * 4096, "before")
    extent, after = store.reserve(nbytes, "states"), store.reserve(4096, "after")
    store.write(after, 0, torch.full((4096,), 7, dtype=torch.uint8))
    whole = allocate_host(51 * 4096)
    truth = pattern(nbytes, dtype=torch.uint8)
    store.write(extent, 0, truth)
    for turn in range(120):
        first = draw.randrange(51)
        last = draw.randrange(first + 1, 52)
        start, stop = first * 4096, min(last * 4096, nbytes)
        memory = whole[draw.choice((0, 1, 512)) :][: stop - start]
        if turn % 2:
            memory.copy_(pattern(stop - start, turn, torch.uint8)[: memory.numel()])
            if memory.numel() < stop - start:
                continue
            truth[start:stop] = memory
            store.write(extent, start, memory)
        else:
            memory.fill_(0)
            store.read(extent, start, memory)
            assert torch.equal(memory, truth[start : start + memory.numel()]), (start, stop)
    back = torch.empty(4096, dtype=torch.uint8)
    store.read(after, 0, back)
    assert back.eq(7).all()


def test_paths_share_in_proportion_to_the_stripes(make_store: Make, engine: str) -> None:
    store = make_store(count=3, engine=engine, block_bytes=BLOCK)
    weights = [path.weight for path in store.describe().paths]
    nbytes = BLOCK * sum(weights) * 4
    extent = store.reserve(nbytes, "states")
    source = pattern(nbytes, dtype=torch.uint8)
    store.write(extent, 0, source)
    assert [path.stat().st_size for path in slabs(store)] == [4 * BLOCK * w for w in weights]
    # What the files hold, dealt out by hand, is what was written.
    files, dealt = [path.read_bytes() for path in slabs(store)], bytearray()
    for turn in range(4):
        for content, weight in zip(files, weights, strict=True):
            dealt += content[turn * weight * BLOCK : (turn + 1) * weight * BLOCK]
    assert bytes(dealt) == source.numpy().tobytes()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_more_than_two_gib_in_one_transfer(make_store: Make, engine: str, tmp_path: Path) -> None:
    nbytes = (1 << 31) + (1 << 20) + 12
    status = os.statvfs(tmp_path)
    if status.f_bavail * status.f_frsize < 2 * nbytes:
        pytest.skip("needs 5 GB of disk")
    store = make_store(engine=engine, block_bytes=1 << 22)
    extent = store.reserve(nbytes, "large")
    memory = allocate_host(extent.padded)
    words = memory[: nbytes - nbytes % 8].view(torch.int64)
    torch.arange(words.numel(), out=words)
    store.write(extent, 0, memory[:nbytes])
    memory.fill_(0)
    store.read(extent, 0, memory[:nbytes])
    step = 1 << 22
    for start in range(0, words.numel(), step):
        part = words[start : start + step]
        assert torch.equal(part, torch.arange(start, start + part.numel()))


@pytest.mark.parametrize("registered", [False, True])
def test_several_threads_at_once(make_store: Make, engine: str, registered: bool) -> None:
    store = make_store(
        count=2, engine=engine, block_bytes=BLOCK, queue_depth=4, ledger=(ledger := Ledger())
    )
    nbytes, wrong = 40 * BLOCK, []
    extents = [store.reserve(nbytes, f"thread {place}") for place in range(4)]
    buffers = [allocate_host(nbytes) for _ in range(4)]
    if registered:
        for buffer in buffers:
            store.register(buffer)

    def work(place: int) -> None:
        buffer = buffers[place]
        for turn in range(12):
            source = pattern(nbytes, 100 * place + turn, torch.uint8)
            buffer.copy_(source)
            store.write(extents[place], 0, buffer)
            buffer.fill_(0xAA)
            store.read(extents[place], 0, buffer)
            if not torch.equal(buffer, source):
                wrong.append((place, turn))

    threads = [threading.Thread(target=work, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    assert ledger.snapshot()["nvme_read"] == ledger.snapshot()["nvme_write"] == 4 * 12 * nbytes


def test_registered_memory_is_what_is_moved(make_store: Make, io_uring_refusal: str) -> None:
    if io_uring_refusal:
        pytest.skip(io_uring_refusal)
    store = make_store(engine="uring", block_bytes=BLOCK)
    first, second = allocate_host(8 * BLOCK), allocate_host(8 * BLOCK)
    extent = store.reserve(8 * BLOCK, "states")
    store.register(first)
    first.copy_(pattern(8 * BLOCK, dtype=torch.uint8))
    store.write(extent, 0, first)
    store.register(second)
    store.read(extent, 0, second)
    assert torch.equal(first, second)
    # The kernel may refuse (ulimit -l), and then says so; the bytes are right in both cases.
    assert store.registration() == "" or "ulimit -l" in store.registration()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forks_during_transfers_part_nothing(make_store: Make, engine: str) -> None:
    """Data loaders fork workers at any time; their copies of a page must not be what the disk gets or gives."""
    store = make_store(engine=engine, block_bytes=BLOCK)
    nbytes = 256 * BLOCK
    memory = allocate_host(nbytes)
    store.register(memory)
    extent = store.reserve(nbytes, "states")
    wrong: list[int] = []

    def work() -> None:
        for turn in range(1, 40):
            memory.fill_(turn)
            store.write(extent, 0, memory)
            memory.zero_()
            store.read(extent, 0, memory)
            if not memory.eq(turn).all():
                wrong.append(turn)

    thread = threading.Thread(target=work)
    thread.start()
    begin = f"{memory.data_ptr():x}-"
    children: list[int] = []
    for _ in range(12):
        child = os.fork()
        if child == 0:
            time.sleep(0.2)
            os._exit(begin in Path("/proc/self/maps").read_text())
        children.append(child)
        time.sleep(0.01)
    thread.join(60)
    assert begin in Path("/proc/self/maps").read_text()
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 12
    assert wrong == []


# ------------------------------------------------------------------ the ledger and the description


def test_ledger_counts_what_moved(make_store: Make, engine: str) -> None:
    ledger = Ledger()
    store = make_store(engine=engine, ledger=ledger)
    assert ledger.snapshot()["nvme_write"] == 0  # the measurement is not the program's
    extent = store.reserve(10_000, "states")
    store.write(extent, 0, torch.zeros(10_000, dtype=torch.uint8))
    store.read(extent, 4096, torch.zeros(4096, dtype=torch.uint8))
    found = ledger.snapshot()
    assert (found["nvme_write"], found["nvme_read"]) == (12_288, 4096)


def test_description_is_logged_once(
    make_store: Make, caplog: pytest.LogCaptureFixture, engine: str
) -> None:
    with caplog.at_level(logging.INFO, logger="zero_plugin"):
        description = make_store(count=2, engine=engine).describe()
    messages = [record.message for record in caplog.records if record.levelno == logging.INFO]
    assert messages == [str(description)]
    assert f"{engine} engine" in messages[0]
    for path in description.paths:
        assert str(path.path) in messages[0]
        assert path.read_mb is not None
        assert path.read_mb > 0
        assert path.write_mb is not None
        assert path.write_mb > 0


# ------------------------------------------------------------------ refusals


def test_limit_is_checked_before_anything_is_taken(make_store: Make) -> None:
    store = make_store(limit=10 * 4096)
    store.reserve(8 * 4096, "first")
    before = [path.stat().st_size for path in slabs(store)]
    with pytest.raises(
        BudgetError, match=r"'second' needs 12,288 .* beside 32,768 .* nvme_limit=40,960: raise it"
    ):
        store.reserve(2 * 4096 + 1, "second")
    assert [path.stat().st_size for path in slabs(store)] == before
    store.reserve(2 * 4096, "third")
    assert store.reserved_bytes == 10 * 4096


def test_space_is_there_once_reserved(make_store: Make) -> None:
    store = make_store(count=2, block_bytes=BLOCK)
    store.reserve(64 * BLOCK, "states")
    assert sum(path.stat().st_blocks * 512 for path in slabs(store)) >= 64 * BLOCK


def test_ranges_outside_and_unaligned_are_refused(make_store: Make) -> None:
    store = make_store()
    extent = store.reserve(3 * 4096 - 10, "states")
    page = torch.zeros(4096, dtype=torch.uint8)
    with pytest.raises(
        ValueError, match="bytes 12,288 to 16,384 are not within the 12,278 bytes of 'states'"
    ):
        store.read(extent, 12_288, page)
    with pytest.raises(ValueError, match="not within"):
        store.write(extent, -4096, page)
    with pytest.raises(ValueError, match="do not begin and end at multiples of 4,096"):
        store.read(extent, 100, page)
    with pytest.raises(ValueError, match="do not begin and end at multiples of 4,096"):
        store.write(extent, 0, page[:-1])
    with pytest.raises(ValueError, match="contiguous CPU tensors"):
        store.write(extent, 0, page[::2])
    store.write(extent, 8192, page[: 4096 - 10])


def test_unfit_paths_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for paths, message in [
        ([], "nvme_path is empty"),
        ([tmp_path / "none"], "does not exist: create the folder"),
        ([file], "is not a folder"),
        ([tmp_path, tmp_path / "." / ""], "twice"),
    ]:
        with pytest.raises(ConfigError, match=message):
            NvmeStore(paths)
    assert [path for path in tmp_path.iterdir() if path != file] == []


@pytest.mark.parametrize("options", [{"engine": "magic"}, {"block_bytes": 1000}])
def test_unfit_options_are_refused(disks: list[Path], options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="the I/O engine cannot be had"):
        NvmeStore(disks[:1], **options)  # type: ignore[arg-type]
    assert list(disks[0].iterdir()) == []


# ------------------------------------------------------------------ damage


def test_truncated_file_is_found(make_store: Make, engine: str) -> None:
    store = make_store(engine=engine, block_bytes=BLOCK)
    extent = store.reserve(8 * BLOCK, "states")
    store.write(extent, 0, pattern(8 * BLOCK, dtype=torch.uint8))
    for length in (5 * BLOCK, 5 * BLOCK + 100, 0):
        os.truncate(slabs(store)[0], length)
        back = torch.zeros(8 * BLOCK, dtype=torch.uint8)
        with pytest.raises(
            StoreError,
            match=r"reading 16,384 bytes at offset .*slab stopped after .*: the file ends there",
        ):
            store.read(extent, 0, back)


@pytest.mark.parametrize("count", [1, 2])
def test_a_flipped_byte_is_found(make_store: Make, engine: str, count: int) -> None:
    store = make_store(count=count, engine=engine, block_bytes=BLOCK, checksum=True)
    store.reserve(3 * 4096, "before")
    extent = store.reserve(8 * BLOCK + 10, "states")
    source = pattern(8 * BLOCK + 10, dtype=torch.uint8)
    store.write(extent, 0, source)
    path, place = slabs(store)[0], 3 * 4096 + 4096 + 5
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.seek(place)
        file.write(bytes([content[place] ^ 4]))
    back = torch.zeros_like(source)
    with pytest.raises(
        StoreError,
        match=rf"4,096 bytes at offset {place - 5:,} of {path} \(states\) are not those written",
    ):
        store.read(extent, 0, back)
    if count == 1:  # what lies elsewhere is still good
        store.read(extent, 8192, back[8192:])
        assert torch.equal(back[8192:], source[8192:])


def test_without_checksums_nothing_is_checked(make_store: Make) -> None:
    store = make_store()
    assert not store.describe().checksum
    extent = store.reserve(4096, "states")
    store.write(extent, 0, torch.zeros(4096, dtype=torch.uint8))
    slabs(store)[0].write_bytes(bytes([1]) * 4096)
    back = torch.zeros(4096, dtype=torch.uint8)
    store.read(extent, 0, back)
    assert back.eq(1).all()


def test_a_vanished_folder_harms_nothing(make_store: Make, engine: str) -> None:
    store = make_store(engine=engine)
    extent = store.reserve(4 * BLOCK, "states")
    for path in slabs(store):
        path.unlink()
        (path.parent / "lock").unlink()
        path.parent.rmdir()
    source = pattern(4 * BLOCK, dtype=torch.uint8)
    back = torch.zeros_like(source)
    store.write(extent, 0, source)
    store.read(extent, 0, back)
    assert torch.equal(back, source)
    store.close()


# ------------------------------------------------------------------ the end


def test_close_is_idempotent_and_removes_everything(
    make_store: Make, disks: list[Path], engine: str
) -> None:
    store = make_store(count=2, engine=engine)
    extent = store.reserve(4096, "states")
    assert all(list(disk.iterdir()) for disk in disks[:2])
    store.close()
    store.close()
    assert [list(disk.iterdir()) for disk in disks] == [[], [], []]
    with pytest.raises(EngineStateError, match="closed; make a new one"):
        store.read(extent, 0, torch.zeros(4))
    with pytest.raises(EngineStateError, match="closed"):
        store.reserve(1, "late")


def test_a_forgotten_store_is_closed(disks: list[Path], engine: str) -> None:
    store = NvmeStore(disks[:1], engine=engine)  # type: ignore[arg-type]
    assert list(disks[0].iterdir())
    del store
    gc.collect()
    assert list(disks[0].iterdir()) == []


def test_close_waits_for_what_runs(make_store: Make, engine: str) -> None:
    store = make_store(engine=engine)
    extent = store.reserve(32 << 20, "states")
    source = allocate_host(32 << 20)
    begun, errors = threading.Event(), []

    def work() -> None:
        begun.set()
        try:
            for _ in range(200):
                store.write(extent, 0, source)
        except (EngineStateError, RuntimeError) as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait(10)
    store.close()
    thread.join(60)
    assert not thread.is_alive()
    assert len(errors) == 1
