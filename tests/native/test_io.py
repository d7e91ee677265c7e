"""The I/O engines and checksums below the store."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zero_plugin import _native


@pytest.fixture(params=["threads", "uring"])
def engine(request: pytest.FixtureRequest) -> Iterator[_native.IoEngine]:
    if request.param == "uring":
        probe = _native.IoEngine("auto", 1, 4096)
        name, reason = probe.name, probe.reason
        probe.close()
        if name != "uring":
            pytest.skip(reason)
    made = _native.IoEngine(request.param, 3, 4096)
    yield made
    made.close()


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    opened = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield opened
    os.close(opened)


def test_lists_of_requests_of_any_size(engine: _native.IoEngine, descriptor: int) -> None:
    file = engine.add_file(descriptor, 1)
    source = torch.randint(0, 256, (100_003,), dtype=torch.uint8)
    back = torch.zeros_like(source)
    cuts = [0, 1, 1, 4096, 4097, 20_000, 99_999, 100_003]
    for write, memory in ((True, source), (False, back)):
        requests = [
            (write, file, start, memory.data_ptr() + start, stop - start)
            for start, stop in itertools.pairwise(cuts)
        ]
        assert engine.transfer(requests) is None
    assert torch.equal(back, source)
    assert engine.transfer([]) is None
    assert engine.transfer([(True, file, 0, source.data_ptr(), 0)]) is None


def test_reads_and_writes_in_one_list(engine: _native.IoEngine, descriptor: int) -> None:
    file = engine.add_file(descriptor, 1)
    old, new, back = (torch.full((50_000,), value, dtype=torch.uint8) for value in (1, 2, 0))
    assert engine.transfer([(True, file, 0, old.data_ptr(), 50_000)]) is None
    mixed = [
        (False, file, 0, back.data_ptr(), 50_000),
        (True, file, 50_000, new.data_ptr(), 50_000),
    ]
    assert engine.transfer(mixed) is None
    assert back.eq(1).all()
    assert engine.transfer([(False, file, 50_000, back.data_ptr(), 50_000)]) is None
    assert back.eq(2).all()


def test_the_end_of_the_file_is_a_fault(engine: _native.IoEngine, descriptor: int) -> None:
    file = engine.add_file(descriptor, 1)
    os.truncate(descriptor, 5000)
    back = torch.zeros(9000, dtype=torch.uint8)
    assert engine.transfer([(False, file, 0, back.data_ptr(), 9000)]) in (
        (file, False, 4096, 4096, 904, 0),
        (file, False, 8192, 808, 0, 0),
    )


def test_a_closed_descriptor_is_a_fault(engine: _native.IoEngine, tmp_path: Path) -> None:
    opened = os.open(tmp_path / "read only", os.O_RDONLY | os.O_CREAT)
    file = engine.add_file(opened, 1)
    data = torch.zeros(10, dtype=torch.uint8)
    fault = engine.transfer([(True, file, 7, data.data_ptr(), 10)])
    os.close(opened)
    assert fault == (file, True, 7, 10, 0, 9)


def test_files_may_be_added_later(engine: _native.IoEngine, tmp_path: Path) -> None:
    opened = [os.open(tmp_path / str(i), os.O_RDWR | os.O_CREAT) for i in range(4)]
    for i, descriptor in enumerate(opened):
        assert engine.add_file(descriptor, 1) == i
        data = torch.full((100,), i + 1, dtype=torch.uint8)
        assert engine.transfer([(True, f, 0, data.data_ptr(), 100) for f in range(i + 1)]) is None
    assert [os.pread(descriptor, 1, 0) for descriptor in opened] == [b"\x04"] * 4
    for descriptor in opened:
        os.close(descriptor)


def test_refusals(engine: _native.IoEngine, descriptor: int) -> None:
    file = engine.add_file(descriptor, 512)
    for request in [(True, file + 1, 0, 0, 0), (True, file, 1, 0, 512), (True, file, 0, 0, 100)]:
        with pytest.raises(ValueError, match=r"not known|multiples of 512"):
            engine.transfer([request])
    with pytest.raises(ValueError, match="not an open file"):
        engine.add_file(-1, 1)
    engine.close()
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.transfer([(True, file, 0, 0, 512)])


@pytest.mark.parametrize(
    ("kind", "depth", "block"), [("magic", 1, 4096), ("threads", 1, 0), ("threads", 1, 4097)]
)
def test_unfit_settings(kind: str, depth: int, block: int) -> None:
    with pytest.raises(ValueError, match=r"not known|positive multiple of 4096"):
        _native.IoEngine(kind, depth, block)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_refused(engine: _native.IoEngine, descriptor: int) -> None:
    file = engine.add_file(descriptor, 1)
    data = torch.zeros(100, dtype=torch.uint8)
    assert engine.transfer([(True, file, 0, data.data_ptr(), 100)]) is None
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            engine.transfer([(True, file, 0, data.data_ptr(), 100)])
        except RuntimeError as error:
            os.write(writer, str(error).encode())
        engine.close()
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    answer = os.read(reader, 1000).decode()
    os.close(reader)
    assert "belongs to the parent process" in answer
    assert engine.transfer([(True, file, 0, data.data_ptr(), 100)]) is None


# ------------------------------------------------------------------ checksums


def sum_of(data: bytes, *, portable: bool = False) -> int:
    memory = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)
    return _native.crc32c(memory.data_ptr(), len(data), portable)


@pytest.mark.parametrize("portable", [False, True])
def test_known_checksums(portable: bool) -> None:
    """The vectors of RFC 3720, appendix B.4."""
    assert sum_of(b"123456789", portable=portable) == 0xE3069283
    assert sum_of(bytes(32), portable=portable) == 0x8A9136AA
    assert sum_of(b"\xff" * 32, portable=portable) == 0x62A8AB43
    assert sum_of(bytes(range(32)), portable=portable) == 0x46DD794E
    assert sum_of(b"", portable=portable) == 0


@given(st.binary(max_size=200))
def test_both_ways_of_summing_agree(data: bytes) -> None:
    assert sum_of(data) == sum_of(data, portable=True)


def test_blocks_are_summed_and_compared() -> None:
    data = torch.randint(0, 256, (10_000,), dtype=torch.uint8)
    sums = torch.zeros(3, dtype=torch.int32)
    _native.block_sums(data.data_ptr(), 10_000, 4096, sums.data_ptr())
    assert [value & 0xFFFFFFFF for value in sums.tolist()] == [
        sum_of(data[start : start + 4096].numpy().tobytes()) for start in (0, 4096, 8192)
    ]
    compare = (data.data_ptr(), 10_000, 4096, sums.data_ptr())
    assert _native.first_mismatch(*compare) == -1
    data[9999] ^= 1
    assert _native.first_mismatch(*compare) == 2
    data[4096] ^= 128
    assert _native.first_mismatch(*compare) == 1
    sums[1] = 0  # nobody wrote it
    assert _native.first_mismatch(*compare) == 2
